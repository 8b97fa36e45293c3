"""Counts an engine's steps: busy seconds, steps and tokens.

Owns the counters, the small memory-mapped file that carries them out of the engine's process, and the middleware that
adds them to the server's `/metrics`. `scheduler` does the counting. vLLM's own metrics count running requests, which
does not measure work: during a pause they all still count as running.

Invariants: one process writes a file, any number read it at any time; a reader never sees a half-written state; a new
engine begins with zeros. `busy_seconds` of a reading includes the elapsed part of the current step, so the difference
of two readings, divided by the difference of their `clock`, is exactly the share of time with a scheduled step.
"""

import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from telescope.inference.base import METRICS_ROUTE

STEP_METER_VARIABLE = "TELESCOPE_STEP_METER"
"""Environment variable with the path of the file, set in every process of a server."""

_LAYOUT = struct.Struct("<QQddQQQQ")
"""Number of writes begun and ended (odd during a write), the writer's pid, busy seconds so far, start of the current
step (0: none), steps, tokens, running requests, steps that began requests."""
_WRITES = struct.Struct("<Q")

READ_ATTEMPTS = 1000
"""A write takes microseconds, so this many unfinished ones in a row mean that the writer exited during one."""


@dataclass(frozen=True, slots=True)
class StepReading:
    """An engine's counters at the monotonic time `clock`. All processes of a machine share that clock."""

    clock: float
    busy_seconds: float
    steps: int
    tokens: int
    """Tokens computed by finished steps, sampled and prompt tokens together."""
    running: int
    """Requests in the batch after the last finished step."""
    beginning_steps: int = 0
    """Steps that began requests. They compute prompts, so a GPU cannot replay them whole as a graph."""


class StepMeter:
    """Counts steps into `path`. `now` is the clock (tests)."""

    def __init__(self, path: Path, now: Callable[[], float] = time.monotonic) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A new file, so that readers of the previous engine's file see no jump in the counters.
        path.unlink(missing_ok=True)
        with open(path, "xb+") as file:
            file.truncate(_LAYOUT.size)
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._now = now
        self._pid = os.getpid()
        self._writes = 0
        self._in_flight = 0
        self._busy_seconds = 0.0
        self._busy_since = 0.0
        self._steps = 0
        self._tokens = 0
        self._running = 0
        self._beginning_steps = 0
        self._write()

    def scheduled(self) -> None:
        """Records that a step with tokens was scheduled."""
        self._in_flight += 1
        if self._in_flight == 1:
            self._busy_since = self._now()
            self._write()

    def finished(self, tokens: int, running: int, *, began: bool = False) -> None:
        """Counts the oldest scheduled step as finished."""
        assert self._in_flight > 0, "a step finished that was not scheduled"
        self._in_flight -= 1
        self._steps += 1
        self._tokens += tokens
        self._running = running
        self._beginning_steps += began
        if self._in_flight == 0:
            self._busy_seconds += self._now() - self._busy_since
            self._busy_since = 0.0
        self._write()

    def _write(self) -> None:
        self._writes += 1
        _WRITES.pack_into(self._memory, 0, self._writes)
        state = (self._pid, self._busy_seconds, self._busy_since, self._steps, self._tokens, self._running)
        _LAYOUT.pack_into(self._memory, 0, self._writes, *state, self._beginning_steps)
        self._writes += 1
        _WRITES.pack_into(self._memory, 0, self._writes)


def read_meter(path: Path) -> StepReading | None:
    """Returns the counters. None before an engine has created the file, and after its exit."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), _LAYOUT.size, access=mmap.ACCESS_READ) as memory:
            for _ in range(READ_ATTEMPTS):
                writes, pid, busy_seconds, busy_since, *counters = _LAYOUT.unpack_from(memory)
                clock = time.monotonic()
                if not psutil.pid_exists(pid):
                    return None  # an engine killed during a step would look busy forever
                if writes % 2 == 0 and _WRITES.unpack_from(memory)[0] == writes:
                    busy = busy_seconds + (max(clock - busy_since, 0.0) if busy_since else 0.0)
                    return StepReading(clock, busy, *counters)
    except (FileNotFoundError, ValueError):  # not created yet, or still empty
        return None
    return None


def meter_path(directory: Path, port: int) -> Path:
    """Returns the meter's path for the server on `port`. `directory` is the servers' folder in the run directory."""
    return directory / f"steps-{port}"


# --- in the server ------------------------------------------------------------------------------------------------

METRICS = (
    ("telescope:engine_clock_seconds", "gauge", "Monotonic time of these readings.", "clock"),
    ("telescope:engine_busy_seconds", "counter", "Seconds with a step scheduled and not finished.", "busy_seconds"),
    ("telescope:engine_steps", "counter", "Steps that computed tokens.", "steps"),
    ("telescope:engine_step_tokens", "counter", "Tokens computed, of prompts and answers.", "tokens"),
)
"""Name, kind, meaning, and field of `StepReading`."""


def metrics_text(reading: StepReading) -> bytes:
    """Formats the reading as Prometheus text."""
    lines = []
    for name, kind, meaning, field in METRICS:
        name += "_total" if kind == "counter" else ""
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name} {float(getattr(reading, field))!r}"]
    return ("\n".join(lines) + "\n").encode()


class StepMetricsMiddleware:
    """ASGI middleware that adds the meter to the server's `/metrics`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._path = Path(os.environ[STEP_METER_VARIABLE])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reading = None
        if scope["type"] == "http" and scope["path"].rstrip("/") == METRICS_ROUTE:
            reading = read_meter(self._path)
        if reading is None:
            await self._app(scope, receive, send)
            return
        more = metrics_text(reading)

        async def send_with_meter(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                message["headers"] = [
                    (name, str(int(value) + len(more)).encode() if name.lower() == b"content-length" else value)
                    for name, value in message.get("headers", ())
                ]
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                message["body"] = message.get("body", b"") + more
            await send(message)

        # Nothing can be appended to compressed text.
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"accept-encoding"]
        await self._app({**scope, "headers": headers}, receive, send_with_meter)
