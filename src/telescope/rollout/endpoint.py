"""The endpoint of a rollout worker: agents call the policy with the SDKs of OpenAI and Anthropic.

Invariants:
- A rollout has a secret, its API key. Another key, or that of a rollout that is over, opens nothing (401).
- A call is sampled once: an SDK's retry gets the recorded answer, or waits for the one that is being sampled. A retry is
  the same body with `x-stainless-retry-count`, or any request with the same `Idempotency-Key`.
- An answer is complete before its first byte is sent, also where it is streamed.
- An answer that no client has read, and none has asked for again within `RETRY_SECONDS`, is dropped: its sampling is
  cancelled, or `dropped` is called.
- A rollout that ends cancels its calls, which end with 499.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from aiohttp import web

from telescope.environments.base import ChatMessage
from telescope.environments.context import Answer, Call, RefusedCall
from telescope.errors import InfrastructureError
from telescope.rollout.dialects import Body, Refusal, chat, messages, responses

MAX_BODY_BYTES = 32 * 2**20
MAX_IN_FLIGHT = 64
"""Requests of one rollout at a time; more are refused with 429."""
RETRY_SECONDS = 10
"""How long an answer waits for the retry of a client that has gone. SDKs retry within 8 s."""
PING_SECONDS = 15
"""A stream that has waited for its answer this long gets a comment, so that clients do not take it for dead."""

_PATH = re.compile(r"(?:/chat/([^/]+))?/v1/([^?]+?)/?(?:\?.*)?")
_DIALECTS: dict[str, Any] = {"chat/completions": chat, "responses": responses, "messages": messages}
_COUNT_TOKENS = "messages/count_tokens"
_KINDS = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    500: "api_error", 503: "overloaded_error",
}  # fmt: skip

logger = logging.getLogger(__name__)

Complete = Callable[[Call], Awaitable[Answer]]


@dataclass(eq=False, slots=True)
class _Pending:
    """A call, and the task that samples its answer."""

    call: Call
    task: asyncio.Task[Answer]
    num_waiting: int = 0
    is_read: bool = False

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


@dataclass(eq=False, slots=True)
class _Rollout:
    complete: Complete
    count: Callable[[Call], Awaitable[int]]
    dropped: Callable[[Answer], object]
    calls: defaultdict[str, list[_Pending]] = field(default_factory=lambda: defaultdict(list))
    """By the hash of the request, or its `Idempotency-Key`."""
    unread: set[_Pending] = field(default_factory=set)
    kept: dict[str, list[ChatMessage]] = field(default_factory=dict)
    """Conversations by the ids of responses, for `previous_response_id`."""
    num_requests: int = 0
    num_refused: int = 0
    """Requests that were refused with 429 and not sent again so far."""

    def drop(self, pending: _Pending) -> None:
        """Gives up an answer that nobody reads."""
        if pending in self.unread and not pending.num_waiting:
            self.unread.discard(pending)
            if not pending.task.done():
                pending.task.cancel()
            elif not pending.failed:
                self.dropped(pending.task.result())


class Endpoint:
    """An HTTP server in the event loop of a rollout worker. `models` are the names of the policy, the first its main.

    It listens on a free port of the loopback, and on request on a Unix socket for agents inside of sandboxes.
    """

    def __init__(self, models: Sequence[str]) -> None:
        self.models = models
        self._rollouts: dict[str, _Rollout] = {}
        self._runner: web.ServerRunner | None = None
        self._socket: Path | None = None
        self._port = 0

    async def start(self, socket: Path | None = None) -> None:
        """Listens."""

        def request(*parts: Any) -> web.BaseRequest:
            return web.BaseRequest(*parts, asyncio.get_running_loop(), client_max_size=MAX_BODY_BYTES)

        server = web.Server(self._respond, request_factory=request, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]
        if socket:
            await web.UnixSite(self._runner, str(socket)).start()
            socket.chmod(0o600)
            self._socket = socket

    async def stop(self) -> None:
        """Ends all rollouts, and closes all connections."""
        for key in list(self._rollouts):
            self.close_rollout(key)
        if self._runner:
            await self._runner.cleanup()
        if self._socket:
            self._socket.unlink(missing_ok=True)

    def base_url(self, chat: str = "", port: int | None = None) -> str:
        """Returns the URL for OpenAI's clients. `port` is that of a sandbox, which relays it to the Unix socket."""
        name = f"/chat/{quote(chat, safe='')}" if chat else ""
        return f"http://127.0.0.1:{port or self._port}{name}/v1"

    def open(
        self,
        complete: Complete,
        count: Callable[[Call], Awaitable[int]],
        dropped: Callable[[Answer], object] = lambda answer: None,
    ) -> str:
        """Returns the API key of a new rollout.

        `complete` is `Services.complete`, `count` returns the number of a call's prompt tokens, and `dropped` is called
        with an answer that no client has read.
        """
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._rollouts[key] = _Rollout(complete, count, dropped)
        return key

    def close_rollout(self, key: str) -> None:
        """Ends a rollout: drops its unread answers and refuses its key from now on."""
        if rollout := self._rollouts.pop(key, None):
            for pending in list(rollout.unread):
                pending.num_waiting = 0
                rollout.drop(pending)

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._route(request)
        except Refusal as refusal:
            return _error(refusal)

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        path = _PATH.fullmatch(request.raw_path)
        route = path[2] if path else ""
        headers = request.headers
        key = headers.get("x-api-key") or headers.get("Authorization", "").removeprefix("Bearer ")
        rollout = self._rollouts.get(key)
        if rollout is None:
            message = "Incorrect API key provided: it is not the key of a rollout that is running here."
            raise Refusal(message, 401, code="invalid_api_key")
        if (request.method, route) == ("GET", "models"):
            return _json(self._list_of_models())
        if path is None or request.method != "POST" or route not in (*_DIALECTS, _COUNT_TOKENS):
            message = f"Invalid URL ({request.method} {request.path}). There are: GET /v1/models, POST /v1/"
            raise Refusal(message + ", /v1/".join((*_DIALECTS, _COUNT_TOKENS)), 404)
        if rollout.num_requests >= MAX_IN_FLIGHT or len(rollout.unread) >= MAX_IN_FLIGHT:
            rollout.num_refused += 1
            message = f"Rate limit reached: a rollout may have {MAX_IN_FLIGHT} requests at a time. Wait for answers."
            raise Refusal(message, 429, code="rate_limit_exceeded")
        rollout.num_requests += 1
        try:
            raw = await _read(request)
            name = unquote(path[1] or "") or headers.get("X-Session-Id", "")
            if route == _COUNT_TOKENS:
                call = self._parse(raw, messages, rollout)[0]
                return _json({"input_tokens": await rollout.count(replace(call, chat=name))})
            return await self._answer(request, rollout, _DIALECTS[route], raw, name)
        finally:
            rollout.num_requests -= 1

    def _parse(self, raw: bytes, dialect: Any, rollout: _Rollout) -> tuple[Call, Body]:
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise Refusal("We could not parse the JSON body of your request: it must be a JSON object.")
        model = body.setdefault("model", self.models[0])
        if model not in self.models:
            names = ", ".join(f"`{name}`" for name in self.models)
            message = f"The model `{model}` does not exist or you do not have access to it. There is: {names}."
            raise Refusal(message, 404, code="model_not_found", param="model")
        try:
            return dialect.read(body, rollout.kept), body
        except KeyError as error:
            raise Refusal(f"Missing required parameter: {error}.", param=str(error.args[0])) from error
        except (TypeError, AttributeError, ValueError) as error:
            raise Refusal(f"Invalid type in the body of your request: {error}.") from error

    def _list_of_models(self) -> Body:
        """Returns a list in which the clients of both providers find what they expect."""
        shared = {"object": "model", "type": "model", "created": 0, "created_at": "1970-01-01T00:00:00Z"}
        shared |= {"owned_by": "telescope", "lifecycle": "active"}
        data = [{"id": name, "display_name": name, **shared} for name in self.models]
        return {"object": "list", "data": data, "has_more": False, "first_id": None, "last_id": None}

    async def _answer(
        self, request: web.BaseRequest, rollout: _Rollout, dialect: Any, raw: bytes, name: str
    ) -> web.StreamResponse:
        call, body = self._parse(raw, dialect, rollout)
        call = replace(call, chat=name, parent=request.headers.get("x-parent-session-id", ""))
        pending = _pending_call(rollout, request, raw, call)
        response: web.StreamResponse | None = None
        pending.num_waiting += 1
        try:
            while not pending.task.done():
                await asyncio.wait({pending.task}, timeout=PING_SECONDS if body.get("stream") else None)
                if not pending.task.done():
                    response = response or await _open_stream(request)
                    await response.write(b": waiting\n\n")
            try:
                answer = _result(pending.task)
            except Refusal as refusal:
                pending.is_read = True
                if response is None:
                    raise
                await response.write(_event("error", _error_body(refusal)))
                return response
            content = dialect.write(answer, pending.call, body, rollout.kept)
            if body.get("stream"):
                data = b"".join(_event(*event) for event in dialect.stream(content, body))
                if response is None:
                    response = web.Response(body=data, content_type="text/event-stream", charset="utf-8")
                else:
                    await response.write(data)
            else:
                response = _json(content)
            await response.prepare(request)
            await response.write_eof()  # here, so that a client that has gone is known
            pending.is_read = True
            return response
        except ConnectionError:
            return response or web.Response()
        finally:
            pending.num_waiting -= 1
            if pending.is_read:
                rollout.unread.discard(pending)
            elif not pending.num_waiting:
                asyncio.get_running_loop().call_later(RETRY_SECONDS, rollout.drop, pending)


def _pending_call(rollout: _Rollout, request: web.BaseRequest, raw: bytes, call: Call) -> _Pending:
    """Returns the call that a request repeats, or starts a new one."""
    named = request.headers.get("Idempotency-Key")
    known = named or hashlib.sha256(b"\n".join((request.raw_path.encode(), call.chat.encode(), raw))).hexdigest()
    earlier = rollout.calls[known]
    repeated: _Pending | None = None
    if earlier and (named or request.headers.get("x-stainless-retry-count", "0") != "0"):
        unread = [each for each in earlier if not each.num_waiting and (each.failed or not each.is_read)]
        if unread:
            repeated = unread[0]
        elif rollout.num_refused and not named:
            rollout.num_refused -= 1  # it repeats a request that was refused, not one of these
        else:
            repeated = earlier[-1]
    if repeated is None:
        call = replace(call, key=f"{known}-{len(earlier)}")
        repeated = _Pending(call, _sample(rollout, call))
        earlier.append(repeated)
    elif repeated.failed:
        repeated.task, repeated.is_read = _sample(rollout, repeated.call), False
    if not repeated.is_read:
        rollout.unread.add(repeated)
    return repeated


def _sample(rollout: _Rollout, call: Call) -> asyncio.Task[Answer]:
    async def complete() -> Answer:
        return await rollout.complete(call)

    return asyncio.create_task(complete())


def _result(task: asyncio.Task[Answer]) -> Answer:
    try:
        return task.result()
    except asyncio.CancelledError:
        raise Refusal("The rollout was ended while this request was answered.", 499, "rollout_ended") from None
    except RefusedCall as error:
        # Agents look for this text, or for the code, to compact their history.
        raise Refusal(f"prompt is too long: {error}", code=error.code) from error
    except InfrastructureError as error:
        logger.warning("no engine answered an agent's call: %s", error)
        raise Refusal("The model is not available at the moment. Try again.", 503, "unavailable") from None
    except Exception:
        logger.exception("an agent's call failed")
        raise Refusal("The endpoint failed. Its log has the reason.", 500, "internal_error") from None


async def _read(request: web.BaseRequest) -> bytes:
    try:
        if (request.content_length or 0) <= MAX_BODY_BYTES:
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        pass
    raise Refusal(f"Request too large: the body may have {MAX_BODY_BYTES // 2**20} MB.", 413, "request_too_large")


async def _open_stream(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


def _event(name: str, data: Any) -> bytes:
    line = data if isinstance(data, str) else json.dumps(data)
    return f"event: {name}\ndata: {line}\n\n".encode() if name else f"data: {line}\n\n".encode()


def _json(body: Body, status: int = 200, **headers: str) -> web.Response:
    data = json.dumps(body).encode()
    return web.Response(body=data, status=status, content_type="application/json", headers=headers)


def _error_body(refusal: Refusal) -> Body:
    """Returns an error as the SDKs of both providers read it."""
    kind = _KINDS.get(refusal.status, "invalid_request_error")
    error = {"type": kind, "message": str(refusal), "code": refusal.code, "param": refusal.param}
    return {"type": "error", "error": error}


def _error(refusal: Refusal) -> web.Response:
    headers = {"Retry-After": "1"} if refusal.status in (429, 503) else {"x-should-retry": "false"}
    return _json(_error_body(refusal), refusal.status, **headers)
