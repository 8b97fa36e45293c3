"""Ctrl-C: once ends the run cleanly after the step under way, twice ends it at once.

Either way no process is left behind on this machine: the second Ctrl-C waits for nothing, and the run's reaper
(`cluster.reaper`) kills what this process started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.summary import Interrupted

EXIT_CODE = 130
"""What a shell expects of a program that was ended by Ctrl-C."""


class Interrupt:
    """Turns SIGINT and SIGTERM into a stop request. `requested` says whether there was one."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status
        self._count = 0
        self._on_first: list[Callable[[], None]] = []
        self._on_second: list[Callable[[], None]] = []

    @property
    def requested(self) -> bool:
        return self._count > 0

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take over SIGINT and SIGTERM. Call again after a library has taken them."""
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)

    def on_first(self, action: Callable[[], None]) -> None:
        """Call `action` at the first signal, or now when it has come already."""
        if self.requested:
            action()
        else:
            self._on_first.append(action)

    def on_second(self, action: Callable[[], None]) -> None:
        """Call `action`, which must be quick, when a second signal ends the process at once."""
        self._on_second.append(action)

    async def run_until_first(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run something that the first signal cancels: starting up, or an eval. Raises Interrupted then."""
        task = asyncio.ensure_future(coroutine)

        def cancel() -> None:
            task.cancel()

        self.on_first(cancel)
        try:
            return await task
        except asyncio.CancelledError:
            if self.requested:
                raise Interrupted("stopped by a signal") from None
            raise
        finally:
            task.cancel()
            self._on_first.clear()

    def _signalled(self) -> None:
        self._count += 1
        if self._count == 1:
            self._status.phase = "stopping after this step (Ctrl-C again: at once)"
            self._status.messages.append("interrupted: finishing cleanly; press Ctrl-C again to end at once")
            actions, self._on_first = self._on_first, []
            for action in actions:
                action()
            return
        # Past any live view, which draws from a thread that is about to be gone.
        os.write(2, b"\nended at once by a second interrupt; the record holds what was flushed\n")
        for action in self._on_second:
            with contextlib.suppress(OSError):  # a full disk must not keep the process alive
                action()
        os._exit(EXIT_CODE)
