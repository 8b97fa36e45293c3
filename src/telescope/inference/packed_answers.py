"""Answers as arrays in place of JSON: what a server sends to a driver that says it can read them.

vLLM writes 140 bytes of JSON per sampled token, most of it the names of fields. Reading that is the largest single cost
of an answer, and in the driver it is paid for all servers by one event loop. Here it is paid where the answer is made:
the server's process reads vLLM's answer and sends 8 bytes per token. Servers are many, and vLLM's own writing of the
same answer takes many times as long.

Owns the middleware, not the format (`vllm_adapter`). Callers that do not ask for arrays, errors, and answers that
cannot be read pass through untouched.
"""

from __future__ import annotations

from telescope.errors import InfrastructureError
from telescope.inference import vllm_adapter as wire
from telescope.inference.auth import Application, Message, Receive, Scope, Send

SPANS_HEADER = wire.VERSION_SPANS_HEADER.encode()


class PackedAnswersMiddleware:
    """ASGI middleware outside of the policy version's, whose spans it packs too."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == wire.GENERATE_ROUTE and _asks_for_arrays(scope):
            await self._app(scope, receive, _Packer(send).send)
        else:
            await self._app(scope, receive, send)


class _Packer:
    """Holds an answer back until it is whole, and sends it on as arrays."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._parts: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            self._start = message
            return
        if message["type"] != "http.response.body" or self._start is None:
            await self._send(message)
            return
        self._parts.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        start, self._start = self._start, None
        body = b"".join(self._parts)
        headers = {bytes(name).lower(): bytes(value) for name, value in start.get("headers", ())}
        spans = headers.get(SPANS_HEADER)
        try:
            packed = wire.pack_answer(wire.read_generate(body, spans_header=spans.decode() if spans else None))
        except InfrastructureError:
            pass  # the driver reads it for itself, and says what is wrong with it
        else:
            body = packed
            headers[b"content-type"] = wire.PACKED_TYPE.encode()
            headers[b"content-length"] = str(len(body)).encode()
        await self._send({**start, "headers": list(headers.items())})
        await self._send({"type": "http.response.body", "body": body})


def _asks_for_arrays(scope: Scope) -> bool:
    return any(name == b"accept" and wire.PACKED_TYPE.encode() in value for name, value in scope["headers"])
