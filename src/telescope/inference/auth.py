"""The run's secret, asked for on every route of an engine.

vLLM's own `--api-key` covers only paths under `/v1`, `/v2` and `/inference`; pause, weight updates, collective RPC,
metrics, documentation and websockets stay open. This middleware stands in front of the whole application, mounted
sub-applications and websockets included, and asks for `Authorization: Bearer <secret>` on all of it, which is also what
OpenAI clients send as their API key.

The secret comes from the environment of the server process, never from its command line, which other users can read.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

SECRET_VARIABLE = "TELESCOPE_ENGINE_SECRET"  # the name of the variable, not a secret

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

REFUSAL = b'{"error":{"message":"this inference server belongs to a Telescope run and needs its secret","code":401}}'


def new_secret() -> str:
    """A fresh secret for one run: 256 random bits."""
    return secrets.token_urlsafe(32)


class RunSecretMiddleware:
    """ASGI middleware that answers 401 (or closes the websocket) unless the request carries the run's secret.

    Raises `RuntimeError` at construction when the environment holds no secret: a server without one must not start.
    """

    def __init__(self, app: Application, secret: str | None = None) -> None:
        secret = secret or os.environ.get(SECRET_VARIABLE, "")
        if not secret:
            raise RuntimeError(f"{SECRET_VARIABLE} is not set: an engine without a secret would be open to everyone")
        self._app = app
        self._expected = f"Bearer {secret}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan" or self._knows_secret(scope):
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "unauthorized"})
        else:
            await answer_json(401, REFUSAL, send)

    def _knows_secret(self, scope: Scope) -> bool:
        given = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        # Compared in constant time; exactly one header, so that no proxy and server can read different ones.
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


async def answer_json(status: int, body: bytes, send: Send) -> None:
    """Answer a request with this JSON."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
