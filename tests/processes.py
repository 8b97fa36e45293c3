"""Whether a process of a test runs, read in one piece: it can end between two looks at it."""

import time

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
