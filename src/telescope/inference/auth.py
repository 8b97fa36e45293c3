"""Checks the run's secret on every route of an engine.

vLLM's own `--api-key` covers only paths under `/v1`, `/v2` and `/inference`. Pause, weight updates, collective RPC,
metrics, documentation and websockets stay open. This middleware wraps the whole application, mounted sub-applications
and websockets included, and requires `Authorization: Bearer <secret>`, which OpenAI clients send as their API key.

The server process reads the secret from its environment, never from its command line, which other users can read.
"""

import hmac
import os

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

SECRET_VARIABLE = "TELESCOPE_ENGINE_SECRET"  # the name of the variable, not a secret


class RunSecretMiddleware:
    """ASGI middleware that requires the run's secret. It responds with 401, or closes the websocket.

    Raises `RuntimeError` at construction when the environment has no secret.
    """

    def __init__(self, app: ASGIApp, secret: str | None = None) -> None:
        secret = secret or os.environ.get(SECRET_VARIABLE, "")
        if not secret:
            raise RuntimeError(f"{SECRET_VARIABLE} is not set: an engine must not start without a secret")
        self._app = app
        self._expected = f"Bearer {secret}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan" or self._knows_secret(scope):
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "unauthorized"})
        else:
            refusal = error_response(401, "this inference server requires the secret of its Telescope run")
            await refusal(scope, receive, send)

    def _knows_secret(self, scope: Scope) -> bool:
        given = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        # Constant-time comparison. Exactly one header, so that a proxy and the server cannot read different ones.
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


def error_response(status: int, message: str) -> JSONResponse:
    """Returns an error response in vLLM's format."""
    return JSONResponse({"error": {"message": message, "code": status}}, status)
