"""One vLLM server under a load, observed step by step.

Owns the server's lifetime, the readings of its step meter and of its processes' CPU time, and what is computed from
them. The caller provides the load, except for the simplest: `under_generator`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import psutil
from whole_run import Case

from telescope.config import TelescopeConfig
from telescope.inference.base import Address
from telescope.inference.client import EngineClient
from telescope.inference.server import InferenceServer, ServerStatus
from telescope.inference.vllm import adapter as wire
from telescope.inference.vllm.step_meter import StepReading, meter_path, read_meter

READ_SECONDS = 0.05
ENGINE = "VLLM::"
"""Prefix of vLLM's process titles, except for the HTTP process."""
QUIET_SECONDS = 0.3
"""An engine that schedules no step for this long is idle: with a request it always steps."""
IDLE_TIMEOUT = 60.0
"""Time limit in seconds for aborted requests to leave the engine."""


@dataclass(frozen=True)
class Sample:
    """The engine's counters, and CPU seconds of its processes and of this one, at one moment."""

    reading: StepReading
    cpu: dict[str, float]


class Server:
    """The server with its client and the handle that the orchestrator's pool uses."""

    def __init__(self, server: InferenceServer, config: TelescopeConfig, folder: Path, url: str, secret: str) -> None:
        self._server = server
        self._meter = meter_path(folder / "inference", config.inference_base_port)
        self.config = config
        self.folder = folder
        self.url = url
        self.secret = secret
        serving = psutil.Process(server.status().pid)
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
        assert reading is not None, "the engine has exited"
        return reading

    def sample(self) -> Sample:
        cpu = {"engine": 0.0, "server": 0.0, "driver": 0.0}
        for name, process in self._processes:
            times = process.cpu_times()
            cpu[name] += times.user + times.system
        return Sample(self.reading(), cpu)

    async def samples(self, until: Callable[[Sample], bool]) -> AsyncIterator[Sample]:
        """Yields a sample every 50 ms, up to and including the first for which `until` is true."""
        while True:
            sample = self.sample()
            yield sample
            if until(sample):
                return
            await asyncio.sleep(READ_SECONDS)

    async def until_idle(self) -> None:
        """Waits until the engine schedules and runs no step. Raises TimeoutError after a while."""
        deadline = time.monotonic() + IDLE_TIMEOUT
        before = self.reading()
        while True:
            await asyncio.sleep(QUIET_SECONDS)
            now = self.reading()
            if (before.steps, before.busy_seconds) == (now.steps, now.busy_seconds):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{now.running} requests of the last load still run {IDLE_TIMEOUT:.0f} s after its end: the engine "
                    "did not abort them, or does not respond (see its log)"
                )
            before = now


@contextmanager
def started(case: Case, name: str, engine_cores: int | None = None, **fields: Any) -> Iterator[Server]:
    """Starts one vLLM server as in a run, without Ray, with the torch threads that Ray would give it.

    `fields` are overridden by those of the case. `engine_cores` reserves that many cores of this machine for its
    processes; this process, and what it starts later, gets the others.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if engine_cores is not None and not 0 < engine_cores < len(allowed):
        raise ValueError(f"--engine-cores is {engine_cores}: use 1 to {len(allowed) - 1}, of {len(allowed)}")
    with case.model(name) as (root, model), ExitStack() as stack:
        folder, secret = root / name, secrets.token_urlsafe(32)
        own = {"model": str(model), "inference_base_port": case.arguments.port}
        case.fields.update({"inference_num_workers": 1, **fields, **case.fields, **own})
        config = TelescopeConfig.model_validate(case.fields)
        server = InferenceServer(config, Address(0, "127.0.0.1", case.arguments.port, secret), str(model), folder)
        stack.callback(server.stop)
        stack.callback(os.sched_setaffinity, 0, allowed)
        if engine_cores is not None:
            os.sched_setaffinity(0, allowed[:engine_cores])
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, int(config.ray_inference_cpus_per_worker))))
        with patch.dict(os.environ, OMP_NUM_THREADS=threads):
            url = server.start().url
        if engine_cores is not None:
            os.sched_setaffinity(0, allowed[engine_cores:])
        yield Server(server, config, folder, url, secret)


async def under_generator(server: Server, requests: Iterable[bytes], slots: int) -> None:
    """Sends these requests, `slots` at a time, at minimal cost. Closes its connections when cancelled."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = (
        f"POST {wire.GENERATE_ROUTE} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {server.secret}\r\n"
        f"Content-Type: application/json\r\nAccept: {wire.PACKED_TYPE}, application/json\r\nContent-Length: "
    ).encode()
    waiting = iter(requests)

    async def slot() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        with closing(writer):
            for body in waiting:
                writer.write(b"%s%d\r\n\r\n%s" % (head, len(body), body))
                answer = await reader.readuntil(b"\r\n\r\n")
                if not answer.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(f"the server answered {answer[:200]!r}")
                length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.partition(b":")[2]))

    await asyncio.gather(*(slot() for _ in range(slots)))


def work(window: Sequence[Sample]) -> dict[str, float]:
    """Summarizes the engine's work from the first sample to the last.

    `running` is the mean of the readings; `beginning_share` the share of steps that began requests; `idle_share` the
    share of time without a scheduled step; `<process>_cores` the CPU use of each process in cores.
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
