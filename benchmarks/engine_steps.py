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

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loaded_engine import Sample, Server, started, under_generator, work
from measure import positive, provenance, require_gpus
from rich.console import Console
from rich.table import Table
from whole_run import (
    FIELDS,
    QUICK_FIELDS,
    QUICK_SHAPE,
    add_arguments,
    fields_of,
    gpu_names,
    packages,
    prepare_model,
    write_report,
)

from telescope.config import TelescopeConfig
from telescope.inference.base import GenerateRequest
from telescope.inference.vllm import adapter as wire

PROMPT_TOKENS = 64
FIRST_TOKEN, LAST_TOKEN = 100, 1000
"""Range of token ids in prompts; each shape's vocabulary has them."""
ASKED = {"as in a run": (), "no seeds": ("seed",), "no logprobs": ("logprobs",), "neither": ("seed", "logprobs")}
"""Sampling parameters that are removed from a request."""


def main() -> int:
    arguments = parse()
    shape = arguments.shape or (QUICK_SHAPE if arguments.quick else "qwen2.5-3b")
    where = provenance(packages()) | {"gpus": gpu_names()}
    with tempfile.TemporaryDirectory(prefix="telescope-steps-") as temporary:
        folder = arguments.folder or Path(temporary)
        model = prepare_model(folder, shape, on_gpu=not arguments.quick)
        fields = FIELDS | (QUICK_FIELDS if arguments.quick else {})
        fields |= {"inference_num_workers": 1, "model": str(model), "max_num_seqs": max(arguments.running)}
        fields |= fields_of(arguments.set) | {"inference_base_port": arguments.port}
        config = TelescopeConfig.model_validate(fields)
        with started(config, model, folder / "steps") as server:
            rows = asyncio.run(measure(server, arguments.running, arguments.tokens, arguments.asked))
    show(rows)
    if arguments.json:
        write_report(arguments.json, "engine_steps", where, shape, None, fields, {"rows": rows})
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, port=8880)
    add = parser.add_argument
    add("--running", type=positive, nargs="+", help="requests at once (default: 16 64 256, with --quick 4 16)")
    add("--tokens", type=positive, help="tokens of each answer (default: 400, with --quick 100)")
    add("--asked", nargs="+", choices=list(ASKED), default=list(ASKED), help="what is asked for (default: all)")
    arguments = parser.parse_args()
    require_gpus(parser, quick=arguments.quick)
    arguments.running = arguments.running or ([4, 16] if arguments.quick else [16, 64, 256])
    arguments.tokens = arguments.tokens or (100 if arguments.quick else 400)
    return arguments


async def measure(server: Server, running: Sequence[int], tokens: int, asked: Sequence[str]) -> list[dict[str, Any]]:
    """Returns one row for each of `asked` and `running`, after a first load that warms up."""
    await under_generator(server, requests(max(running), 20, ()), max(running))
    rows = []
    for count in running:
        for name in asked:
            samples = await watched(server, requests(count, tokens, ASKED[name]), count)
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
        raise RuntimeError(f"{running} requests never ran at once for long enough: raise --tokens")
    return work(full)


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="Steps of an engine")
    for title in ("running", "asked for", "ms a step", "tokens/s", "engine", "server"):
        table.add_column(title, justify="left" if title == "asked for" else "right")
    for row in rows:
        cores = (f"{row['engine_cores']:.0%}", f"{row['server_cores']:.0%}")
        rate = f"{row['tokens_per_second']:,.0f}"
        table.add_row(str(row["running"]), row["asked"], f"{row['ms_a_step']:.2f}", rate, *cores)
    Console(width=None if sys.stdout.isatty() else 100).print(table)


if __name__ == "__main__":
    sys.exit(main())
