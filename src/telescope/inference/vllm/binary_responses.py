"""Sends responses as binary arrays to clients that accept them.

vLLM writes 140 bytes of JSON per sampled token, most of it field names. Parsing that is the largest single cost of a
response, and one event loop in the driver pays it for all servers; writing it costs as much in the server's only loop.
So ids and logprobs are taken from the engine's output before vLLM writes JSON, and are sent as 8 bytes per token. The
rest of the response (finish reason, weight versions, or an error) comes from vLLM's own JSON, which it then writes
without tokens.

Owns the middleware, not the format (`adapter`). Clients that do not accept arrays, errors, and unreadable responses
pass through unchanged. If the application has no engine (a fake of vLLM), the arrays are read from its JSON.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from telescope.errors import InfrastructureError
from telescope.inference.vllm import adapter as wire

SPANS_HEADER = wire.VERSION_SPANS_HEADER.encode()


@dataclass(slots=True)
class Arrays:
    """The ids [N], logprobs [N] and any routes of one completion, once the engine has produced them."""

    token_ids_N: np.ndarray | None = None
    logprobs_N: np.ndarray | None = None
    routes_MXK: np.ndarray | None = None

    def take_from(self, output: Any) -> None:
        """Takes the arrays of a `RequestOutput` if it is complete."""
        if not output.finished or len(output.outputs) != 1:
            return
        answer = output.outputs[0]
        if answer.logprobs is None or len(answer.logprobs) != len(answer.token_ids):
            return
        pairs = zip(answer.logprobs, answer.token_ids, strict=True)
        num_tokens = len(answer.token_ids)
        self.logprobs_N = np.fromiter((at[token].logprob for at, token in pairs), dtype=np.float32, count=num_tokens)
        self.token_ids_N = np.fromiter(answer.token_ids, dtype=np.int32, count=num_tokens)
        answer.token_ids, answer.logprobs = [], []
        if getattr(answer, "routed_experts", None) is not None:
            self.routes_MXK, answer.routed_experts = answer.routed_experts, None


_wanted: ContextVar[Arrays | None] = ContextVar("arrays of the answer to this request", default=None)


class EngineWithArrays:
    """Wraps vLLM's engine client and captures arrays for clients that accept them."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt: Any, sampling_params: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        arrays = _wanted.get()
        whole = int(sampling_params.output_kind.value) == wire.FINAL_ONLY
        async with aclosing(self._engine.generate(prompt, sampling_params, *args, **options)) as outputs:
            async for output in outputs:
                if arrays is not None and whole:
                    arrays.take_from(output)
                yield output


class BinaryResponseMiddleware:
    """ASGI middleware outside the policy version's, so that it packs the spans too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        accepted = [value for name, value in scope.get("headers", ()) if name == b"accept"]
        asks_for_arrays = any(wire.PACKED_TYPE.encode() in value for value in accepted)
        if scope["type"] != "http" or scope["path"] != wire.GENERATE_ROUTE or not asks_for_arrays:
            await self._app(scope, receive, send)
            return
        serving = getattr(getattr(scope.get("app"), "state", None), "serving_tokens", None)
        if serving is not None and not isinstance(serving.engine_client, EngineWithArrays):
            serving.engine_client = EngineWithArrays(serving.engine_client)
        arrays, parts = Arrays(), []
        start: Message | None = None

        async def send_packed(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and message["status"] == 200:
                start = message
            elif start is None:
                await send(message)
            else:
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    await _send_packed(send, start, b"".join(parts), arrays)

        token = _wanted.set(arrays)
        try:
            await self._app(scope, receive, send_packed)
        finally:
            _wanted.reset(token)


async def _send_packed(send: Send, start: Message, body: bytes, arrays: Arrays) -> None:
    headers = {bytes(name).lower(): bytes(value) for name, value in start.get("headers", ())}
    spans = headers.get(SPANS_HEADER)
    try:
        answer = wire.read_generate(body, spans_header=spans.decode() if spans else None)
    except InfrastructureError:
        pass  # the driver reads and reports it
    else:
        if arrays.token_ids_N is not None and arrays.logprobs_N is not None:
            answer = replace(answer, **asdict(arrays))
        body = wire.pack_answer(answer)
        headers[b"content-type"] = wire.PACKED_TYPE.encode()
        headers[b"content-length"] = str(len(body)).encode()
    await send({**start, "headers": list(headers.items())})
    await send({"type": "http.response.body", "body": body})
