"""One vLLM server under a load: started as in a run, watched step by step, and known to be idle before the next load.

Owns the server's life, the readings of its step meter and of the CPU that its processes take, and what is worked out
from them. What loads it is the caller's, but for the least that can: `under_generator`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

import psutil

from telescope.config import TelescopeConfig
from telescope.inference.client import EngineClient
from telescope.inference.server import InferenceServer, ServerStatus
from telescope.inference.vllm import adapter as wire
from telescope.inference.vllm.step_meter import StepReading, meter_path, read_meter

READ_SECONDS = 0.05
ENGINE = "VLLM::"
"""How the titles of vLLM's processes begin, but for the one that speaks HTTP."""
QUIET_SECONDS = 0.3
"""An engine that schedules no step for so long runs nothing: with a request it always steps."""
IDLE_TIMEOUT = 60.0
"""Seconds for requests whose connections were closed to leave the engine."""


@dataclass(frozen=True)
class Sample:
    """The engine's counters, and the CPU seconds of its processes and of this one, at one moment."""

    reading: StepReading
    cpu: dict[str, float]


class Server:
    """The server with its client, and the handle that the orchestrator's pool asks for its state."""

    def __init__(self, server: InferenceServer, url: str, secret: str, meter: Path) -> None:
        self._server = server
        self._meter = meter
        self.url = url
        self.secret = secret
        serving = psutil.Process(server.info().pid)
        processes = [serving, *serving.children(recursive=True)]
        self._processes = [("engine" if ENGINE in " ".join(p.cmdline()) else "server", p) for p in processes]
        self._processes.append(("driver", psutil.Process()))

    async def status(self) -> ServerStatus:
        return self._server.status()

    async def dump_stacks(self) -> str:
        return ""

    def client(self) -> EngineClient:
        return EngineClient(self.url, self.secret, with_priority=True)

    def reading(self) -> StepReading:
        reading = read_meter(self._meter)
        assert reading is not None, "the engine is gone"
        return reading

    def sample(self) -> Sample:
        cpu = {"engine": 0.0, "server": 0.0, "driver": 0.0}
        for name, process in self._processes:
            times = process.cpu_times()
            cpu[name] += times.user + times.system
        return Sample(self.reading(), cpu)

    async def samples(self, until: Callable[[Sample], bool]) -> AsyncIterator[Sample]:
        """One every 50 ms, up to the first of which `until` is true, with it."""
        while True:
            sample = self.sample()
            yield sample
            if until(sample):
                return
            await asyncio.sleep(READ_SECONDS)

    async def until_idle(self, timeout: float = IDLE_TIMEOUT) -> None:
        """Wait until nothing runs. Raises TimeoutError when something still does after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        before = self.reading()
        while True:
            await asyncio.sleep(QUIET_SECONDS)
            now = self.reading()
            if is_quiet(before, now):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{now.running} requests of the last load still ran {timeout:.0f} s after its end: the engine was "
                    "not told to drop them, or does not answer (see its log)"
                )
            before = now


def is_quiet(before: StepReading, now: StepReading) -> bool:
    """Whether no step was scheduled or under way between two readings."""
    return (before.steps, before.busy_seconds) == (now.steps, now.busy_seconds)


@contextmanager
def started(config: TelescopeConfig, model: Path, folder: Path, engine_cores: int | None = None) -> Iterator[Server]:
    """A vLLM server as in a run, without Ray, and with as many threads for torch's operators as Ray would give it.

    `engine_cores` gives its processes so many cores of this machine for their own; this process, and what it starts
    from then on, gets the others.
    """
    secret = secrets.token_urlsafe(32)
    server = InferenceServer(config, 0, config.inference_base_port, "127.0.0.1", secret, str(model), folder)
    allowed = sorted(os.sched_getaffinity(0))
    try:
        if engine_cores is not None:
            if not 0 < engine_cores < len(allowed):
                raise ValueError(f"--engine-cores is {engine_cores}: use 1 to {len(allowed) - 1}, of {len(allowed)}")
            os.sched_setaffinity(0, allowed[:engine_cores])
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, int(config.ray_inference_cpus_per_worker))))
        with patch.dict(os.environ, OMP_NUM_THREADS=threads):
            url = server.start().url
        if engine_cores is not None:
            os.sched_setaffinity(0, allowed[engine_cores:])
        yield Server(server, url, secret, meter_path(folder / "inference", config.inference_base_port))
    finally:
        os.sched_setaffinity(0, allowed)
        server.stop()


async def under_generator(server: Server, requests: Iterable[bytes], lanes: int) -> None:
    """These requests, `lanes` at a time, with as little as it takes. Cancelled, it closes its connections."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = (
        f"POST {wire.GENERATE_ROUTE} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {server.secret}\r\n"
        f"Content-Type: application/json\r\nAccept: {wire.PACKED_TYPE}, application/json\r\nContent-Length: "
    ).encode()
    waiting = iter(requests)

    async def lane() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        with closing(writer):
            for body in waiting:
                writer.write(b"%s%d\r\n\r\n%s" % (head, len(body), body))
                answer = await reader.readuntil(b"\r\n\r\n")
                if not answer.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(f"the server answered {answer[:200]!r}")
                length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.partition(b":")[2]))

    await asyncio.gather(*(lane() for _ in range(lanes)))


def work(window: Sequence[Sample]) -> dict[str, float]:
    """What the engine did from the first sample to the last, and what its steps cost.

    `running` is the mean of the readings; `beginning_share` the share of steps that began requests; `idle_share` the
    share of time without a scheduled step; `<process>_cores` what the processes took of a core.
    """
    first, last = window[0], window[-1]
    seconds = last.reading.clock - first.reading.clock
    steps = last.reading.steps - first.reading.steps
    tokens = last.reading.tokens - first.reading.tokens
    return {
        "seconds": seconds,
        "steps": steps,
        "tokens_per_second": tokens / seconds,
        "tokens_a_step": tokens / steps,
        "ms_a_step": 1000 * seconds / steps,
        "running": fmean(sample.reading.running for sample in window),
        "beginning_share": (last.reading.beginning_steps - first.reading.beginning_steps) / steps,
        "idle_share": 1 - (last.reading.busy_seconds - first.reading.busy_seconds) / seconds,
        **{f"{name}_cores": (last.cpu[name] - first.cpu[name]) / seconds for name in first.cpu},
    }
