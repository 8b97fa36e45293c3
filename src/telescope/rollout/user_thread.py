"""Runs user code of a rollout worker, with deadlines.

Synchronous user code runs in one thread, one call at a time, outside any event loop, so it may call `asyncio.run` and
need not be thread-safe. Awaitables that it returns run in the worker's event loop, beside other rollouts. A call that
exceeds its deadline is an environment failure. A thread cannot be ended, so after a late synchronous call another
thread takes over, and `is_stuck` asks for a new process.

If user code forks, the copy of the process exits when that code returns.
"""

from __future__ import annotations

import asyncio
import faulthandler
import math
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import lru_cache, partial
from typing import Any, TypeVar

from telescope.environments.user_code import (
    DeadlinePassed,
    Steps,
    error_text,
    needs_stack,
    original_error,
    running_line,
    take_step,
    user_code_line,
    within,
    without_exit,
)
from telescope.errors import EnvironmentFailure, InfrastructureError
from telescope.utils.process import start_daemon_thread

R = TypeVar("R")

BLOCKED_SECONDS = 5.0
"""Time without a turn of the event loop after which the line of user code that blocks it is printed."""


async def report_blocking(until: float = math.inf) -> None:
    """Prints the line of user code that blocks the event loop, and exits if it blocks it for `until` seconds."""
    thread, is_free, is_over = threading.get_ident(), threading.Event(), threading.Event()

    def watch() -> None:
        seconds, where, wait = 0.0, None, min(BLOCKED_SECONDS, until)
        while True:
            seconds = 0.0 if is_free.wait(wait) else seconds + wait
            is_free.clear()
            if is_over.is_set():
                return
            if seconds == wait and (where := running_line(thread)):
                fix = "Use `await asyncio.to_thread(...)`, or an async client such as `context.openai()`"
                print(f"{where} blocks the event loop: all rollouts and the endpoint wait. {fix}.", file=sys.stderr)
                sys.stderr.flush()
            if seconds >= until:
                if where is None:
                    faulthandler.dump_traceback()
                print(f"The event loop was blocked for {seconds:g} s: this process exits.", file=sys.stderr, flush=True)
                os._exit(1)  # no deadline ends this, and no exception reaches the event loop

    start_daemon_thread(watch, "telescope-blocked-loop")
    try:
        while True:
            is_free.set()
            if until < math.inf:
                faulthandler.dump_traceback_later(until + 5.0, exit=True)  # if C code holds the interpreter
            await asyncio.sleep(min(BLOCKED_SECONDS, until) / 4)
    finally:
        is_over.set()
        is_free.set()
        if until < math.inf:
            faulthandler.cancel_dump_traceback_later()


class UserThread:
    """The thread of user code. `timeout_seconds` limits a call, and each of its awaitables."""

    def __init__(self, timeout_seconds: float) -> None:
        self.is_stuck = False
        """A thread is still in user code past its deadline."""
        self.started: set[asyncio.Task[Any]] = set()
        """Running calls that were begun with `start`."""
        self._timeout = timeout_seconds
        self._pid = os.getpid()
        self._thread = ThreadPoolExecutor(1, "user code")

    def start(self, steps: Steps[Any], label: str) -> asyncio.Task[Any]:
        """Runs a call in a separate task."""
        task = asyncio.create_task(self.run(steps, label))
        self.started.add(task)
        task.add_done_callback(self.started.discard)
        return task

    async def run(self, steps: Steps[R], label: str) -> R:
        """Runs the steps of a call: synchronous ones in the thread of user code, awaitables in the event loop.

        A cancelled call waits for its current synchronous step. Raises `EnvironmentFailure`, and the
        `InfrastructureError` of user code.
        """
        resume: Callable[[], Awaitable[Any]] = partial(next, steps)
        while True:
            step = asyncio.ensure_future(self.call(partial(take_step, resume), label))
            try:
                is_done, result = await asyncio.shield(step)
            except asyncio.CancelledError:
                await asyncio.wait({step})
                if step.exception() is None and not step.result()[0]:
                    asyncio.ensure_future(step.result()[1]).cancel()  # so that Python sees it awaited
                raise
            if is_done:
                return result
            waiting = asyncio.ensure_future(without_exit(result))
            try:
                value = await within(self._timeout, waiting)
            except DeadlinePassed as error:
                self.is_stuck = self.is_stuck or not waiting.done()
                raise EnvironmentFailure(f"{label} {error} (environment_timeout_seconds)") from None
            except Exception as error:
                resume = partial(steps.throw, error)
            else:
                resume = partial(steps.send, value)

    async def call(self, function: Callable[[], R], label: str) -> R:
        """Runs a synchronous function in the thread of user code. Raises the same errors as `run`."""
        loop = asyncio.get_running_loop()
        began_at: float | None = None

        def run() -> R:
            nonlocal began_at
            began_at = loop.time()
            try:
                return function()
            finally:
                if os.getpid() != self._pid:
                    os._exit(1)  # a copy forked by user code

        while True:
            running = loop.run_in_executor(self._thread, copy_context().run, run)
            left = self._timeout  # from the start of the function, which may wait in the queue of the thread
            while left > 0 and not running.done():
                await asyncio.wait({running}, timeout=left)
                left = self._timeout if began_at is None else began_at + self._timeout - loop.time()
            if not running.cancelled():
                break  # otherwise an earlier call hangs, and another thread has taken over
        if not running.done():
            self.is_stuck = True
            faulthandler.dump_traceback()
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = ThreadPoolExecutor(1, "user code")
            limit = f"{self._timeout:g} seconds (environment_timeout_seconds)"
            raise EnvironmentFailure(f"{label} did not end within {limit}; its stack is in the rollout worker's log")
        try:
            return running.result()
        except BaseException as error:
            raise user_failure(error, label) from None


@lru_cache(maxsize=256)
def _print_once(text: str) -> None:
    """Prints a traceback, unless it was one of the last that were printed: a bug fails many samples."""
    print(text, file=sys.stderr, end="", flush=True)


def user_failure(error: BaseException, label: str) -> Exception:
    """Returns the error to raise for an error of user code, with the file and line where it was raised."""
    if needs_stack(error):
        _print_once("".join(traceback.format_exception(error)))
    kind = InfrastructureError if isinstance(error, InfrastructureError) else EnvironmentFailure
    error = original_error(error)
    where = None if isinstance(error, EnvironmentFailure) else user_code_line(error)
    text = error_text(error).removeprefix(f"{EnvironmentFailure.__name__}: ")
    return kind(f"{label} failed: {text}" + (f" ({os.path.basename(where)})" if where else ""))
