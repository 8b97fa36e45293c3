"""What an environment prepares before it is played: pools of sandboxes, connections.

Owns when `prepare_resources` and `close_resources` run in this process: at most once each at a time, and again after a
failure. Which process of a host prepares is the pool's matter.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Generator
from typing import Any

from telescope.environments.base import Environment
from telescope.environments.steps import settled


class Resources:
    """The resources of one environment, or of the environment below an eval."""

    def __init__(self, environment: Any) -> None:
        self._owner = getattr(environment, "environment", None) or environment
        mine = getattr(type(self._owner), "prepare_resources", None)
        self.overridden = mine is not None and mine is not Environment.prepare_resources
        """Whether there is anything to prepare."""
        self.per_host = getattr(self._owner, "resources_per", "host") == "host"
        self._prepared = not self.overridden
        self._preparing: asyncio.Future[Any] | None = None

    def ready(self) -> Generator[Awaitable[Any], Any, None]:
        """Steps that end when the resources are there. Raises what `prepare_resources` raises."""
        if self._prepared:
            return
        if self._preparing is None:
            self._preparing = asyncio.get_event_loop().create_task(self._prepare())
        # Shielded: a caller whose deadline passes does not take the resources from the others.
        yield from settled(asyncio.shield(self._preparing))

    async def _prepare(self) -> None:
        try:
            await self._owner.prepare_resources()
            self._prepared = True
        finally:
            self._preparing = None

    async def close(self) -> None:
        """Close what was prepared. An error is printed: the process is about to end."""
        if not (self.overridden and self._prepared):
            return
        self._prepared = False
        try:
            await self._owner.close_resources()
        except Exception:
            traceback.print_exc()
