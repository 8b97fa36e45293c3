"""Tracks the policy version of an engine's weights inside the server.

A middleware between HTTP and vLLM owns the server's version counter, and with it:
- **Salt.** Every request that samples gets `cache_salt` from the counter as it is admitted, replacing the caller's. A
  salt stamped by the driver would race the swap: stamped before, admitted after.
- **Waiting.** Between pause and resume nothing is admitted. Such requests wait here and are stamped when they continue,
  so a request admitted after a swap never reads KV blocks from before it. Requests admitted earlier keep salt and
  cache.
- **Spans.** For a vLLM that does not report which weights sampled a token, the token count of every running request is
  noted at each finished update, inside the pause, and the response gets the spans as a header.
- **Adapter.** Once a LoRA adapter is loaded (`lora_sync: adapter`), every request that samples names it as its model.
- **Staleness.** A restarted server has the weights of the run's start; it samples nothing (503) until an update has
  finished.

Does not own the pause itself, nor the secret (`auth`). The counter moves with every `finish_weight_update`, failed ones
included, because those may have changed weights too; so a salt never repeats.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from telescope.inference.auth import error_response
from telescope.inference.vllm import adapter as wire
from telescope.inference.vllm.support import installed_version, parse_version, reports_version_spans

SALTED_ROUTES = frozenset({
    wire.GENERATE_ROUTE, "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/responses",
    "/v1/messages", "/v1/systemone", "/generative_scoring", "/invocations",
})  # fmt: skip
"""Routes that sample or score. All of them accept `cache_salt` at the top level of their body."""

ABORT_ROUTES = (wire.ABORT_ROUTE, "/inference/v1/abort_requests")

REQUIRE_UPDATE_VARIABLE = "TELESCOPE_REQUIRE_WEIGHT_UPDATE"
"""`1` in the environment of a restarted server: it must not sample before a weight update."""


@dataclass(eq=False, slots=True)
class FrozenRequest:
    """A request that waits for the end of a pause."""

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False


class PolicyVersionMiddleware:
    """ASGI middleware inside the secret check and outside vLLM. One per server process."""

    def __init__(self, app: ASGIApp, note_spans: bool | None = None) -> None:
        self._app = app
        if note_spans is None:
            version = installed_version()
            note_spans = version is not None and not reports_version_spans(parse_version(version))
        self._note_spans = note_spans
        self._stale = os.environ.get(REQUIRE_UPDATE_VARIABLE) == "1"
        self._updates = 0
        self._label = wire.INITIAL_LABEL
        self._paused = False
        self._adapter: bytes | None = None
        self._waiting: dict[str, FrozenRequest] = {}
        self._spans: dict[str, list[tuple[str, int]]] = {}

    @property
    def salt(self) -> str:
        """Returns the salt of requests admitted now: the number of updates, and the version after them."""
        return f"telescope-{self._updates}-{self._label}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path")
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif path in SALTED_ROUTES and self._stale:
            refusal = error_response(503, "this server was restarted and has not received the current weights yet")
            await refusal(scope, receive, send)
        elif path in SALTED_ROUTES:
            await self._sample(scope, receive, send)
        elif path == wire.PAUSE_ROUTE:
            await self._pause(scope, receive, send)
        elif path == wire.RESUME_ROUTE:
            await self._forward(scope, receive, send, before_answer=lambda status: self._release())
        elif path == wire.FINISH_UPDATE_ROUTE:
            await self._finish_update(scope, receive, send)
        elif path == wire.LOAD_ADAPTER_ROUTE:
            await self._forward(scope, receive, send, before_answer=lambda status: self._adapter_loaded(status, scope))
        elif path in ABORT_ROUTES:
            body = await read_body(receive)
            self._abort_waiting(body)
            await self._app(scope, replay(body, receive), send)
        else:
            await self._app(scope, receive, send)

    # --- requests that sample ---------------------------------------------------------------------------------------

    async def _sample(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(receive)
        try:
            body = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError:
            await self._app(scope, replay(raw, receive), send)  # vLLM reports the error
            return
        request_id = _text(body.get("request_id"))
        if self._paused and not await self._wait_for_resume(request_id, scope, receive, send):
            return
        body["cache_salt"] = msgspec.Raw(msgspec.json.encode(self.salt))
        if self._adapter is not None:
            body["model"] = msgspec.Raw(self._adapter)
        stamped = msgspec.json.encode(body)
        if not self._note_spans or request_id is None or scope["path"] != wire.GENERATE_ROUTE:
            await self._app(with_length(scope, len(stamped)), replay(stamped, receive), send)
            return
        engine_id = wire.engine_request_id(request_id)
        self._spans[engine_id] = [(self._label, 0)]

        async def send_with_spans(message: Message) -> None:
            if message["type"] == "http.response.start":
                value = msgspec.json.encode(self._spans[engine_id])
                message["headers"] = [*message.get("headers", ()), (wire.VERSION_SPANS_HEADER.encode(), value)]
            await send(message)

        try:
            await self._app(with_length(scope, len(stamped)), replay(stamped, receive), send_with_spans)
        finally:
            del self._spans[engine_id]

    async def _wait_for_resume(self, request_id: str | None, scope: Scope, receive: Receive, send: Send) -> bool:
        """Waits for the end of the pause. Returns False if the caller disconnected, or the request was aborted."""
        request = FrozenRequest()
        key = request_id if request_id is not None else f"anonymous-{id(request)}"
        self._waiting[key] = request
        left = asyncio.ensure_future(wait_for_disconnect(receive))
        left.add_done_callback(lambda _: request.wake.set())
        try:
            # A second pause may begin before this task runs again.
            while self._paused and not request.aborted and not left.done():
                request.wake.clear()
                await request.wake.wait()
        finally:
            del self._waiting[key]
            left.cancel()
        if request.aborted:  # before its first token: respond as vLLM does
            empty = {"token_ids": [], "logprobs": {"content": []}, "weight_versions": []}
            choices = [{"index": 0, "finish_reason": "abort", **empty}]
            body = {"request_id": wire.engine_request_id(request_id or ""), "choices": choices}
            await JSONResponse(body)(scope, receive, send)
            return False
        return not left.done()

    def _abort_waiting(self, body: bytes) -> None:
        try:
            ids = msgspec.json.decode(body).get("request_ids") or []
        except (msgspec.DecodeError, AttributeError):
            return  # vLLM responds with 400
        named = {str(i).removeprefix(wire.REQUEST_ID_PREFIX) for i in ids}
        for key, request in self._waiting.items():
            if not ids or key in named:  # an empty list means everything
                request.aborted = True
                request.wake.set()

    # --- pauses and updates -----------------------------------------------------------------------------------------

    async def _pause(self, scope: Scope, receive: Receive, send: Send) -> None:
        was_paused, self._paused = self._paused, True  # before vLLM knows, so no request is admitted in between
        status = await self._forward(scope, receive, send)
        if status >= 400 and not was_paused:
            self._release()

    def _release(self) -> None:
        self._paused = False
        for request in self._waiting.values():
            request.wake.set()

    async def _finish_update(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(receive)
        label = self._label
        with contextlib.suppress(msgspec.DecodeError):  # vLLM responds with 400, and the counter still moves
            label = _text(msgspec.json.decode(raw or b"{}", type=dict[str, msgspec.Raw]).get("weight_version")) or label

        def moved(status: int) -> None:
            self._updates += 1
            if status >= 400:
                return
            self._label = label
            self._stale = False
            if self._note_spans:
                # Inside the pause, which completes after the engine's last output has arrived.
                states = scope["app"].state.engine_client.output_processor.request_states.values()
                running = {s.external_req_id: s.detokenizer for s in states if s.detokenizer is not None}
                for request_id, spans in self._spans.items():
                    sampled = running[request_id].num_output_tokens() if request_id in running else 0
                    spans.append((label, sampled))

        await self._forward(scope, replay(raw, receive), send, before_answer=moved)

    def _adapter_loaded(self, status: int, scope: Scope) -> None:
        if status >= 400:
            return
        self._adapter = msgspec.json.encode(wire.ADAPTER_NAME)
        # vLLM keeps `load_inplace` with the adapter, and would read its files again at every step of the engine.
        scope["app"].state.openai_serving_models.lora_requests[wire.ADAPTER_NAME].load_inplace = False

    async def _forward(
        self, scope: Scope, receive: Receive, send: Send, *, before_answer: Callable[[int], None] | None = None
    ) -> int:
        """Forwards a request. Runs `before_answer(status)` after vLLM is done and before the caller is notified."""
        status = 500

        async def watching_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if before_answer is not None:
                    before_answer(status)
            await send(message)

        await self._app(scope, receive, watching_send)
        return status


async def read_body(receive: Receive) -> bytes:
    """Reads the whole body of a request. Empty if the caller disconnects first."""
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b""
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


def replay(body: bytes, receive: Receive) -> Receive:
    """Returns a receive channel that yields `body`, then the original's messages (the disconnect)."""
    sent = False

    async def channel() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return channel


def with_length(scope: Scope, length: int) -> Scope:
    """Returns the scope with the content length of a rewritten body."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def _text(raw: msgspec.Raw | None) -> str | None:
    """Returns a JSON value as text, or None if it is absent or null."""
    if raw is None:
        return None
    value = msgspec.json.decode(raw)
    return None if value is None else str(value)


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        continue
