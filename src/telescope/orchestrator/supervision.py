"""Supervises a run's loops, notifies them of changes, and handles stop signals.

A failure of any task ends the run at once with that error. A run in which nothing finishes for `watchdog_seconds` ends
with a report of what each component waited for. Loops wait for changes with `ChangeNotifier`.

The first stop signal ends the run cleanly after the current step. Another Ctrl-C ends it at once. SIGINT (Ctrl-C),
SIGTERM (schedulers) and SIGHUP (a closed terminal, a dropped SSH session) stop a run. Schedulers send SIGTERM to all
processes of a run, so Ray's daemons, actors, environment workers and trackers ignore it. Either way no process is left
on this machine: after the second signal the run waits for nothing, and its reaper (`cluster.reaper`) kills the
processes that it started. Only the process of the trackers continues until it has sent what is recorded
(`trackers.process`).
"""

import asyncio
import contextlib
import io
import logging
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from telescope.errors import DeadlineExceeded
from telescope.orchestrator.status import Interrupted, RunStatus
from telescope.utils.process import thread_stacks

logger = logging.getLogger(__name__)

T = TypeVar("T")

PROGRESS_SECONDS = 5.0  # interval at which work with its own deadlines resets the watchdog


class Supervisor:
    """A set of tasks that end together.

    `run_until` returns the value of its main coroutine. If any task fails first, every other task is cancelled and
    awaited, and the first error is raised, not wrapped in a group.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._error: BaseException | None = None
        self._has_failed = asyncio.Event()

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Starts a task whose failure ends the run."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def run_until(
        self, main: Coroutine[Any, Any, Any], *, grace: Callable[[BaseException], float] = lambda error: 0.0
    ) -> Any:
        """Runs `main` beside the spawned tasks, then cancels those that still run.

        When a task fails, `grace(error)` may ask `main` to end by itself, and returns the seconds that `main` has for
        it.
        """
        main_task = asyncio.create_task(main, name="main")
        failure = asyncio.create_task(self._has_failed.wait(), name="failure")
        try:
            await asyncio.wait({main_task, failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._error is not None:
                if not main_task.done() and (seconds := grace(self._error)):
                    await asyncio.wait({main_task}, timeout=seconds)
                # Also an error of the same moment, which asyncio would log as never retrieved.
                if main_task.done() and not main_task.cancelled() and (second := main_task.exception()):
                    logger.info("%s failed too: %r", main_task.get_name(), second)
                raise self._error
            return main_task.result()
        finally:
            tasks = [task for task in (*self._tasks, main_task, failure) if not task.done()]
            for task in tasks:
                task.cancel()
            for task, result in zip(tasks, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
                if isinstance(result, Exception):
                    logger.debug("task %s failed while it was being cancelled: %r", task.get_name(), result)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if self._error is None:
            self._error = error
            self._has_failed.set()
        else:
            # The first failure ends the run. Later failures are often its consequences.
            logger.info("task %s failed too: %r", task.get_name(), error)


async def watchdog(
    status: RunStatus,
    timeout_seconds: float,
    dump_remote_stacks: Callable[[], Awaitable[dict[str, str]]],
    *,
    poll_seconds: float = 5.0,
) -> None:
    """Raises DeadlineExceeded and logs all stacks if nothing has finished for `timeout_seconds`."""
    while True:
        await asyncio.sleep(min(poll_seconds, timeout_seconds / 4))
        idle = time.monotonic() - status.last_progress_at
        if idle < timeout_seconds:
            continue
        parts = "; ".join(f"{part}: {doing}" for part, doing in sorted(status.components.items()))
        stacks = {"driver": driver_stacks(), **await dump_remote_stacks()}
        for process, text in stacks.items():
            logger.error("stacks of %s:\n%s", process, text)
        raise DeadlineExceeded(
            f"watchdog: no turn, sample or step ended for {idle:.0f} s "
            f"(watchdog_seconds = {timeout_seconds:g}). Last known state: {parts}. "
            "The stacks of all processes are in the run's logs."
        )


async def with_progress(status: RunStatus, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, which has its own deadlines or a thread that works, and resets the watchdog meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=PROGRESS_SECONDS))[0]:
            status.progressed()
        return task.result()
    finally:
        status.progressed()
        task.cancel()
        await asyncio.wait([task])


def driver_stacks() -> str:
    """Returns the stacks of all asyncio tasks and threads of this process."""
    text = io.StringIO()
    for task in asyncio.all_tasks():
        task.print_stack(limit=8, file=text)
    text.write(thread_stacks())
    return text.getvalue()


class ChangeNotifier:
    """Wakes all waiters when the orchestrator's state changes. Works in one event loop, without locks."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status
        self._change = asyncio.Event()

    def notify(self) -> None:
        """Makes every waiter check its predicate again."""
        self._change.set()
        self._change = asyncio.Event()

    async def wait_until(self, predicate: Callable[[], bool], part: str, waits_for: str) -> None:
        """Waits until `predicate()` is true. The status shows the wait, and the watchdog limits it."""
        if predicate():
            return
        self._status.components[part] = f"waiting for {waits_for}"
        while not predicate():
            await self._change.wait()


EXIT_CODE = 130  # the exit code that shells expect from a program stopped by Ctrl-C
ECHO_SECONDS = 0.5
"""A SIGINT this soon after the first signal is its copy, not a second Ctrl-C."""


class Interrupt:
    """Turns stop signals into a stop request. `requested` states whether there was a signal."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status
        self._phase = "stopping"
        self._count = 0
        self._first_at = -math.inf
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._on_first: list[Callable[[], object]] = []
        self._on_second: list[Callable[[], None]] = []

    @property
    def requested(self) -> bool:
        return self._count > 0

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handles the stop signals. Call again after a library has replaced the handlers.

        An ignored SIGHUP stays ignored, so that `nohup` keeps a run going.
        """
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        loop.add_signal_handler(signal.SIGTERM, self._terminated)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._hung_up)

    def describe_stop(self, phase: str) -> None:
        """Sets what the first signal does from now on. The status and the message of a second signal name it."""
        self._phase = phase

    def on_first(self, action: Callable[[], object]) -> None:
        """Calls `action` at the first signal, or now if it has already arrived."""
        if self.requested:
            action()
        else:
            self._on_first.append(action)

    def on_second(self, action: Callable[[], None]) -> None:
        """Calls `action` before a second signal ends the process. It must be quick."""
        self._on_second.append(action)

    async def run_until_first(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine, which the first signal cancels. Raises Interrupted in that case."""
        task = asyncio.ensure_future(coroutine)
        self.on_first(task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            if self.requested:
                raise Interrupted("stopped by a signal") from None
            raise
        finally:
            task.cancel()
            self._on_first.clear()

    def _interrupted(self) -> None:
        """Counts a Ctrl-C, but not its echo: `timeout` and launchers signal a process and then its group."""
        if time.monotonic() - self._first_at > ECHO_SECONDS:
            self._signalled()

    def _terminated(self, name: str = "SIGTERM") -> None:
        """Stops after the step. Ignores repeats, because schedulers send SIGTERM to a process and its group."""
        if not self.requested:
            self._signalled(name)

    def _hung_up(self) -> None:
        """Stops like SIGTERM. A shell that loses its terminal may also send SIGHUP more than once."""
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in self._terminals:  # writes to a lost terminal fail
            os.dup2(null, descriptor)
        os.close(null)
        self._terminated("SIGHUP")

    def _signalled(self, name: str = "SIGINT") -> None:
        self._count += 1
        if self._count == 1:
            self._first_at = time.monotonic()
            logger.info("%s was received: %s", name, self._phase)
            self._status.phase = f"{self._phase} (Ctrl-C again: at once)"
            actions, self._on_first = self._on_first, []
            for action in actions:
                action()
            return
        # Not with the live view, whose thread ends with the process.
        ended = f"\nended at once by a second interrupt while {self._phase}; the record holds what was flushed\n"
        os.write(2, ended.encode())
        for action in self._on_second:
            with contextlib.suppress(OSError):  # a full disk must not keep the process running
                action()
        os._exit(EXIT_CODE)
