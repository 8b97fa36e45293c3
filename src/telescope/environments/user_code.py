"""Runs user code in steps, with deadlines, memory limits and readable errors.

Synchronous code runs outside the event loop, awaitables run inside it. A generator executes a request: it yields each
awaitable, is resumed with its result or error, and returns the final result. So synchronous user code may call
`asyncio.run` itself, even after an await.

`deadline` interrupts Python code. It cannot interrupt a single long operation of C (`95**97**99`, a regular expression,
a sleep); for these the deadline of the call replaces the process. `within` limits a coroutine. Invariant: time in which
other code blocks the event loop does not count against a coroutine.

`describe_error` names the line of user code that raised an error, for any exception, even if its `__str__` raises or
returns megabytes of text.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import inspect
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from telescope.errors import EnvironmentFailure, InfrastructureError, MalformedResultError, UserError
from telescope.utils.packages import is_installed
from telescope.utils.process import Terminated

R = TypeVar("R")

Steps = Generator[Awaitable[Any], Any, R]
"""A call in steps, which returns R."""


def call_with_declared(function: Callable[..., Any], /, *positional: Any, **available: Any) -> Any:
    """Calls a function with the `available` arguments that it declares, or with all if it has `**kwargs`."""
    declared = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in declared):
        available = {p.name: available[p.name] for p in declared if p.name in available}
    before_slash = [available.pop(p.name) for p in declared if p.kind is p.POSITIONAL_ONLY and p.name in available]
    return function(*positional, *before_slash, **available)


def required_parameters(function: Callable[..., Any]) -> list[str]:
    """Returns the names of the parameters without a default."""
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


async def maybe_await(value: Any) -> Any:
    """Returns the value, awaited if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


def settled(value: Any) -> Generator[Awaitable[Any], Any, Any]:
    """Waits for a value that may be awaitable. Use it as `result = yield from settled(f())`."""
    return (yield value) if inspect.isawaitable(value) else value


_AGAIN_SECONDS = 0.5
"""The interrupt repeats at this interval, for code that catches every exception in a loop."""

_SLICE_SECONDS = 0.1
"""Interval at which `within` checks the clock. Time beyond it belongs to other code that blocked the loop."""

_CANCELLED_SECONDS = 1.0
"""Time for a cancelled coroutine to clean up."""


class DeadlinePassed(TimeoutError):
    """User code exceeded its deadline."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"did not end within {seconds:g} seconds")
        self.seconds = seconds


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises `DeadlinePassed` in the block, at the next Python instruction, if it takes longer than `seconds`.

    The earliest of nested deadlines applies.
    """

    class Passed(DeadlinePassed):
        def __init__(self) -> None:
            super().__init__(seconds)

    Passed.__name__ = DeadlinePassed.__name__  # in error messages and in the record
    thread, raise_in = threading.get_ident(), ctypes.pythonapi.PyThreadState_SetAsyncExc
    is_over, lock = threading.Event(), threading.Lock()

    def interrupt() -> None:
        wait = seconds
        while not is_over.wait(wait):
            with lock:
                if not is_over.is_set():
                    raise_in(ctypes.c_ulong(thread), ctypes.py_object(Passed))
            wait = _AGAIN_SECONDS

    try:
        try:
            threading.Thread(target=interrupt, daemon=True).start()
            yield
        finally:
            is_over.set()  # an interrupt that arrives now raises after this line, but not after the next block
    finally:
        is_over.set()
        with lock:  # a pending interrupt belongs to this block
            raise_in(ctypes.c_ulong(thread), None)


async def within(seconds: float, awaitable: Awaitable[R]) -> R:
    """Returns the result of `awaitable`. After `seconds`, cancels it and raises `DeadlinePassed`.

    Only time in which the event loop was free counts: a tool that waits for 10 ms is not late because synchronous code
    of another rollout blocked the loop for a minute.
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
        if task.done() and not task.cancelled():
            task.exception()  # so that Python does not report it as never retrieved


async def gather_or_cancel(awaitables: Iterable[Awaitable[R]]) -> list[R]:
    """Returns all results in order. If one fails, cancels the others and waits for their end before it raises.

    After `asyncio.gather` the others would go on, and use a rollout that has ended.
    """
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def without_exit(awaitable: Awaitable[Any]) -> Any:
    """Awaits user code. A `BaseException` that it raises itself, such as an exit, becomes a `RuntimeError`."""
    try:
        return await awaitable
    except Exception:
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        # SystemExit would stop the event loop of all rollouts. After other exceptions nothing would report the sample.
        what = RuntimeError(f"user code raised {error_text(error)}")
        raise what.with_traceback(error.__traceback__) from error


def contain_exits(loop: asyncio.AbstractEventLoop) -> None:
    """Turns an exit in a task of user code into that task's error. It would otherwise stop the event loop."""

    async def contained(work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await work
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(f"user code raised {error_text(error)}") from error

    def start(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(contained(work), loop=loop, **options)
        task.add_done_callback(lambda _: work.close())  # it has not begun if the task was cancelled at once
        return task

    loop.set_task_factory(start)


def take_step(resume: Callable[[], Any]) -> tuple[bool, Any]:
    """Takes one step of a call. Returns whether it was the last, and its result or what it waits for."""
    try:
        return False, resume()
    except StopIteration as end:
        return True, end.value


def take_steps(steps: Steps[R], wait: Callable[[Awaitable[Any]], Any]) -> R:
    """Takes all steps of a call in this thread. `wait` runs an awaitable in an event loop, and returns its result."""
    resume: Callable[[], Any] = partial(next, steps)
    while True:
        is_done, result = take_step(resume)
        if is_done:
            return result
        try:
            resume = partial(steps.send, wait(result))
        except Exception as error:
            resume = partial(steps.throw, error)


_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts"))
_PACKAGE = Path(__file__).parents[1]

MAX_CHARACTERS = 2_000
"""Longest error text, which is sent to the driver, logged, and recorded for every sample that fails."""


def user_code_line(error: BaseException, folder: Path | None = None) -> str | None:
    """Returns the `file:line` in user code where the error was raised. None without one or for `MalformedResultError`.

    It is the innermost line in `folder`, the environment's folder. If there is none, it is the innermost line outside
    installed libraries and this package, or else the innermost of all.
    """
    if isinstance(error, MalformedResultError):  # our line that rejects a result does not help
        return None
    return _user_line(traceback.extract_tb(error.__traceback__), folder)


def running_line(thread: int) -> str | None:
    """Returns the `file:line` of user code that a thread executes. None if it executes no user code."""
    frame = sys._current_frames().get(thread)
    return _user_line(traceback.extract_stack(frame), None, or_any=False) if frame else None


def _user_line(stack: traceback.StackSummary, folder: Path | None, *, or_any: bool = True) -> str | None:
    frames = [f for f in stack if not f.filename.startswith("<")]
    in_folder = [f for f in frames if folder is not None and Path(f.filename).is_relative_to(folder)]
    # Shipped environments are in subfolders of this package.
    of_users = [f for f in frames if not f.filename.startswith(_LIBRARIES) and not _is_of_package(Path(f.filename))]
    chosen = in_folder or of_users or (frames if or_any else [])
    return f"{chosen[-1].filename}:{chosen[-1].lineno}" if chosen else None


def _is_of_package(file: Path) -> bool:
    """Returns whether a file belongs to this package, but not to a shipped environment or eval."""
    return file.is_relative_to(_PACKAGE) and file.parent.parent not in (_PACKAGE / "environments", _PACKAGE / "evals")


def error_text(error: BaseException) -> str:
    """Returns `Type: message` as UTF-8 text of limited length. An exception group is shown by its first error.

    Raises a `Terminated`, which came while user code ran and is no error of it.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, Terminated):
        raise error
    name = type(error).__name__
    try:
        message = str(error)
    except Exception as worse:
        message = f"(its __str__ raises {type(worse).__name__})"
    text = f"{name}: {message}" if message else name
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if isinstance(error, AttributeError | TypeError) and "'coroutine' object" in message:
        text += " (a call of an async function lacks `await`)"
    elif isinstance(error, ImportError) and (fix := _import_of_own_file(error)):
        text += f" ({fix})"
    elif package and sys.modules.get(package) is None and not is_installed(package):
        text += f" (this code needs it; install it, perhaps with: pip install {package})"
    elif data := _missing_nltk_data(error):
        text = f"{name}: nltk has no data {data!r} (this code needs it; install it: python -m nltk.downloader {data})"
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]}... ({len(text)} characters in all)"
    return text.encode("utf-8", "replace").decode()


def _import_of_own_file(error: ImportError) -> str | None:
    """Returns how to import a file beside the one that failed to import it. None if it is not about such a file."""
    where, name = user_code_line(error), (error.name or "").partition(".")[0]
    if where is None or not name:
        return None
    folder = Path(where.rpartition(":")[0]).parent
    if (folder / f"{name}.py").is_file() or any((folder / name).glob("*.py")):
        return f"the file beside it is imported with a dot: `from .{name} import ...`"
    has_files = any(file.name not in ("environment.py", "eval.py") for file in folder.glob("*.py"))
    is_own = name == folder.name and has_files and not is_installed(name)
    return "files of its folder are imported with a dot: `from .file import ...`" if is_own else None


def needs_stack(error: BaseException) -> bool:
    """Returns whether an error may be a bug of user code. Others are explained by their message."""
    failed = InfrastructureError | EnvironmentFailure | ConnectionError
    explained = UserError | MalformedResultError | ModuleNotFoundError | failed
    return not isinstance(error, explained) and _missing_nltk_data(error) is None


def _missing_nltk_data(error: BaseException) -> str | None:
    """Returns the name of the data that nltk did not find, or None for any other error."""
    message = error.args[0] if isinstance(error, LookupError) and error.args else None
    found = re.search(r"nltk\.download\('(.+)'\)", message) if isinstance(message, str) else None
    return found[1] if found else None


def original_error(error: BaseException) -> BaseException:
    """Unwraps a `StopIteration` that Python wrapped inside a generator or a coroutine."""
    is_turned = isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration | StopAsyncIteration)
    return error.__cause__ or error if is_turned else error


def describe_error(error: BaseException, folder: Path | None = None) -> str:
    """Returns `Type: message at file:line` as UTF-8 text."""
    error = original_error(error)
    where = user_code_line(error, folder)
    return error_text(error) + (f" at {where}" if where else "")


def load_function(name: str, use: str) -> Callable[..., Any]:
    """Imports `package.module:function` or `file.py:function`. Raises `UserError`, which mentions its `use`."""
    place, _, attribute = name.rpartition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, Path(place).expanduser())
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(spec.name, module)  # dataclasses look up their module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{use} {name!r} cannot be imported: {describe_error(error)}. Write package.module:function of an "
            "installed package, or path/to/file.py:function."
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function) or inspect.isclass(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(f"{use} {name!r}: {place} has no function {attribute!r}. It has: {', '.join(known) or 'none'}.")
    return function
