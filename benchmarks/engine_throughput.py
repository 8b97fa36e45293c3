"""Compares an engine's tokens/s under the orchestrator and under a bare load generator.

    python benchmarks/engine_throughput.py --quick                            the tiny model on the CPU
    python benchmarks/engine_throughput.py --json results.json                one GPU, Qwen2.5-3B shape

One vLLM server, launched as in a run, is loaded in turn by both, with the same requests in the same order (prompts,
seeds, lengths), over the same route, with logprobs and binary responses:

    orchestrator  the loops of a run: prompts, groups, request slots, a rollout worker, rewards, record. Its
                  trainer returns at once, and no weights are sent
    bare          as many coroutines as the server has slots, each with one connection; answers are only counted

Answers have log-normal lengths. A first load by the orchestrator warms up, records the requests, and finds the number
of computed tokens when the last of them is sent. Every other load is measured from a tenth to nine tenths of that, by
the engine's step meter, between the same two points of the same work, while every slot is in use. So neither filling
nor draining counts. At the second point the load ends: its connections are closed, and the next begins when the engine
is idle, with an empty prefix cache.

One load is not conclusive. The engine's process uses a whole core, so steps take longer by a tenth or a third for
seconds at a time under either load. So loads go in pairs, in the order A B, B A, A B, ..., and the ratio is estimated
from the pairs with its confidence interval (`paired.py` explains the method and its assumptions). The aim is met when
the whole interval is above it.

A ratio of tokens/s is the product of a ratio of tokens per step and one of steps per second. A driver determines only
the first, by what it asks for and when (an empty slot is one token less in every step), and it hardly varies. The
second also includes the speed of the machine. Each load also reports mean running requests, the share of steps that
began requests (they cost more), idle time, and the cores used by the engine process, the HTTP process and this one.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

from command_line import parser_of, positive, require_gpus, show
from forced_lengths import Lengths, forced
from loaded_engine import Sample, Server, started, under_generator, work
from paired import Estimate, estimate, order_of_pair
from tests.fakes.run import FakeWeightSync, fake_run
from whole_run import Case, add_arguments

from telescope.inference.client import EngineClient
from telescope.inference.vllm import adapter as wire
from telescope.orchestrator.supervision import Supervisor

AIM = 0.97
LOADS = ("orchestrator", "bare")
WINDOW = (0.1, 0.9)
"""Measured range of a load, in shares of the tokens computed when the last request is sent."""
REQUESTS_PER_SLOT = {False: 3, True: 16}
"""Without and with --quick, whose short answers would otherwise end a load before it is measured."""
LOAD_TIMEOUT = 600.0
RATIOS: dict[str, Callable[[dict[str, Any]], float]] = {
    "tokens_per_second": lambda load: load["tokens_per_second"],
    "tokens_a_step": lambda load: load["tokens_a_step"],
    "steps_per_second": lambda load: 1000 / load["ms_a_step"],
}
"""Compared numbers; the first is the product of the others."""
CORES = ("engine", "server", "driver")


def main() -> int:
    begun = time.monotonic()
    parser = parser_of(__doc__, "the tiny model on the CPU")
    add_arguments(parser, port=8860)
    add = parser.add_argument
    add("--requests", type=positive, help="requests of one load (default: 3 per request slot, with --quick 16)")
    add("--repeats", type=positive, default=6, help="pairs of loads, fewer if --seconds have passed (default: 6)")
    add("--seconds", type=positive, help="begin no pair that may end later than this after the benchmark's start")
    add("--engine-cores", type=positive, help="cores reserved for the engine (default: none)")
    arguments = parser.parse_args()
    require_gpus(parser, quick=arguments.quick)
    case = Case.of(arguments)
    deadline = begun + arguments.seconds if arguments.seconds else None
    with started(case, "throughput", arguments.engine_cores) as server:
        requests = arguments.requests or REQUESTS_PER_SLOT[arguments.quick] * server.config.lanes_per_server
        bench = Bench(server, case.lengths, requests)
        results = asyncio.run(bench.measure(arguments.repeats, deadline, lambda results: case.report(**results)))
    print_results(results)
    return 0


@dataclass(frozen=True)
class Span:
    """The measured part of a load, in tokens computed by the engine since its beginning."""

    low: float
    high: float

    def of(self, samples: Sequence[Sample]) -> list[Sample]:
        """Returns the samples in this range; `samples` ends with the first at or beyond `high`."""
        begin = samples[0].reading.tokens
        return [sample for sample in samples if sample.reading.tokens - begin >= self.low]


class Bench:
    """Loads for one server, in whole batches of requests. Its folder gets the records of the runs."""

    def __init__(self, server: Server, lengths: Lengths, requests: int) -> None:
        batch = server.config.prompts_batch_size_for_trainer * server.config.group_size
        steps = max(2, round(requests / batch))
        # Only request slots limit what is in flight, as in a run that is ahead of its trainer.
        self._config = server.config.replace(number_of_steps=steps, max_async_rollout=steps)
        self._requests = steps * batch
        self.server = server
        self._lengths = lengths
        server.folder.mkdir(parents=True, exist_ok=True)

    async def measure(
        self, repeats: int, deadline: float | None, save: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any]:
        """Loads the server alternately until there are `repeats` pairs, or time (monotonic) is over.

        Returns the results, which are also saved after each pair: an interrupted benchmark keeps the finished pairs.
        """
        loads: list[dict[str, Any]] = []
        results: dict[str, Any] = {}
        trace, span = await self._warm_up()
        longest = 0.0
        for pair in range(repeats):
            begun = time.monotonic()
            if pair and deadline is not None and begun + longest > deadline:
                break
            for load in order_of_pair(pair, LOADS):
                samples = await self._load(load, f"run-{pair}", trace, span)
                loads.append({"load": load, "pair": pair, **work(span.of(samples))})
                print(f"{load}: {loads[-1]['tokens_per_second']:,.0f} tokens/s", file=sys.stderr)
            longest = max(longest, time.monotonic() - begun)
            what = {"requests": self._requests, "lanes": self._config.lanes_per_server, "window": asdict(span)}
            results = what | compared(loads) | {"runs": list(loads)}
            save(results)
        return results

    async def _warm_up(self) -> tuple[list[bytes], Span]:
        """Returns the request bodies in the order of sending, and the range to measure."""
        sent: list[bytes] = []
        tokens = -self.server.reading().tokens

        def note(body: bytes) -> None:
            nonlocal tokens
            sent.append(body)
            if len(sent) == self._requests:
                tokens += self.server.reading().tokens

        await self._under_orchestrator("warm-up", note, lambda _: len(sent) >= self._requests)
        print(f"warm-up: {tokens:,} tokens until {self._requests:,} requests were sent", file=sys.stderr)
        return sent, Span(*(share * tokens for share in WINDOW))

    async def _load(self, load: str, name: str, trace: Sequence[bytes], span: Span) -> list[Sample]:
        """Returns samples from the beginning of a load until its window closes."""
        begin = self.server.reading().tokens

        def closes(sample: Sample) -> bool:
            return sample.reading.tokens - begin >= span.high

        if load == "bare":
            return await self._under_generator(trace, closes)
        sent: list[bytes] = []
        samples = await self._under_orchestrator(name, sent.append, closes)
        assert counted_requests(sent) <= counted_requests(trace), "the orchestrator sent other requests"
        check_tail(len(sent) < len(trace), len(trace))
        return samples

    async def _under_orchestrator(
        self, name: str, note: Callable[[bytes], None], until: Callable[[Sample], bool]
    ) -> list[Sample]:
        """Runs the loops without a trainer; `note` gets the request bodies in the order of sending."""
        encode = wire.encode_generate

        def noted(*arguments: Any, **options: Any) -> bytes:
            body = encode(*arguments, **options)
            note(body)
            return body

        async def no_weights(self: FakeWeightSync) -> dict[str, float]:
            return {}

        async with self._client() as client:
            with (
                forced(self._lengths),
                patch.object(wire, "encode_generate", noted),
                patch.object(FakeWeightSync, "sync", no_weights),
            ):
                run_dir = self.server.folder / name
                async with fake_run(self._config, run_dir, [self.server], [client]) as run:
                    supervisor = Supervisor()
                    supervisor.spawn(run.servers.watch(), "server watch")
                    supervisor.spawn(run.orchestrator.run(supervisor), "orchestrator")
                    samples: list[Sample] = await supervisor.run_until(self._watch(until))
                    if masked := run.status.num_masked_samples:
                        raise RuntimeError(f"{masked} samples failed under the orchestrator; see {run_dir}")
        await self.server.until_idle()
        return samples

    async def _under_generator(self, trace: Sequence[bytes], until: Callable[[Sample], bool]) -> list[Sample]:
        """Sends the same requests from as many connections as there are request slots."""
        waiting = iter(trace)
        async with self._client():
            supervisor = Supervisor()
            supervisor.spawn(under_generator(self.server, waiting, self._config.lanes_per_server), "generator")
            samples: list[Sample] = await supervisor.run_until(self._watch(until))
        check_tail(next(waiting, None) is not None, len(trace))
        await self.server.until_idle()
        return samples

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[EngineClient]:
        """Yields a client of the server after emptying its prefix cache."""
        client = self.server.client()
        try:
            await empty_prefix_cache(client)
            yield client
        finally:
            await client.close()

    async def _watch(self, until: Callable[[Sample], bool]) -> list[Sample]:
        try:
            async with asyncio.timeout(LOAD_TIMEOUT):
                return [sample async for sample in self.server.samples(until)]
        except TimeoutError:
            raise TimeoutError(f"the window of a load did not close within {LOAD_TIMEOUT:.0f} s") from None


async def empty_prefix_cache(client: EngineClient) -> None:
    """Raises RuntimeError when vLLM reports (with 200) that running requests kept blocks."""
    answer = json.loads(await client._control("POST", "/reset_prefix_cache"))
    if not answer["success"]:
        raise RuntimeError("the prefix cache was not emptied: requests of the last load are still in the engine")


def check_tail(is_left: bool, requests: int) -> None:
    """Raises RuntimeError unless a request was left when the window closed."""
    if not is_left:
        raise RuntimeError(f"all {requests} requests were sent before the window closed: raise --requests")


def counted_requests(bodies: Sequence[bytes]) -> Counter[str]:
    """Counts the requests by content, without their ids."""
    requests = [json.loads(body) for body in bodies]
    return Counter(json.dumps({name: body[name] for name in body if name != "request_id"}) for body in requests)


def compared(loads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compares the orchestrator's loads with the bare ones, pair by pair."""
    pairs = [
        {load["load"]: load for load in loads if load["pair"] == pair} for pair in sorted({x["pair"] for x in loads})
    ]
    estimates = {
        name: estimate([value(pair["orchestrator"]) / value(pair["bare"]) for pair in pairs])
        for name, value in RATIOS.items()
    }
    whole = estimates["tokens_per_second"]
    return {
        "tokens_per_second": {
            name: statistics.median(load["tokens_per_second"] for load in loads if load["load"] == name)
            for name in LOADS
        },
        "ratio": whole.ratio,
        "aim": AIM,
        "aim_is": whole.verdict(AIM),
        "estimates": {name: asdict(value) for name, value in estimates.items()},
    }


def print_results(results: dict[str, Any]) -> None:
    show(
        ("load", "tokens/s", "running", "tokens a step", "ms a step", "begin some", "idle", *CORES),
        [
            (
                run["load"], f"{run['tokens_per_second']:,.0f}", f"{run['running']:.1f}", f"{run['tokens_a_step']:.1f}",
                f"{run['ms_a_step']:.2f}", f"{run['beginning_share']:.1%}", f"{run['idle_share']:.1%}",
                *(f"{run[f'{name}_cores']:.0%}" for name in CORES),
            )
            for run in results["runs"]
        ],
        f"Engine throughput, {results['requests']:,} requests, {results['lanes']} at a time",
    )  # fmt: skip
    estimates = {name: Estimate(**value) for name, value in results["estimates"].items()}
    whole = estimates["tokens_per_second"]
    print(
        f"orchestrator of bare: {whole} with {whole.confidence:.0%} confidence, {whole.pairs} pairs; "
        f"aim {AIM:.0%}: {results['aim_is']}\n"
        f"of it tokens a step {estimates['tokens_a_step']}, steps a second {estimates['steps_per_second']}"
    )


if __name__ == "__main__":
    sys.exit(main())
