"""Fake vLLM server without a model, for tests and benchmarks.

`FakeEngineServer` runs inside a test's own event loop; with `python -m` this module runs as a process, for tests that
kill it. The middlewares are those of vLLM's server, so secrets, salts and pauses take the real path. `app` answers
the routes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.fakes.app import FakeEngineApp, WorkerFunction
from tests.fakes.engine import AnswerFunction, FakeEngine, FakeEngineSettings

from telescope.inference.auth import SECRET_VARIABLE, RunSecretMiddleware
from telescope.inference.client import raise_file_limit
from telescope.inference.vllm.binary_responses import BinaryResponseMiddleware
from telescope.inference.vllm.policy_version import PolicyVersionMiddleware
from telescope.inference.vllm.support import parse_version, reports_version_spans
from telescope.utils.child_guard import SUPERVISOR_PID_VARIABLE, die_with


class FakeEngineServer:
    """A fake engine in this process and event loop. `async with FakeEngineServer(...) as server: server.url`."""

    def __init__(
        self,
        settings: FakeEngineSettings | None = None,
        *,
        secret: str = "fake-secret",
        host: str = "127.0.0.1",
        port: int = 0,
        answer: AnswerFunction | None = None,
        worker: WorkerFunction | None = None,
    ) -> None:
        self.settings = settings or FakeEngineSettings()
        self.secret = secret
        self.host = host
        self.port = port
        self.app = FakeEngineApp(self.settings, answer, worker)
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def engine(self) -> FakeEngine:
        return self.app.engine

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def __aenter__(self) -> FakeEngineServer:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts to listen; `port` is the actual port afterwards. Also restarts after `die`."""
        raise_file_limit()
        note_spans = not reports_version_spans(parse_version(self.settings.vllm_version))
        versioned = PolicyVersionMiddleware(self.app, note_spans=note_spans)
        config = uvicorn.Config(
            _with_app(self.app, RunSecretMiddleware(BinaryResponseMiddleware(versioned), self.secret)), host=self.host,
            port=self.port, lifespan="off", access_log=False, log_config=None, log_level="warning", backlog=8192,
            timeout_keep_alive=600, timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = _QuietServer(config)
        self._task = asyncio.create_task(self._server.serve(), name="fake-engine-server")
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.005)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            await self._task
        self._server = self._task = None

    def die(self) -> None:
        """Drops every connection and stops listening, as a killed process would. Forgets requests and weights."""
        if self._server is None:
            return
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._server.should_exit = self._server.force_exit = True
        self.app.engine = FakeEngine(self.settings, self.app.engine._answer)


class _QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers, which belong to the process."""

    async def serve(self, sockets: Any = None) -> None:
        await self._serve(sockets)


def _with_app(app: FakeEngineApp, outermost: ASGIApp) -> ASGIApp:
    """Puts the application into the scope, as Starlette does."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        await outermost({**scope, "app": app}, receive, send)

    return wrapped


def main(argv: list[str] | None = None) -> int:
    """Runs the fake engine as a process. The secret comes from the environment, as vLLM's does."""
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.server", description=main.__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--settings", default="{}", help="JSON of FakeEngineSettings")
    arguments = parser.parse_args(argv)
    settings = msgspec.json.decode(arguments.settings, type=FakeEngineSettings)
    if settings.fail_start is not None:
        print(settings.fail_start, file=sys.stderr)
        return 1
    time.sleep(settings.start_seconds)
    supervisor = os.environ.get(SUPERVISOR_PID_VARIABLE)
    if supervisor:
        die_with(int(supervisor))
    asyncio.run(_serve_for_ever(settings, arguments.host, arguments.port))
    return 0


async def _serve_for_ever(settings: FakeEngineSettings, host: str, port: int) -> None:
    server = FakeEngineServer(settings, secret=os.environ[SECRET_VARIABLE], host=host, port=port)
    if settings.spawn_child:
        await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(3600)")
    await server.start()
    print(f"fake engine listening on {server.url}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(main())
