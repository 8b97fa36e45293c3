"""Process helpers: garbage collection, thread stacks, exit codes in words, and daemon threads.

A full garbage collection visits every object of the process. With torch, transformers and Ray loaded it takes hundreds
of milliseconds, in which the driver's event loop reads no answer, or a trainer rank keeps the others waiting. Nearly
all of these objects exist before the work begins and are never freed, so they are excluded.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

T = TypeVar("T")

THRESHOLDS = (1_000, 3, 8_000)
"""Thresholds of the driver, where few objects are in cycles. Containers created and not freed before a young
collection; young collections before a middle one; middle ones before a full one. With thousands of samples in flight
nearly all containers are alive at a collection, so a middle one visits 1,000 x 5 containers at about 1 us each, and a
full one runs at most every 32 million. Python's own: (700, 10, 10)."""


def leave_out_what_exists() -> None:
    """Collects once, then excludes all live objects from later collections.

    Reference counts still free them. `leave_out_nothing` undoes it.
    """
    leave_out_nothing()
    gc.collect()
    gc.freeze()


def leave_out_nothing() -> None:
    """Lets later collections visit everything again, so that cycles are freed."""
    gc.unfreeze()


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """Excludes existing objects and makes full collections rare. Undone at the end."""
    before = gc.get_threshold()
    leave_out_what_exists()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        leave_out_nothing()


def thread_stacks() -> str:
    """Stacks of every thread, as the interpreter's fault handler prints them."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def describe_exit(code: int) -> str:
    """The end of a process in words; `code` is as `subprocess` reports it, negative for a signal.

    "ended with exit code 3", "was killed by SIGKILL".
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # real-time signals have no names
        name = f"signal {-code}"
    return f"was killed by {name}"


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Awaits `function` on a thread that nothing waits for, also after a cancellation.

    The event loop and the interpreter wait for threads of `asyncio.to_thread` before they end. The thread stays until
    the process ends: the kernel ends child processes such as Ray's daemons with the thread that started them.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(action: Callable[[], None]) -> None:
        if not result.done():
            action()

    def run() -> None:
        try:
            action = partial(result.set_result, function())
        except BaseException as error:
            action = partial(result.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the interest in the result
            loop.call_soon_threadsafe(settle, action)
        threading.Event().wait()

    threading.Thread(target=run, name="telescope-daemon", daemon=True).start()
    return await result
