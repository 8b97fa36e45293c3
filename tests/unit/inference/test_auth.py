"""The secret protects every route."""

from typing import Any

import pytest
from tests.fakes.asgi import send_request

from telescope.inference.auth import SECRET_VARIABLE, RunSecretMiddleware

SECRET = "a-run-secret"


class Recorder:
    def __init__(self) -> None:
        self.reached: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope["type"])


async def call(kind: str, headers: list[Any], path: str = "/x") -> tuple[Recorder, list[Any]]:
    app = Recorder()
    return app, (await send_request(RunSecretMiddleware(app, SECRET), path, type=kind, headers=headers)).messages


REFUSED = [
    [],
    [(b"authorization", b"Bearer wrong")],
    [(b"authorization", b"a-run-secret")],
    [(b"authorization", b"bearer a-run-secret")],
    [(b"authorization", b"Bearer a-run-secret ")],
    [(b"x-api-key", b"a-run-secret")],
    [(b"authorization", b"Bearer a-run-secret"), (b"authorization", b"Bearer wrong")],
    [(b"authorization", "Bearer ä-run-secret".encode())],
]


@pytest.mark.parametrize("headers", REFUSED)
@pytest.mark.parametrize("path", ["/health", "/docs", "/metrics", "/inference/v1/generate", "/collective_rpc", "/"])
async def test_no_route_answers_without_the_secret(headers: list[Any], path: str) -> None:
    app, sent = await call("http", headers, path)
    assert app.reached == []
    assert sent[0]["status"] == 401


@pytest.mark.parametrize("headers", REFUSED)
async def test_websockets_are_closed_without_the_secret(headers: list[Any]) -> None:
    app, sent = await call("websocket", headers, "/v1/realtime")
    assert app.reached == []
    assert sent[0]["type"] == "websocket.close"


@pytest.mark.parametrize("kind", ["http", "websocket", "lifespan"])
async def test_the_secret_opens_every_kind_of_connection_and_the_start_needs_none(kind: str) -> None:
    headers = [(b"host", b"x"), (b"authorization", b"Bearer a-run-secret")] if kind != "lifespan" else []
    app, sent = await call(kind, headers)
    assert (app.reached, sent) == ([kind], [])


def test_an_engine_without_a_secret_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=SECRET_VARIABLE):
        RunSecretMiddleware(Recorder())
