"""A condition that loops wait on, with the name of the wait kept where people can see it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from telescope.orchestrator.status import RunStatus


class Changes:
    """Wakes every waiter when the orchestrator's state has changed. One event loop, no locks."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Something changed: let every waiter look at its predicate again."""
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_until(self, predicate: Callable[[], bool], part: str, waits_for: str) -> None:
        """Return when `predicate()` holds. Meanwhile the status says that `part` waits for `waits_for`.

        There is no timeout of its own: the watchdog ends a run in which nothing moves, and names this wait.
        """
        if predicate():
            return
        self._status.set_part(part, f"waiting for {waits_for}")
        while not predicate():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
