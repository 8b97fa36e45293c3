"""Middlewares that detect an engine process that has exited or hangs.

vLLM's HTTP process notices within milliseconds that its engine process is gone, fails the requests that sample, and
shuts down. But calls into the engine (pause, weight updates, collective RPC) wait for a response that never comes, and
requests held back by a pause wait for its end. The shutdown waits for both: without `EngineExitMiddleware` the process
would never exit (vLLM 0.26 and 0.32). It does nothing while the engine runs, begins no response twice, and leaves vLLM
`GRACE_SECONDS` to respond by itself, since its message is more precise.

vLLM's health route only checks that the engine process exists. A process that hangs (a kernel that never returns, a
deadlock, SIGSTOP) still counts as healthy, and its requests would wait for their own deadlines. So
`EngineHangMiddleware` sends a heartbeat through the engine's own loop with each health check, and responds with 503
after too long a silence. At most one heartbeat is pending. Time in which this HTTP process did not run (a paused
machine or container) does not count. A call into the workers, such as a weight update, keeps the loop busy and has its
own limit.
"""

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from telescope.inference.auth import error_response
from telescope.inference.base import HEALTH_ROUTE
from telescope.inference.vllm import adapter as wire

POLL_SECONDS = 0.25
GRACE_SECONDS = 1.0


class EngineExitMiddleware:
    """ASGI middleware inside the secret check and outside everything that waits. One per server process."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._in_flight: set[asyncio.Future[None]] = set()
        self._ended: set[asyncio.Future[None]] = set()
        self._watch: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
        if scope["type"] != "http" or engine is None:
            await self._app(scope, receive, send)
            return
        _ = engine.errored  # an unexpected vLLM fails the request here instead of the watch task
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        # A separate task, because only the server may cancel its own.
        request = asyncio.ensure_future(self._app(scope, receive, send_on))
        self._in_flight.add(request)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._end_after_exit(engine))
        try:
            await request
        except asyncio.CancelledError:
            outer = asyncio.current_task()
            if request not in self._ended or (outer is not None and outer.cancelling()):
                raise
            if not has_begun:
                gone = error_response(503, "the engine process of this inference server has exited")
                await gone(scope, receive, send)
        finally:
            self._in_flight.discard(request)
            self._ended.discard(request)

    async def _end_after_exit(self, engine: Any) -> None:
        """Ends running requests when the engine has exited."""
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
"""Environment variables of the server: seconds that a step, and a call into the workers, may block the engine's loop.
The values come from the two fields above."""

CALLS = frozenset({
    wire.INIT_TRANSFER_ROUTE, wire.START_UPDATE_ROUTE, wire.UPDATE_WEIGHTS_ROUTE, wire.FINISH_UPDATE_ROUTE,
    wire.COLLECTIVE_RPC_ROUTE,
})  # fmt: skip

LONGEST_POLL_SECONDS = 10.0
"""Most silence counted between two health checks, which come every few seconds."""


class EngineHangMiddleware:
    """ASGI middleware that responds to health checks with 503 during a hang."""

    def __init__(self, app: ASGIApp, now: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._now = now
        self._step_limit = float(os.environ[STEP_LIMIT_VARIABLE])
        self._call_limit = max(self._step_limit, float(os.environ[CALL_LIMIT_VARIABLE]))
        self._heartbeat: asyncio.Future[Any] | None = None
        self._sent_in_call = False
        self._silent = 0.0
        self._polled_at = 0.0
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
                if self._sent_in_call:
                    self._silent = 0.0  # the next step gets its full time
        elif scope["path"] == HEALTH_ROUTE and (silent := self._poll(engine)) > self._limit:
            field = STEP_FIELD if self._limit == self._step_limit else CALL_FIELD
            words = f"the engine process is running but has not responded for {silent:.0f} s ({field})"
            await error_response(503, words)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    @property
    def _limit(self) -> float:
        # The engine works in order: a call after the heartbeat does not delay its reply.
        return self._call_limit if self._sent_in_call and self._num_calls else self._step_limit

    def _poll(self, engine: Any) -> float:
        """Returns how many seconds the heartbeat has been unanswered. Sends the next one after a reply."""
        now = self._now()
        if self._heartbeat is None or self._heartbeat.done():
            self._heartbeat = asyncio.ensure_future(engine.is_paused())
            # Marks an exception as seen; vLLM's own health route reports it.
            self._heartbeat.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
            self._sent_in_call = self._num_calls > 0
            self._silent = 0.0
        else:
            self._silent += min(now - self._polled_at, LONGEST_POLL_SECONDS)
        self._polled_at = now
        return self._silent
