"""Requests whose engine has died are answered, so that its HTTP process ends instead of waiting for them.

vLLM's HTTP process notices within milliseconds that the process of its engine is gone, fails the requests that sample,
and shuts down. But calls into the engine (pauses, whether it is paused, weight updates, collective RPC) wait for an
answer that nobody will send, requests that a pause holds back for a pause that nobody will end, and the shutdown waits
for both: the process would go on for ever without an engine (vLLM 0.26 and 0.32).

Owns the middleware that ends those requests. Invariants: nothing is touched while the engine lives; an answer that has
begun is not begun again; vLLM, whose words say more, has `GRACE_SECONDS` to answer for itself.

The health route of a server says so when the process of its engine lives but no longer does anything.

vLLM's health route asks whether that process has ended. One that hangs (a kernel that never returns, a deadlock, a
process that was stopped) is healthy to it, for ever, and its requests would wait for their own deadlines. So each
health check has the engine process answer a question of its own, for which its loop has to come around.

Owns the middleware that asks. Invariants: one question at a time waits for its answer; time in which this process
itself did not run (a machine or container that was paused) does not count; a call into the workers, a weight update
say, which keeps the loop for as long as it takes, has its own limit.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from telescope.inference.auth import Application, Message, Receive, Scope, Send, answer_json
from telescope.inference.vllm import adapter as wire

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


STEP_FIELD, CALL_FIELD = "inference_hang_timeout_seconds", "weight_sync_timeout_seconds"
STEP_LIMIT_VARIABLE = "TELESCOPE_ENGINE_STEP_SECONDS"
CALL_LIMIT_VARIABLE = "TELESCOPE_ENGINE_CALL_SECONDS"
"""Environment of the server: how long a step may keep the loop, and how long a call into the workers may, which those
fields say."""

CALLS = frozenset(
    {
        wire.INIT_TRANSFER_ROUTE,
        wire.START_UPDATE_ROUTE,
        wire.UPDATE_WEIGHTS_ROUTE,
        wire.FINISH_UPDATE_ROUTE,
        wire.COLLECTIVE_RPC_ROUTE,
    }
)

LONGEST_LOOK_SECONDS = 10.0
"""Counted at most between two health checks, which come every few seconds."""


class EngineHangMiddleware:
    """ASGI middleware that answers 503 on the health route once the engine has been silent for too long."""

    def __init__(self, app: Application, now: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._now = now
        self._step_limit = float(os.environ[STEP_LIMIT_VARIABLE])
        self._call_limit = max(self._step_limit, float(os.environ[CALL_LIMIT_VARIABLE]))
        self._question: asyncio.Future[Any] | None = None
        self._asked_in_call = False
        self._silent = 0.0
        self._looked_at = 0.0
        self._num_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
        if scope["type"] != "http" or engine is None:
            await self._app(scope, receive, send)
        elif scope["path"] in CALLS:
            self._num_calls += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._num_calls -= 1
                if self._asked_in_call:
                    self._silent = 0.0  # the step after it has all of its time
        elif scope["path"] == wire.HEALTH_ROUTE and (silent := self._silence_of(engine)) > self._limit:
            field = STEP_FIELD if self._limit == self._step_limit else CALL_FIELD
            words = f"the process of its engine lives, but has not answered for {silent:.0f} s ({field})"
            await answer_json(503, f'{{"error":{{"message":"{words}","code":503}}}}'.encode(), send)
        else:
            await self._app(scope, receive, send)

    @property
    def _limit(self) -> float:
        # The engine takes things in their order: a call that came after the question does not keep it from answering.
        return self._call_limit if self._asked_in_call and self._num_calls else self._step_limit

    def _silence_of(self, engine: Any) -> float:
        """Seconds for which the question has waited for its answer. Asks the next one when there is one."""
        now = self._now()
        if self._question is None or self._question.done():
            self._question = asyncio.ensure_future(engine.is_paused())
            self._question.add_done_callback(_seen)
            self._asked_in_call = self._num_calls > 0
            self._silent = 0.0
        else:
            self._silent += min(now - self._looked_at, LONGEST_LOOK_SECONDS)
        self._looked_at = now
        return self._silent


def _seen(question: asyncio.Future[Any]) -> None:
    """Of an engine that has died, vLLM's own health route tells: asyncio need not report it a second time."""
    if not question.cancelled():
        question.exception()
