"""The driver's handle on the fork server: starts it, asks it for workers, passes on what it reports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from telescope.environments.fork_server import PACKET_BYTES
from telescope.environments.records import RendererSpec
from telescope.errors import DeadlineExceeded, InfrastructureError, UserError

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from telescope.environments.fork_server import main; "
    "main(sys.argv[3:])"
)
"""The workers see the modules that the driver sees, however the driver came to see them."""

_DEFAULT_VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
"""Workers are many, so each takes one core; and what user code prints is in the log at once."""
_VARIABLES = {"TOKENIZERS_PARALLELISM": "false"}
"""Threads of the tokenizer would not survive the fork."""

_CLOSE_SECONDS = 5.0
_LOG_TAIL_BYTES = 4000


class Forked(Protocol):
    """What the launcher tells about one worker."""

    def forked(self, pid: int) -> None: ...

    def ended(self, code: int) -> None: ...

    def lost(self) -> None: ...


class Launcher:
    """A running fork server. `on_lost(error)` is called when it ends although nobody closed it.

    The kernel ends the server with the *thread* that started it, so `start` belongs in a thread that lives as long as
    the pool: the main one.
    """

    def __init__(self, renderer: RendererSpec | None, log_dir: Path) -> None:
        self._renderer = renderer
        self.log_path = log_dir / "environment-server.log"
        self.on_lost: Callable[[Exception], None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._tickets: dict[int, Forked] = {}
        self._last_ticket = 0
        self._children: dict[int, Forked] = {}

    async def start(self, timeout_seconds: float) -> None:
        """Start the process and load the tokenizer.

        Raises `UserError` when the tokenizer cannot be loaded, `DeadlineExceeded`, `InfrastructureError`.
        """
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with theirs:
            self._process = self._spawn(theirs.fileno())
        self._loop.add_reader(self._socket.fileno(), self._readable)
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), timeout_seconds)
        except TimeoutError:
            raise DeadlineExceeded(
                f"Loading the tokenizer for the environments took longer than {timeout_seconds:g} seconds; the log "
                f"({self.log_path}) ends:\n{self.log_tail()}"
            ) from None

    def _spawn(self, descriptor: int) -> subprocess.Popen[bytes]:
        renderer = asdict(self._renderer) if self._renderer is not None else None
        arguments = [json.dumps(sys.path), "telescope-environment-server", str(descriptor), str(os.getpid())]
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", _BOOT, *arguments, json.dumps(renderer)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(descriptor,),
                start_new_session=True,
                env=_DEFAULT_VARIABLES | os.environ | _VARIABLES,
            )

    def fork(self, worker: Forked, descriptors: tuple[int, int, int]) -> None:
        """Ask for a worker that owns the descriptors (socket, slot, log); they may be closed here afterwards."""
        self._last_ticket += 1
        self._tickets[self._last_ticket] = worker
        self._send({"fork": self._last_ticket}, descriptors)

    def bury(self, pid: int) -> None:
        """The worker has ended and will not be signalled again."""
        self._children.pop(pid, None)
        self._send({"bury": pid})

    async def close(self) -> None:
        """End the server. Workers that still live end with it."""
        self._closing = True
        if self._process is None:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        try:
            await asyncio.wait_for(asyncio.to_thread(self._process.wait, _CLOSE_SECONDS), _CLOSE_SECONDS + 1)
        except (TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process = None

    def log_tail(self) -> str:
        """The last lines of the server's log."""
        return self.log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()

    def _send(self, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], list(descriptors))
        except OSError as error:  # a full buffer of these rare small packets means that nobody reads them
            self._lost(f"does not take messages: {error}")

    def _readable(self) -> None:
        try:
            packet = self._socket.recv(PACKET_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            packet = b""
        if not packet:
            self._lost("ended")
            return
        message = json.loads(packet)
        if "forked" in message:
            worker = self._tickets.pop(message["forked"])
            self._children[message["pid"]] = worker
            worker.forked(message["pid"])
        elif "ended" in message:
            self._children[message["ended"]].ended(message["code"])
        elif "ready" in message:
            self._ready.set_result(None)
        elif message["user_error"]:
            self._fail(UserError(message["failed"]))
        else:
            self._fail(InfrastructureError(f"The tokenizer cannot be loaded: {message['failed']}\n{self.log_tail()}"))

    def _lost(self, what: str) -> None:
        if self._closing:
            return
        self._loop.remove_reader(self._socket.fileno())
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._fail(
            InfrastructureError(
                f"The process that environment workers are forked from {what}; its log ({self.log_path}) ends:\n"
                f"{self.log_tail()}"
            )
        )
        for worker in (*self._children.values(), *self._tickets.values()):
            worker.lost()
        self._children.clear()
        self._tickets.clear()

    def _fail(self, error: Exception) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
        elif self.on_lost is not None and not self._closing:
            self.on_lost(error)
