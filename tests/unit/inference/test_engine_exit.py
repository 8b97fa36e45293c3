"""Requests that wait for an engine that has exited are answered; nothing else is touched."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from telescope.inference.vllm import engine_health
from telescope.inference.vllm.engine_health import EngineExitMiddleware


class Server:
    """An application whose requests wait for a signal, behind the middleware."""

    def __init__(self, *, begins: bool = False) -> None:
        self.engine = SimpleNamespace(errored=False)
        self.may_answer = asyncio.Event()
        self.num_cancelled = 0
        self._begins = begins
        self._middleware = EngineExitMiddleware(self._app)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            if self._begins:
                await send({"type": "http.response.start", "status": 200, "headers": []})
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if not self._begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def request(self, method: str = "POST") -> list[Any]:
        """What a request is sent."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        app = SimpleNamespace(state=SimpleNamespace(engine_client=self.engine))
        scope = {"type": "http", "method": method, "path": "/update_weights", "app": app}
        await self._middleware(scope, None, send)  # type: ignore[arg-type]
        return sent


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_health, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(engine_health, "GRACE_SECONDS", 0.05)


async def ended(requests: list[asyncio.Task[Any]]) -> None:
    _, waiting = await asyncio.wait(requests, timeout=30)
    assert not waiting


@pytest.fixture
def server() -> Server:
    return Server()


async def test_requests_for_an_exited_engine_are_answered_whenever_they_come(server):
    requests = [asyncio.create_task(server.request(method)) for method in ("POST", "POST", "GET")]
    await asyncio.sleep(0.05)
    assert not any(request.done() for request in requests)
    server.engine.errored = True
    await ended(requests)
    for _ in range(2):
        requests.append(asyncio.create_task(server.request()))
        await ended(requests[-1:])
    for start, body in (request.result() for request in requests):
        assert start["status"] == 503
        assert b"has exited" in body["body"]
        assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert server.num_cancelled == 5


async def test_the_servers_own_error_reaches_the_caller(monkeypatch):
    monkeypatch.setattr(engine_health, "GRACE_SECONDS", 30.0)
    server = Server()
    server.engine.errored = True
    request = asyncio.create_task(server.request())
    await asyncio.sleep(0.1)
    server.may_answer.set()
    await ended([request])
    assert [message.get("body") for message in request.result()] == [None, b"done"]


async def test_an_answer_that_has_begun_is_not_begun_again():
    server = Server(begins=True)
    server.engine.errored = True
    request = asyncio.create_task(server.request())
    await ended([request])
    assert [message["type"] for message in request.result()] == ["http.response.start"]


async def test_a_request_that_the_caller_gives_up_is_cancelled_and_not_answered(server):
    request = asyncio.create_task(server.request())
    await asyncio.sleep(0.02)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert server.num_cancelled == 1


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_requests_of_a_running_engine_are_left_alone(server, method):
    request = asyncio.create_task(server.request(method))
    await asyncio.sleep(0.2)
    assert not request.done()
    server.may_answer.set()
    assert (await request)[0]["status"] == 200


async def test_a_request_during_the_grace_period_has_its_own(monkeypatch):
    monkeypatch.setattr(engine_health, "GRACE_SECONDS", 0.5)
    server = Server()
    server.engine.errored = True
    first = asyncio.create_task(server.request())
    await asyncio.sleep(0.4)
    second = asyncio.create_task(server.request())
    await ended([first])
    assert first.result()[0]["status"] == 503
    assert not second.done()
    await ended([second])
    assert second.result()[0]["status"] == 503


async def test_a_server_may_cancel_a_request_that_is_being_ended(server):
    server.engine.errored = True
    request = asyncio.create_task(server.request())
    await asyncio.sleep(0)
    monitored = next(iter(server._middleware._in_flight))
    server._middleware._ended.add(monitored)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


async def test_an_engine_without_an_errored_attribute_fails_the_request(server):
    del server.engine.errored
    with pytest.raises(AttributeError, match="errored"):
        await server.request()
