"""What the orchestrator costs an engine: tokens/s under its sampling loop against a bare load generator's.

    python benchmarks/engine_throughput.py --quick                            the tiny model on the CPU
    python benchmarks/engine_throughput.py --json results.json                one GPU, Qwen2.5-3B shape

One vLLM server, launched as in a run, is loaded in turn by both, with the same requests in the same order (prompts,
seeds, lengths), over the same route, with logprobs and answers as arrays:

  orchestrator  the loops of a run: draws, groups, lanes, environment processes, rewards, record. Its trainer returns at
                once, and no weights are sent
  bare          as many coroutines as the server has lanes, each with one connection; what comes back is counted

Answers have log-normal lengths. Tokens are counted by the engine itself (its step meter: prompts and answers), over
the middle of the load: from the moment at which a fifth of all tokens is there to the one at which four fifths are, so
that neither filling nor draining counts. The server's prefix cache is emptied before each load, and a first load by the
orchestrator warms up and writes down the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from forced_lengths import Lengths, forced
from measure import positive, provenance, require_gpus
from rich.console import Console
from rich.table import Table
from whole_run import (
    FIELDS,
    LENGTHS,
    QUICK_FIELDS,
    QUICK_LENGTHS,
    QUICK_SHAPE,
    add_arguments,
    fields_of,
    gpu_names,
    packages,
    prepare_model,
    write_report,
)

from telescope.config import TelescopeConfig
from telescope.inference import vllm_adapter as wire
from telescope.inference.client import EngineClient
from telescope.inference.server import InferenceServer, ServerStatus
from telescope.inference.step_meter import meter_path, read_meter
from telescope.orchestrator.fake_run import FakeWeightSync, fake_run
from telescope.orchestrator.supervise import Supervisor

AIM = 0.97
RESET_CACHE_ROUTE = "/reset_prefix_cache"
READ_SECONDS = 0.05
MIDDLE = (0.2, 0.8)
"""Shares of all tokens between which tokens/s is taken."""


def main() -> int:
    arguments = parse()
    lengths = QUICK_LENGTHS if arguments.quick else LENGTHS
    shape = arguments.shape or (QUICK_SHAPE if arguments.quick else "qwen2.5-3b")
    where = provenance(packages()) | {"gpus": gpu_names()}
    with tempfile.TemporaryDirectory(prefix="telescope-throughput-") as temporary:
        folder = arguments.folder or Path(temporary)
        model = prepare_model(folder, shape, on_gpu=not arguments.quick)
        fields = FIELDS | (QUICK_FIELDS if arguments.quick else {})
        fields |= {"inference_num_workers": 1, "model": str(model)} | fields_of(arguments.set)
        fields["inference_base_port"] = arguments.port
        config = TelescopeConfig.model_validate(fields)
        with started(config, model, folder / "throughput") as server:
            results = asyncio.run(measure(config, server, folder / "throughput", lengths, arguments))
    show(results)
    if arguments.json:
        write_report(arguments.json, "engine_throughput", where, shape, lengths, fields, results)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, port=8860)
    add = parser.add_argument
    add("--requests", type=positive, help="requests of one load (default: 6 for each lane)")
    add("--repeats", type=positive, default=3, help="times that each of the two loads the server (default: 3)")
    arguments = parser.parse_args()
    require_gpus(parser, quick=arguments.quick)
    return arguments


class Server:
    """The server with its client, and the handle that the orchestrator's pool asks for its state."""

    def __init__(self, server: InferenceServer, url: str, secret: str, meter: Path) -> None:
        self._server = server
        self.meter = meter
        self.url = url
        self.secret = secret

    async def status(self) -> ServerStatus:
        return self._server.status()

    async def dump_stacks(self) -> str:
        return ""

    @property
    def pid(self) -> int:
        """Of the process that answers; the engine's are its children."""
        return self._server.info().pid

    def client(self) -> EngineClient:
        return EngineClient(self.url, self.secret, with_priority=True)


@contextmanager
def started(config: TelescopeConfig, model: Path, folder: Path) -> Iterator[Server]:
    """A vLLM server as in a run, without Ray."""
    secret = secrets.token_urlsafe(32)
    server = InferenceServer(config, 0, config.inference_base_port, "127.0.0.1", secret, str(model), folder)
    try:
        url = server.start().url
        yield Server(server, url, secret, meter_path(folder / "inference", config.inference_base_port))
    finally:
        server.stop()


async def measure(
    config: TelescopeConfig, server: Server, folder: Path, lengths: Lengths, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Load the server by turns, and what came of it."""
    batch = config.prompts_batch_size_for_trainer * config.group_size
    wanted = arguments.requests or 6 * config.lanes_per_server
    steps = max(2, round(wanted / batch))
    # Lanes alone bound what is in flight, as in a run that is ahead of its trainer.
    config = config.replace(number_of_steps=steps, max_async_rollout=steps)
    runs: list[dict[str, float]] = []
    trace: list[bytes] = []
    for repeat in range(arguments.repeats + 1):
        for load in ("orchestrator", "bare") if repeat else ("orchestrator",):
            async with loaded(server) as meter:
                if load == "orchestrator":
                    run_dir = folder / f"run-{repeat}"
                    sent = await under_orchestrator(config, server, run_dir, lengths)
                    assert not trace or asked(trace) == asked(sent), "the orchestrator asked for other answers"
                    trace = trace or sent
                else:
                    await under_generator(server, trace, config.lanes_per_server)
            result = {"load": load, "repeat": repeat, **meter.result()}
            print(f"{load}: {result['tokens_per_second']:,.0f} tokens/s", file=sys.stderr)
            if repeat:
                runs.append(result)
    medians = {
        load: statistics.median(run["tokens_per_second"] for run in runs if run["load"] == load)
        for load in ("orchestrator", "bare")
    }
    return {
        "requests": len(trace),
        "lanes": config.lanes_per_server,
        "tokens_per_second": medians,
        "ratio": medians["orchestrator"] / medians["bare"],
        "runs": runs,
    }


class TokenMeter:
    """Reads how many tokens the engine has computed while it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._readings: list[tuple[float, float]] = []

    async def read(self) -> None:
        while True:
            reading = read_meter(self._path)
            assert reading is not None, "the engine is gone"
            self._readings.append((reading.clock, float(reading.tokens)))
            await asyncio.sleep(READ_SECONDS)

    def result(self) -> dict[str, float]:
        """Tokens per second over the middle of the load, and over all of it."""
        first, last = self._readings[0][1], self._readings[-1][1]
        (start, low), (end, high) = (self._reached(first + share * (last - first)) for share in MIDDLE)
        begun = self._readings[0][0]
        whole = self._reached(last)[0] - begun
        return {
            "tokens_per_second": (high - low) / (end - start),
            "tokens": last - first,
            "seconds": whole,
            "tokens_per_second_with_ends": (last - first) / whole,
        }

    def _reached(self, tokens: float) -> tuple[float, float]:
        """The first reading with so many tokens."""
        return next(reading for reading in self._readings if reading[1] >= tokens)


@asynccontextmanager
async def loaded(server: Server) -> AsyncIterator[TokenMeter]:
    """Meter the server, which begins with an empty prefix cache."""
    client = server.client()
    await client._control("POST", RESET_CACHE_ROUTE)
    await client.close()
    meter = TokenMeter(server.meter)
    reading = asyncio.create_task(meter.read())
    await asyncio.sleep(2 * READ_SECONDS)
    try:
        yield meter
        await asyncio.sleep(3 * READ_SECONDS)
    finally:
        reading.cancel()
        await asyncio.wait([reading])


def asked(trace: Sequence[bytes]) -> list[str]:
    """What was asked for, whoever was to answer it when: the requests without their ids."""
    bodies = [json.loads(body) for body in trace]
    return sorted(json.dumps({name: body[name] for name in body if name != "request_id"}) for body in bodies)


async def under_orchestrator(config: TelescopeConfig, server: Server, run_dir: Path, lengths: Lengths) -> list[bytes]:
    """One run of the loops without a trainer; returns the bodies of its requests in the order of sending."""
    sent: list[bytes] = []
    encode = wire.encode_generate

    def noted(*arguments: Any, **options: Any) -> bytes:
        sent.append(encode(*arguments, **options))
        return sent[-1]

    async def no_weights(self: FakeWeightSync) -> dict[str, float]:
        return {}

    client = server.client()
    with (
        forced(lengths),
        patch.object(wire, "encode_generate", noted),
        patch.object(FakeWeightSync, "sync", no_weights),
    ):
        async with fake_run(config, run_dir, [server], [client]) as run:
            supervisor = Supervisor()
            supervisor.spawn(run.servers.watch(), "server watch")
            await supervisor.run_until(run.orchestrator.run(supervisor))
            masked = run.status.num_masked_samples
    await client.close()
    if masked:
        raise RuntimeError(f"{masked} samples failed under the orchestrator; see {run_dir}")
    return sent


async def under_generator(server: Server, trace: Sequence[bytes], lanes: int) -> None:
    """The same requests, `lanes` at a time, with as little as it takes."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = (
        f"POST {wire.GENERATE_ROUTE} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {server.secret}\r\n"
        f"Content-Type: application/json\r\nAccept: {wire.PACKED_TYPE}, application/json\r\nContent-Length: "
    ).encode()
    waiting = iter(trace)

    async def lane() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for body in waiting:
            writer.write(b"%s%d\r\n\r\n%s" % (head, len(body), body))
            answer = await reader.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the server answered {answer[:200]!r}")
            length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
        writer.close()

    await asyncio.gather(*(lane() for _ in range(lanes)))


def show(results: dict[str, Any]) -> None:
    table = Table(title=f"Engine throughput, {results['requests']:,} requests, {results['lanes']} at a time")
    for title in ("load", "tokens/s", "runs", "of bare", "aim"):
        table.add_column(title, justify="left" if title == "load" else "right")
    for load, tokens_per_second in results["tokens_per_second"].items():
        runs = " ".join(f"{run['tokens_per_second']:,.0f}" for run in results["runs"] if run["load"] == load)
        share, aim = (f"{results['ratio']:.1%}", f"{AIM:.0%}") if load == "orchestrator" else ("", "")
        table.add_row(load, f"{tokens_per_second:,.0f}", runs, share, aim)
    Console(width=None if sys.stdout.isatty() else 110).print(table)


if __name__ == "__main__":
    sys.exit(main())
