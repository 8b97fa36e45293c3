"""Measures the cost of an engine step by running requests, and of seeds and logprobs.

    python benchmarks/engine_steps.py --quick                            the tiny model on the CPU
    python benchmarks/engine_steps.py --json results.json                one GPU, Qwen2.5-3B shape

One vLLM server, launched as in a run, gets a fixed number of requests at once, all with 64 prompt tokens and the same
number of tokens to sample. The engine's step meter counts steps while exactly that many run, so neither filling nor
draining counts. `engine` and `server` are the shares of a core that vLLM's two processes use meanwhile: the one that
schedules and launches, and the HTTP process. A process near 100 % is what the GPU waits for.

A run asks for the sampled tokens' logprobs and gives every request a seed; the rows without them show the cost of both.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

from command_line import parser_of, require_gpus, show
from loaded_engine import Sample, Server, started, under_generator, work
from whole_run import Case, add_arguments

from telescope.inference.base import GenerateRequest
from telescope.inference.vllm import adapter as wire

PROMPT_TOKENS, TOKENS = 64, 400
"""Tokens of a prompt and of an answer."""
FIRST_TOKEN, LAST_TOKEN = 100, 1000
"""Range of token ids in prompts; each shape's vocabulary has them."""
ASKED = {"as in a run": (), "no seeds": ("seed",), "no logprobs": ("logprobs",), "neither": ("seed", "logprobs")}
"""Sampling parameters that are removed from a request."""


def main() -> int:
    parser = parser_of(__doc__, "the tiny model on the CPU")
    add_arguments(parser, port=8880)
    arguments = parser.parse_args()
    require_gpus(parser, quick=arguments.quick)
    running = [4, 16] if arguments.quick else [16, 64, 256]
    case = Case.of(arguments)
    with started(case, "steps", max_num_seqs=max(running)) as server:
        rows = asyncio.run(measure(server, running))
    show(
        ("asked for", "running", "ms a step", "tokens/s", "engine", "server"),
        [
            (
                row["asked"], str(row["running"]), f"{row['ms_a_step']:.2f}", f"{row['tokens_per_second']:,.0f}",
                f"{row['engine_cores']:.0%}", f"{row['server_cores']:.0%}",
            )
            for row in rows
        ],
        "Steps of an engine",
    )  # fmt: skip
    case.report(lengths=None, rows=rows)
    return 0


async def measure(server: Server, running: Sequence[int]) -> list[dict[str, Any]]:
    """Returns one row for each of `ASKED` and `running`, after a first load that warms up."""
    await under_generator(server, requests(max(running), 20, ()), max(running))
    rows = []
    for count in running:
        for name, without in ASKED.items():
            samples = await watched(server, requests(count, TOKENS, without), count)
            rows.append({"asked": name, **cost(samples, count), "running": count})
            print(f"{count} running, {name}: {rows[-1]['ms_a_step']:.2f} ms a step", file=sys.stderr)
    return rows


async def watched(server: Server, bodies: Sequence[bytes], count: int) -> list[Sample]:
    """Returns samples of meter and processes while these are answered, `count` at a time."""
    load = asyncio.create_task(under_generator(server, bodies, count))
    samples = [sample async for sample in server.samples(lambda _: load.done())]
    await load
    return samples


def requests(count: int, tokens: int, without: Sequence[str]) -> list[bytes]:
    """Returns bodies of `count` requests with distinct prompts, without some sampling parameters."""
    draw = random.Random(count)
    bodies = []
    for index in range(count):
        prompt = [draw.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(PROMPT_TOKENS)]
        request = GenerateRequest(f"r{index}", prompt, max_tokens=tokens, temperature=1.0, seed=index, ignore_eos=True)
        body = json.loads(wire.encode_generate(request))
        for name in without:
            del body["sampling_params"][name]
        bodies.append(json.dumps(body).encode())
    return bodies


def cost(samples: Sequence[Sample], running: int) -> dict[str, float]:
    """Returns the cost of a step while exactly `running` requests ran."""
    full = [sample for sample in samples if sample.reading.running == running]
    if len(full) < 2 or full[-1].reading.steps == full[0].reading.steps:
        raise RuntimeError(f"{running} requests never ran at once for long enough: raise TOKENS")
    return work(full)


if __name__ == "__main__":
    sys.exit(main())
