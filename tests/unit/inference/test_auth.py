"""The secret protects every route."""

from typing import Any

import pytest

from telescope.inference.auth import SECRET_VARIABLE, RunSecretMiddleware

SECRET = "a-run-secret"


class Recorder:
    """An application that notes that it was reached."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope["type"])


async def call(scope: dict[str, Any]) -> tuple[Recorder, list[Any]]:
    app = Recorder()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the body of an unauthenticated request is not read")

    await RunSecretMiddleware(app, SECRET)(scope, receive, send)
    return app, sent


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
    app, sent = await call({"type": "http", "method": "GET", "path": path, "headers": headers})
    assert app.reached == []
    assert sent[0]["status"] == 401


@pytest.mark.parametrize("headers", REFUSED)
async def test_websockets_are_closed_without_the_secret(headers: list[Any]) -> None:
    app, sent = await call({"type": "websocket", "path": "/v1/realtime", "headers": headers})
    assert app.reached == []
    assert sent[0]["type"] == "websocket.close"


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_the_secret_opens_every_kind_of_connection(kind: str) -> None:
    headers = [(b"host", b"x"), (b"authorization", b"Bearer a-run-secret")]
    app, sent = await call({"type": kind, "method": "GET", "path": "/x", "headers": headers})
    assert app.reached == [kind]
    assert sent == []


async def test_the_servers_own_start_needs_no_secret() -> None:
    app, _ = await call({"type": "lifespan"})
    assert app.reached == ["lifespan"]


def test_an_engine_without_a_secret_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=SECRET_VARIABLE):
        RunSecretMiddleware(Recorder())
