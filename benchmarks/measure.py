"""Shared by the benchmarks: CPU clocks, event-loop lag, and provenance of results."""

from __future__ import annotations

import asyncio
import math
import os
import platform
import resource
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # so that benchmarks can use the fakes of the tests

LAG_GRID_SECONDS = 0.025
"""Interval of the points at which lag is measured. A finer grid would cost the driver more than its own work when
little happens."""


class LagMeter:
    """Measures how late the event loop runs due callbacks, at evenly spaced points in time.

    A loop that is blocked for 100 ms is late for every point of that time, so a percentile is a share of time and a
    stall cannot hide behind calm periods. Includes time in which the kernel gave the core to other processes, and about
    1 ms of timer resolution.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lags: list[float] = []
        # Not the loop's own clock: uvloop's stands still during an iteration and would hide its delay.
        self._due = time.monotonic() + LAG_GRID_SECONDS
        self._timer = self._loop.call_later(LAG_GRID_SECONDS, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        while self._due <= now:
            self._lags.append(now - self._due)
            self._due += LAG_GRID_SECONDS
        self._timer = self._loop.call_later(self._due - now, self._tick)

    def take(self) -> list[float]:
        """Returns the lags since the last call, in seconds."""
        lags, self._lags = self._lags, []
        return lags

    def stop(self) -> None:
        self._timer.cancel()


class TimedSelector(selectors.DefaultSelector):
    """A selector for `asyncio.SelectorEventLoop` that measures CPU time of the loop's thread between two polls.

    Shows what `LagMeter` would measure on an otherwise idle core: waiting for other processes, or for the interpreter
    lock while another thread of this process has it, is not included.
    """

    def __init__(self) -> None:
        super().__init__()
        self._turns: list[float] = []
        self._started = time.thread_time()
        self._since = time.monotonic()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._turns.append(time.thread_time() - self._started)
        events = super().select(timeout)
        self._started = time.thread_time()
        return events

    def take(self) -> tuple[list[float], float]:
        """Returns CPU seconds of every iteration since the last call, and the elapsed time."""
        turns, self._turns = self._turns, []
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        return turns, seconds


def lag_of_turns(turns: Sequence[float], seconds: float, share: float) -> float:
    """Returns the delay of a callback due at a random moment that is exceeded with probability 1 - `share`, from
    iterations alone.

    It falls into an iteration of t seconds with probability t / seconds and waits for the rest of it, so it waits
    longer than x with probability sum(max(0, t - x)) / seconds; the result is the x for which that is 1 - share.
    """
    allowed = (1 - share) * seconds
    falling = sorted(turns, reverse=True)
    total = 0.0
    for count, turn in enumerate(falling, 1):
        total += turn
        lag = (total - allowed) / count
        if lag >= (falling[count] if count < len(falling) else 0.0):
            return max(0.0, lag)
    return 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least `share` (0 to 1) of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan


def lag_numbers(lags: Sequence[float], filling: Sequence[float]) -> dict[str, float]:
    """Returns percentiles of a lag in milliseconds, and its maximum while the request slots were filling."""
    return {
        "lag_p50_ms": 1000 * percentile(lags, 0.5),
        "lag_p99_ms": 1000 * percentile(lags, 0.99),
        "lag_max_ms": 1000 * max(lags),
        "lag_max_filling_ms": 1000 * max(filling),
    }


async def sleep_beside(run: asyncio.Task[Any], seconds: float) -> None:
    """Sleeps; raises the run's error if it ends meanwhile."""
    if (await asyncio.wait([run], timeout=seconds))[0]:
        run.result()
        raise RuntimeError("the run ended before the measurement")


def cpu_seconds() -> dict[str, float]:
    """Returns CPU seconds so far: `driver` is this process with all threads, `thread:<name>` one of them."""
    seconds = {"driver": time.process_time()}
    for thread in threading.enumerate():
        if thread.ident is not None:
            name = "thread:" + ("loop" if thread is threading.main_thread() else thread.name)
            seconds[name] = seconds.get(name, 0.0) + time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return seconds


def cpu_seconds_of(pids: Iterable[int]) -> float:
    """Returns CPU seconds so far of other processes of this machine, user and system."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_rss_mib() -> float:
    """Returns the peak resident memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def own_process() -> dict[str, float]:
    """Returns this process, its CPU seconds and its memory in MiB: resident, and the part that no other process has."""
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    kib = {line[0]: int(line[1]) for line in lines}
    private = kib["Private_Clean:"] + kib["Private_Dirty:"]
    return {
        "pid": os.getpid(), "cpu_seconds": time.process_time(), "rss_mib": kib["Rss:"] / 1024,
        "private_mib": private / 1024,
    }  # fmt: skip


def provenance(packages: Sequence[str]) -> dict[str, Any]:
    """Returns where, when and with which code a number was measured."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **sources("src", "benchmarks/*.py"),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpu_names(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "load_before": round(os.getloadavg()[0], 2),
    }


def machine(where: dict[str, Any]) -> str:
    """Returns the GPU of a `provenance`, else its CPU."""
    return str(where["gpus"][0] if where["gpus"] else where["cpu"])


def gpu_names() -> list[str]:
    """Returns the GPUs of this machine as the driver lists them; empty without one."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def sources(*paths: str) -> dict[str, Any]:
    """Returns the checked-out commit of this repository, and whether files of `paths` differ from it.

    SOURCE_COMMIT names the commit for a copy of the sources without its own history. Whether such a copy was changed is
    unknown (None), also for one inside another repository.
    """
    head = _git("rev-parse", "HEAD") if _git("rev-parse", "--show-prefix") == "" else None
    named = os.environ.get("SOURCE_COMMIT")
    is_theirs = head is not None and head.startswith(named or "")
    changes = _git("status", "--porcelain", "--", *paths) if is_theirs else None
    return {
        "commit": named or (_git("rev-parse", "--short", "HEAD") if head else None) or "unknown",
        "uncommitted_changes": None if changes is None else bool(changes),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _git(*arguments: str) -> str | None:
    """Returns git's output; None without git or a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
