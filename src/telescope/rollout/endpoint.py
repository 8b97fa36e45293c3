"""The agents' endpoint of a rollout worker."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

from telescope.environments.context import Answer, Call


class Endpoint:
    """An HTTP server of a worker."""

    async def start(self, socket_path: str | None = None) -> None:
        """Starts to listen, unless it does."""

    async def stop(self) -> None:
        """Stops to listen."""

    def open(self, complete: Callable[[Call], Awaitable[Answer]]) -> str:
        """Opens the endpoint for a rollout. Returns its key."""
        return secrets.token_urlsafe()

    def close_rollout(self, key: str) -> None:
        """Ends the key of a rollout."""

    def base_url(self, chat: str) -> str:
        """Returns the URL for one conversation."""
        return "http://127.0.0.1:0/v1"
