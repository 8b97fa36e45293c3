"""Deadlines for the user's code, inside of a process that many rollouts share.

`deadline` interrupts Python code that runs in the main thread, which is where environment workers run plain functions
of the user. It cannot interrupt a single long operation of C (`95**97**99`, a regular expression); for those the pool
has a deadline of its own, which ends the process. `within` bounds a coroutine. Invariant: nobody's time is charged for
what another's plain code takes of the event loop.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

_AGAIN_SECONDS = 0.5
"""The interruption is repeated, for code that catches every exception in a loop."""

_SLICE_SECONDS = 0.1
"""`within` looks at the clock this often; of a slice that lasts longer, the rest was somebody else's."""

_CANCELLED_SECONDS = 1.0
"""How long a coroutine that is cancelled may take to put its things in order."""


class DeadlinePassed(TimeoutError):
    """Plain code took longer than it was given."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"did not end within {seconds:g} seconds")
        self.seconds = seconds


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise `DeadlinePassed` inside of the block when it takes longer than `seconds`.

    Nested deadlines keep the earliest. Outside of the main thread, where no signal arrives, nothing is interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    armed = True

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        if armed:
            raise DeadlinePassed(seconds)

    outer_left, outer_interval = signal.getitimer(signal.ITIMER_REAL)
    if 0.0 < outer_left <= seconds:
        yield  # the outer one is due first and covers this block
        return
    outer_handler = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_SECONDS)
    try:
        try:
            yield
        finally:
            armed = False  # the signal may come right here, and then raises past this line but not past the next block
    finally:
        armed = False
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, outer_handler)
        if outer_left > 0.0:
            signal.setitimer(signal.ITIMER_REAL, max(outer_left - (seconds - left), 1e-3), outer_interval)


async def within(seconds: float, awaitable: Awaitable[T]) -> T:
    """The result of `awaitable`. Raises `DeadlinePassed` after `seconds`, and cancels it.

    Only time in which the event loop was free counts: a tool that waits for 10 ms is not late because plain code of
    another rollout held the loop for a minute.
    """
    task = asyncio.ensure_future(awaitable)
    left = seconds
    try:
        while True:
            slice_seconds = min(left, _SLICE_SECONDS)
            start = time.monotonic()
            await asyncio.wait({task}, timeout=slice_seconds)
            if task.done():
                return task.result()
            left -= min(time.monotonic() - start, slice_seconds)
            if left <= 1e-6:
                raise DeadlinePassed(seconds)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCELLED_SECONDS)
