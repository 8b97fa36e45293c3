"""A hanging engine is distinguished from one that is slow, paused, or updating weights."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.asgi import respond, send_request

from telescope.inference.vllm.engine_health import CALL_LIMIT_VARIABLE, STEP_LIMIT_VARIABLE, EngineHangMiddleware

STEP, CALL = 20.0, 60.0


class Server:
    """An application behind the middleware, whose engine answers while `loops` is set. Its clock is moved by hand."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.loops = asyncio.Event()
        self.loops.set()
        self.call_may_end = asyncio.Event()
        self.num_asked = 0
        self.status = 200
        self._middleware = EngineHangMiddleware(self._app, now=lambda: self.clock)

    async def is_paused(self) -> bool:
        self.num_asked += 1
        await self.loops.wait()
        return False

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/update_weights":
            await self.call_may_end.wait()
        await respond(send, b"done", status=self.status)

    async def request(self, path: str) -> tuple[int, bytes]:
        app = SimpleNamespace(state=SimpleNamespace(engine_client=self))
        response = await send_request(self._middleware, path, app=app)
        return response.status, response.body

    async def is_healthy_for(self, seconds: float, *, every: float = 2.0) -> bool:
        end = self.clock + seconds
        while self.clock < end:
            self.clock = min(self.clock + every, end)
            await asyncio.sleep(0)
            if (await self.request("/health"))[0] != 200:
                return False
            await asyncio.sleep(0)
        return True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv(STEP_LIMIT_VARIABLE, f"{STEP:g}")
    monkeypatch.setenv(CALL_LIMIT_VARIABLE, f"{CALL:g}")
    return Server()


async def test_an_engine_that_answers_stays_healthy_also_after_slow_steps(server: Server) -> None:
    assert await server.is_healthy_for(10 * STEP)
    for _ in range(5):
        server.loops.clear()
        assert await server.is_healthy_for(0.9 * STEP)
        server.loops.set()
        assert await server.is_healthy_for(4)


async def test_a_silent_engine_is_unhealthy_after_the_limit_but_not_before(server: Server) -> None:
    assert await server.is_healthy_for(STEP)
    server.loops.clear()
    assert await server.is_healthy_for(STEP)
    assert not await server.is_healthy_for(3 * 2.0)
    status, body = await server.request("/health")
    assert status == 503
    assert b"is running but has not responded for" in body
    assert b"inference_hang_timeout_seconds" in body


async def test_a_weight_update_may_take_longer_than_a_step(server: Server) -> None:
    server.loops.clear()
    update = asyncio.create_task(server.request("/update_weights"))
    await asyncio.sleep(0)
    assert await server.is_healthy_for(0.95 * CALL)
    server.call_may_end.set()
    await update
    assert await server.is_healthy_for(0.9 * STEP), "what comes after it has its own time"
    assert not await server.is_healthy_for(STEP)


async def test_a_weight_update_does_not_hide_a_hang_indefinitely(server: Server) -> None:
    server.loops.clear()
    update = asyncio.create_task(server.request("/update_weights"))
    await asyncio.sleep(0)
    assert not await server.is_healthy_for(2 * CALL)
    assert b"weight_sync_timeout_seconds" in (await server.request("/health"))[1]
    update.cancel()


async def test_an_update_after_the_hang_does_not_extend_the_limit(server: Server) -> None:
    """The engine takes things in their order: what comes later is not what it is busy with."""
    server.loops.clear()
    assert await server.is_healthy_for(4)
    update = asyncio.create_task(server.request("/update_weights"))
    await asyncio.sleep(0)
    assert not await server.is_healthy_for(STEP + 4)
    update.cancel()


async def test_calls_that_never_reach_the_engine_do_not_hide_a_hang(server: Server) -> None:
    server.loops.clear()
    server.call_may_end.set()
    assert await server.is_healthy_for(4)
    for _ in range(3):
        await server.request("/collective_rpc")
        assert await server.is_healthy_for(4)
    assert not await server.is_healthy_for(STEP)


async def test_time_in_which_the_server_itself_was_stopped_does_not_count(server: Server) -> None:
    server.loops.clear()
    assert await server.is_healthy_for(4)
    assert await server.is_healthy_for(100 * STEP, every=100 * STEP)


async def test_a_failed_query_is_repeated_and_vllm_answers(server: Server) -> None:
    async def fail() -> bool:
        server.num_asked += 1
        raise RuntimeError("the engine has exited")

    server.is_paused = fail  # type: ignore[method-assign]
    assert await server.is_healthy_for(2 * STEP)
    assert server.num_asked > 2
    server.status = 503
    assert await server.request("/health") == (503, b"done")
