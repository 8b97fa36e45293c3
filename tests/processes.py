"""Whether a process of a test runs, read in one piece: it can end between two looks at it. Waits, and free ports."""

import asyncio
import socket
import time
from collections.abc import Callable

import psutil


def is_running(pid: int) -> bool:
    """Whether a process is there and is not a zombie."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def has_ended(*pids: int, seconds: float = 20.0) -> bool:
    """Whether all of some processes end within a time, also before their exit codes were read."""
    deadline = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def wait_for(condition: Callable[[], object], what: str = "it", seconds: float = 60.0) -> None:
    """Waits for what another thread or process does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.02)


async def eventually(condition: Callable[[], object], what: str = "it", seconds: float = 20.0) -> None:
    """Waits for what other tasks, threads or processes do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:g} s"
        await asyncio.sleep(0.02)


def free_port() -> int:
    """Returns a free TCP port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
