"""One request to an ASGI application, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Headers = Sequence[tuple[bytes, bytes]]


@dataclass
class Response:
    """What was sent. `status` is 0 if nothing was, `headers` have names in lower case."""

    messages: list[Any] = field(default_factory=list)

    @property
    def status(self) -> int:
        return self.messages[0]["status"] if self.messages else 0

    @property
    def headers(self) -> dict[bytes, bytes]:
        return {name.lower(): value for name, value in self.messages[0]["headers"]} if self.messages else {}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])


async def send_request(
    application: Any, path: str, body: bytes = b"", *, leave: asyncio.Event | None = None, **scope: Any
) -> Response:
    """Sends one request, whose caller disconnects when `leave` is set. `scope` replaces parts of the scope."""
    response, parts = Response(), [{"type": "http.request", "body": body}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        response.messages.append(message)

    await application({"type": "http", "method": "POST", "path": path, "headers": [], **scope}, receive, send)
    return response


async def respond(send: Any, *parts: bytes, status: int = 200, headers: Headers = ()) -> None:
    """Sends a response whose body comes in these parts."""
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    for number, part in enumerate(parts, 1):
        await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})
