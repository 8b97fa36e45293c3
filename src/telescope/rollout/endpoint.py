"""The endpoint of a rollout worker: agents call the policy with the SDKs of OpenAI and Anthropic.

Invariants:
- Each rollout has a secret, its API key. A key that is unknown, or whose rollout has ended, is refused with 401.
- A call is sampled once: a retry gets the recorded completion, or waits for the one that is being sampled. A retry is
  the same body with a positive `x-stainless-retry-count`, or a request with the same `Idempotency-Key`.
- A completion is complete before the first byte of its response is sent, also in a stream.
- A completion that no client has read is dropped when `RETRY_SECONDS` pass without a retry, or the rollout ends: its
  sampling is cancelled, or `dropped` is called.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec
from aiohttp import web

from telescope.environments.context import Answer, Call, RefusedCall
from telescope.environments.user_code import error_text
from telescope.errors import InfrastructureError, UserError
from telescope.rollout.dialects import Body, Dialect, Refusal, new_dialects
from telescope.utils.process import without_proxy

HOST = "127.0.0.1"
MAX_BODY_BYTES = 32 * 2**20
MAX_IN_FLIGHT = 64
"""Most concurrent requests of one rollout; more are refused with 429."""
MAX_CONNECTING = 4096
"""Most connections waiting to be accepted. The system resets more, for example when many rollouts begin together."""
RETRY_SECONDS = 10
"""How long a completion waits for the retry of a client that has disconnected. SDKs retry within 8 s."""
PING_SECONDS = 15
"""Interval of comments in a stream before its completion is ready, so that clients do not give up."""

_PATH = re.compile(r"(?:/chat/([^/]+))?/v1/([^?]+?)/?(?:\?.*)?")
_JSON = "application/json"
_KINDS = {401: "authentication", 404: "not_found", 429: "rate_limit", 500: "api", 503: "overloaded"}

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Pending:
    """A call whose completion is sampled, or was."""

    task: asyncio.Future[Answer] | None = None
    num_waiting: int = 0
    is_read: bool = False
    drops: asyncio.TimerHandle | None = None
    """Drops its completion if no retry comes."""

    @property
    def lost(self) -> bool:
        """Whether it has no completion, and none is being sampled."""
        return self.task is None or (self.task.done() and (self.task.cancelled() or self.task.exception() is not None))


@dataclass(eq=False, slots=True)
class _Rollout:
    """The calls of one rollout."""

    complete: Callable[[Call], Awaitable[Answer]]
    count: Callable[[Call], int]
    dropped: Callable[[Answer], object]
    refused: Callable[[str], object]
    dialects: dict[str, Dialect] = field(default_factory=new_dialects)
    calls: defaultdict[str, list[_Pending]] = field(default_factory=lambda: defaultdict(list))
    """Calls by the hash of the request, or by its `Idempotency-Key`."""
    unread: set[_Pending] = field(default_factory=set)
    num_requests: int = 0
    num_refused: int = 0
    """Requests that were refused with 429 and have not been sent again."""

    def count_refusal(self, refusal: Refusal) -> None:
        self.refused(refusal.code or str(refusal.status))

    def start(self, call: Call, request: web.BaseRequest, raw: bytes) -> _Pending:
        """Returns the call that a request repeats, or a new one."""
        named = request.headers.get("Idempotency-Key")
        known = named or hashlib.sha256(b"\n".join((request.raw_path.encode(), call.chat.encode(), raw))).hexdigest()
        earlier = self.calls[known]
        pending: _Pending | None = None
        if named or request.headers.get("x-stainless-retry-count", "0") != "0":
            unread = [each for each in earlier if not each.num_waiting and (each.lost or not each.is_read)]
            if unread or named or not self.num_refused:
                pending = next(iter(unread or earlier[-1:]), None)
            else:
                self.num_refused -= 1  # it repeats a refused request, none of the recorded calls
        if pending is None:
            pending = _Pending()
            earlier.append(pending)
        if pending.lost:
            pending.task = asyncio.ensure_future(self.complete(call))
            pending.is_read = False
        if not pending.is_read:
            self.unread.add(pending)
        return pending

    def drop(self, pending: _Pending) -> None:
        """Drops a completion that no client has read."""
        if pending in self.unread:
            self.unread.discard(pending)
            if pending.task and not pending.task.done():
                pending.task.cancel()
            elif pending.task and not pending.lost:
                self.dropped(pending.task.result())
                pending.task = None


class Endpoint:
    """An HTTP server in the event loop of a rollout worker. `models` are the names of the policy.

    It listens on a free port of the loopback and, if asked, on a Unix socket for agents in sandboxes.
    """

    def __init__(self, models: Sequence[str]) -> None:
        self.models = models
        self._rollouts: dict[str, _Rollout] = {}
        self._runner: web.ServerRunner | None = None
        self._port = 0

    async def start(self, socket: Path | None = None) -> None:
        request: Any = partial(web.BaseRequest, loop=asyncio.get_running_loop(), client_max_size=MAX_BODY_BYTES)
        server = web.Server(self._respond, request_factory=request, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0, backlog=MAX_CONNECTING).start()
        self._port = self._runner.addresses[0][1]
        os.environ.update(without_proxy(HOST))  # for the clients of agents and of their processes
        if socket:
            await web.UnixSite(self._runner, str(socket), backlog=MAX_CONNECTING).start()
            os.chmod(socket, 0o600)  # only for this user

    async def stop(self) -> None:
        """Ends all rollouts and closes all connections."""
        for key in list(self._rollouts):
            self.close_rollout(key)
        if self._runner:
            await self._runner.cleanup()

    def base_url(self, chat: str = "") -> str:
        """Returns the URL for OpenAI's clients."""
        name = f"/chat/{quote(chat, safe='')}" if chat else ""
        return f"http://{HOST}:{self._port}{name}/v1"

    def open(
        self,
        complete: Callable[[Call], Awaitable[Answer]],
        count: Callable[[Call], int],
        dropped: Callable[[Answer], object] = lambda answer: None,
        refused: Callable[[str], object] = lambda code: None,
    ) -> str:
        """Returns the API key of a new rollout.

        `complete` is `Services.complete`. `count` returns the number of prompt tokens of a call. `dropped` is called
        with each completion that no client has read, and `refused` with the error code, or else the status, of each
        request that gets an error while the rollout runs.
        """
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._rollouts[key] = _Rollout(complete, count, dropped, refused)
        return key

    def close_rollout(self, key: str) -> None:
        """Ends a rollout: drops unread completions, ends open requests with 499, and refuses the key from now on."""
        if rollout := self._rollouts.pop(key, None):
            for pending in list(rollout.unread):
                rollout.drop(pending)

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        key = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        rollout = self._rollouts.get(key)
        try:
            return await self._route(request, key)
        except Exception as error:
            refusal = _refusal(error)
        if rollout is not None and self._rollouts.get(key) is rollout:
            rollout.count_refusal(refusal)
        headers = {"Retry-After": "1"} if refusal.status in (429, 503) else {"x-should-retry": "false"}
        body = _encode(_error(refusal))
        return web.Response(body=body, status=refusal.status, headers=headers, content_type=_JSON)

    async def _route(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        headers = request.headers
        rollout = self._rollouts.get(key)
        if rollout is None:
            message = "Incorrect API key provided: it is not the key of a rollout that is running here."
            raise Refusal(message, 401, "invalid_api_key")
        path = _PATH.fullmatch(request.raw_path)
        route = path[2] if path else ""
        if request.method == "GET" and route.split("/")[0] == "models":
            return web.Response(body=_encode(self._describe(unquote(route[len("models/") :]))), content_type=_JSON)
        counts = route == "messages/count_tokens"
        dialect = rollout.dialects.get("messages" if counts else route)
        if path is None or request.method != "POST" or dialect is None:
            known = ", /v1/".join((*rollout.dialects, "messages/count_tokens"))
            message = f"Invalid URL ({request.method} {request.path}). There are GET /v1/models, POST /v1/{known}."
            raise Refusal(message, 404)
        if max(rollout.num_requests, len(rollout.unread)) >= MAX_IN_FLIGHT:
            rollout.num_refused += 1
            message = f"Rate limit reached: a rollout may have {MAX_IN_FLIGHT} requests at a time. Wait for answers."
            raise Refusal(message, 429, "rate_limit_exceeded")
        rollout.num_requests += 1
        try:
            raw = await request.read()
            if key not in self._rollouts:
                raise _ended()
            call, body = self._parse(raw, dialect)
            name = unquote(path[1] or "") or headers.get("X-Session-Id", "")
            call = replace(call, chat="/".join(filter(None, (headers.get("x-parent-session-id"), name))))
            if counts:
                try:
                    counted = rollout.count(call)
                except Exception as error:  # of malformed messages or tools, or raised by the chat template
                    raise Refusal(f"This call is malformed: {error_text(error)}") from error
                return web.Response(body=_encode({"input_tokens": counted}), content_type=_JSON)
            pending = rollout.start(call, request, raw)
            is_stream = bool(body.get("stream"))

            def write(answer: Answer) -> bytes:
                content = dialect.write(answer, call, body)
                if not is_stream:
                    return _encode(content)
                return b"".join(map(_event, dialect.events(content, body))) + dialect.end

            return await _answer(request, rollout, pending, write, is_stream)
        finally:
            rollout.num_requests -= 1

    def _require_model(self, model: Any) -> None:
        if model not in self.models:
            message = f"The model `{model}` does not exist or you do not have access to it. There is: "
            raise Refusal(message + ", ".join(self.models), 404, "model_not_found", "model")

    def _describe(self, model: str) -> Body:
        """Returns a model, or the list of all, with the fields that the clients of both providers expect."""
        shared = {"object": "model", "type": "model", "owned_by": "telescope", "lifecycle": "active"}
        created = {"created": 0, "created_at": "1970-01-01T00:00:00Z"}
        data = [{"id": name, "display_name": name, **shared, **created} for name in self.models]
        if not model:
            return {"object": "list", "data": data, "has_more": False}
        self._require_model(model)
        return data[self.models.index(model)]

    def _parse(self, raw: bytes, dialect: Dialect) -> tuple[Call, Body]:
        try:
            body = _decode(raw)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise Refusal("We could not parse the JSON body of your request: it must be a JSON object.")
        self._require_model(body.setdefault("model", self.models[0]))
        try:
            return dialect.read(body), body
        except KeyError as error:
            raise Refusal(f"Missing required parameter: {error}.", param=str(error.args[0])) from error
        except (TypeError, AttributeError, ValueError) as error:
            raise Refusal(f"Invalid type in the body of your request: {error}.") from error


async def _answer(
    request: web.BaseRequest, rollout: _Rollout, pending: _Pending, write: Callable[[Answer], bytes], is_stream: bool
) -> web.StreamResponse:
    """Sends the response to a call. A streaming client gets comments as keep-alive until it is ready."""
    response = web.StreamResponse()
    response.content_type = "text/event-stream" if is_stream else _JSON
    task = pending.task
    assert task is not None
    pending.num_waiting += 1
    if pending.drops:
        pending.drops.cancel()
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=PING_SECONDS if is_stream else None)
            if not task.done():
                await response.prepare(request)
                await response.write(b": waiting\n\n")
        try:
            if task.cancelled():
                raise _ended()
            data = write(task.result())
        except Exception as error:
            pending.is_read = True
            if not response.prepared:
                raise
            refusal = _refusal(error)
            rollout.count_refusal(refusal)
            data = _event(_error(refusal))
        if not response.prepared:
            response.content_length = len(data)
            await response.prepare(request)
        await response.write_eof(data)
        pending.is_read = True
    except ConnectionError:  # the client has disconnected
        pass
    finally:
        pending.num_waiting -= 1
        if pending.is_read:
            rollout.unread.discard(pending)
        elif not pending.num_waiting:
            pending.drops = asyncio.get_running_loop().call_later(RETRY_SECONDS, rollout.drop, pending)
    return response


def _ended() -> Refusal:
    return Refusal("The rollout was ended before this request was answered.", 499, "rollout_ended")


def _refusal(error: Exception) -> Refusal:
    match error:
        case Refusal():
            return error
        case web.HTTPRequestEntityTooLarge():
            return Refusal(f"Request too large: a body may have {MAX_BODY_BYTES // 2**20} MB.", 413)
        case RefusedCall():  # agents compact their history when they find this text or the code
            return Refusal(f"prompt is too long: {error}", code=error.code)
        case UserError():
            return Refusal(str(error))
        case InfrastructureError():
            logger.warning("no engine answered an agent's call: %s", error)
            return Refusal("The model is not available at the moment. Try again.", 503, "unavailable")
    logger.error("an agent's call failed", exc_info=error)
    return Refusal("The endpoint failed. Its log has the reason.", 500, "internal_error")


def _decode(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:  # for example half a surrogate pair, which a model may write
        return json.loads(raw)


def _encode(body: Body) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        return json.dumps(body).encode()


def _event(data: Body) -> bytes:
    name = f"event: {data['type']}\n".encode() if "type" in data else b""
    return b"%sdata: %s\n\n" % (name, _encode(data))


def _error(refusal: Refusal) -> Body:
    """Returns an error in a form that the SDKs of both providers read."""
    kind = f"{_KINDS.get(refusal.status, 'invalid_request')}_error"
    error: Body = {"type": kind, "message": str(refusal), "code": refusal.code, "param": refusal.param}
    return {"type": "error", "error": {**error, "details": {"error_code": refusal.code}}}
