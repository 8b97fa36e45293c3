"""Handles stop signals.

The first ends the run cleanly after the current step, the second at once. SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed
terminal, a dropped SSH session) stop a run. Either way no process is left on this machine: after the second signal
nothing is waited for, and the run's reaper (`cluster.reaper`) kills what this process started.
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
"""The exit code that shells expect of a program stopped by Ctrl-C."""


class Interrupt:
    """Turns stop signals into a stop request. `requested`: whether there was one."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status
        self._count = 0
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._on_first: list[Callable[[], None]] = []
        self._on_second: list[Callable[[], None]] = []

    @property
    def requested(self) -> bool:
        return self._count > 0

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handles the stop signals. Call again after a library has replaced the handlers.

        A SIGHUP that is ignored stays ignored: so `nohup` keeps a run going.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._hung_up)

    def on_first(self, action: Callable[[], None]) -> None:
        """Calls `action` at the first signal, now if it has already arrived."""
        if self.requested:
            action()
        else:
            self._on_first.append(action)

    def on_second(self, action: Callable[[], None]) -> None:
        """Calls `action`, which must be quick, before a second signal ends the process."""
        self._on_second.append(action)

    async def run_until_first(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine that the first signal cancels, such as the start or an eval. Raises Interrupted then."""
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

    def _hung_up(self) -> None:
        """Stops as at SIGTERM. A shell that loses its terminal sends SIGHUP more than once: repeats change nothing."""
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in self._terminals:  # writes to a lost terminal fail
            os.dup2(null, descriptor)
        os.close(null)
        if not self.requested:
            self._signalled()

    def _signalled(self) -> None:
        self._count += 1
        if self._count == 1:
            self._status.phase = "stopping after this step (Ctrl-C again: at once)"
            self._status.messages.append("interrupted: finishing cleanly; press Ctrl-C again to end at once")
            actions, self._on_first = self._on_first, []
            for action in actions:
                action()
            return
        # Not through the live view, whose thread ends with the process.
        os.write(2, b"\nended at once by a second interrupt; the record holds what was flushed\n")
        for action in self._on_second:
            with contextlib.suppress(OSError):  # a full disk must not keep the process running
                action()
        os._exit(EXIT_CODE)
