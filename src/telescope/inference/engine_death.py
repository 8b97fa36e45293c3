"""Requests whose engine has died are answered, so that its HTTP process ends instead of waiting for them.

vLLM's HTTP process notices within milliseconds that the process of its engine is gone, fails the requests that sample,
and shuts down. But calls into the engine (pauses, whether it is paused, weight updates, collective RPC) wait for an
answer that nobody will send, requests that a pause holds back for a pause that nobody will end, and the shutdown waits
for both: the process would go on for ever without an engine (vLLM 0.26 and 0.32).

Owns the middleware that ends those requests. Invariants: nothing is touched while the engine lives; an answer that has
begun is not begun again; vLLM, whose words say more, has `GRACE_SECONDS` to answer for itself.
"""

from __future__ import annotations

import asyncio
from typing import Any

from telescope.inference.auth import Application, Message, Receive, Scope, Send, answer_json

POLL_SECONDS = 0.25
GRACE_SECONDS = 1.0
ANSWER = b'{"error":{"message":"the engine process of this inference server has died","code":503}}'


class EngineDeathMiddleware:
    """ASGI middleware inside the secret check and outside all that waits; one per server process."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._in_flight: set[asyncio.Future[None]] = set()
        self._ended: set[asyncio.Future[None]] = set()
        self._watch: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
        if scope["type"] != "http" or engine is None:
            await self._app(scope, receive, send)
            return
        _ = engine.errored  # a vLLM that does not say fails the request here, and not a watch that nobody looks at
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        # A task of its own: the server's is its own to cancel.
        request = asyncio.ensure_future(self._app(scope, receive, send_on))
        self._in_flight.add(request)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._end_when_dead(engine))
        try:
            await request
        except asyncio.CancelledError:
            outer = asyncio.current_task()
            if request not in self._ended or (outer is not None and outer.cancelling()):
                raise
            if not has_begun:
                await answer_json(503, ANSWER, send)
        finally:
            self._in_flight.discard(request)
            self._ended.discard(request)

    async def _end_when_dead(self, engine: Any) -> None:
        """Look at the engine while there are requests, and end them when it has died."""
        while self._in_flight:
            if engine.errored:
                waiting = set(self._in_flight)
                await asyncio.sleep(GRACE_SECONDS)
                for request in waiting & self._in_flight:
                    self._ended.add(request)
                    request.cancel()
            await asyncio.sleep(POLL_SECONDS)
