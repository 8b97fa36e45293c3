"""User code in steps: plain code outside of the event loop, awaitables inside of it.

A request is played by a generator. It yields each awaitable that it has to wait for and is resumed with the result, or
with the error thrown in; what it returns is the answer. So plain user code always runs outside of any event loop, where
it may call `asyncio.run` itself, even after something was awaited.

Deadlines for the user's code, inside of a process that many rollouts share.

`deadline` interrupts Python code that runs in the main thread, which is where environment workers run plain functions
of the user. It cannot interrupt a single long operation of C (`95**97**99`, a regular expression); for those the pool
has a deadline of its own, which ends the process. `within` bounds a coroutine. Invariant: nobody's time is charged for
what another's plain code takes of the event loop.

Which line of the user's code an error comes from, and what the error says.

Whatever was raised is told in words: an exception may have a `__str__` that raises, or megabytes of text.

How much memory user code may take.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sysconfig
import threading
import time
import traceback
from collections.abc import Awaitable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

Steps = Generator[Awaitable[Any], Any, tuple[dict[str, Any], bytes]]
"""Ends with the fields and the blob of the answer."""


def settled(value: Any) -> Generator[Awaitable[Any], Any, Any]:
    """`result = yield from settled(f())` for an `f` that may be plain or async."""
    if inspect.isawaitable(value):
        return (yield value)
    return value


async def settle(result: Awaitable[Any]) -> Any:
    """A coroutine for any awaitable, so that it can be made a task."""
    return await result


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


_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OWN_FOLDER = str(Path(__file__).parent)

MAX_CHARACTERS = 2_000
"""Of an error's text. It is sent to the driver, logged, and recorded for every sample that it fails."""


def innermost_line(error: BaseException, folder: Path | None = None) -> str | None:
    """`file:line` where the error was raised, as near to its author as can be told.

    That is the innermost line in `folder`, where the environment lies; or else the innermost that is neither of an
    installed library nor of the machinery here that called it; or else the innermost of all. None without a traceback.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    if not frames:
        return None
    in_folder = [f for f in frames if folder is not None and Path(f.filename).is_relative_to(folder)]
    of_a_person = [f for f in frames if not f.filename.startswith(_LIBRARIES) and not _is_ours(f.filename)]
    chosen = (in_folder or of_a_person or frames)[-1]
    return f"{chosen.filename}:{chosen.lineno}"


def _is_ours(filename: str) -> bool:
    """Whether it is one of the modules of this package; the environments that ship here lie in folders of their own."""
    return str(Path(filename).parent) == _OWN_FOLDER


def in_words(error: BaseException) -> str:
    """`Type: message`, as text of bounded length that can be written as UTF-8; with the first error of a group."""
    name = type(error).__name__
    try:
        said = str(error)
    except Exception as worse:
        said = f"its text cannot be had, {type(worse).__name__}"
    if isinstance(error, BaseExceptionGroup):
        said = f"{said}, first {in_words(error.exceptions[0])}"
    text = f"{name}: {said}" if said else name
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]}... ({len(text)} characters in all)"
    return text.encode("utf-8", "replace").decode()


def cause(error: BaseException) -> BaseException:
    """The error to tell of: Python turns a `StopIteration` inside of a generator or a coroutine into another one."""
    is_turned = isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration | StopAsyncIteration)
    return error.__cause__ or error if is_turned else error


def describe(error: BaseException, folder: Path | None = None) -> str:
    """`Type: message at file:line`, as text that can be written as UTF-8."""
    error = cause(error)
    where = innermost_line(error, folder)
    return in_words(error) + (f" at {where}" if where else "")


_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

SMALLEST_LIMIT_BYTES = 2 * 2**30


def machine_memory_bytes() -> int:
    """Physical memory, or what the container may use of it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _CGROUP_LIMITS:
        path = Path(file)
        text = path.read_text().strip() if path.exists() else "max"
        if text.isdigit():
            memory = min(memory, int(text))
    return memory


def default_memory_limit() -> int:
    """What one worker may allocate beyond what it has loaded: a quarter of the machine, so that a reward that never
    stops allocating fails before the engine or the trainer does."""
    return max(machine_memory_bytes() // 4, SMALLEST_LIMIT_BYTES)
