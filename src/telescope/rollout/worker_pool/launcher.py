"""Driver-side handle of the fork server: starts it, requests workers, passes on its reports.

A server that ends unexpectedly is restarted, up to `MAX_RESTARTS` times within `RESTART_WINDOW_SECONDS`. The kernel
ends its workers with it; their handles are notified (`lost`) and may request new ones, which the new server forks once
it has loaded the tokenizer. After the last restart `fork` raises the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telescope.errors import DeadlineExceeded, InfrastructureError, UserError
from telescope.rollout.rendering import RendererSpec
from telescope.rollout.worker_pool.fork_server import PACKET_BYTES
from telescope.utils.process import describe_exit, log_tail, open_log, sigterm_blocked

if TYPE_CHECKING:
    from telescope.rollout.worker_pool.worker_handle import WorkerProcess

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from telescope.rollout.worker_pool.fork_server import main; main(sys.argv[3:])"
)
"""The fork server and its workers get the driver's `sys.path`."""

_DEFAULT_VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
"""Many workers share the machine, so each uses one core. Output of user code reaches the log at once."""
_VARIABLES = {"TOKENIZERS_PARALLELISM": "false"}
"""The tokenizer's threads do not survive a fork."""

MAX_RESTARTS = 5
RESTART_WINDOW_SECONDS = 1800.0
"""The same bound as for an inference server. A process that only forks has no reason to end this often."""

_CLOSE_SECONDS = 5.0
_LINGER_SECONDS = 0.5
"""How long a server may live on after it has closed its socket."""
_BUFFER_BYTES = 2**20
"""Asked for as the socket's buffer (the kernel may give less): a server that is loading has yet to read the requests
for all workers."""
_LOG_TAIL_BYTES = 4000

logger = logging.getLogger(__name__)


class Launcher:
    """Keeps a fork server running.

    The kernel ends the server with the *thread* that started it, so call `start` in the main thread.
    """

    def __init__(self, renderer: RendererSpec | None, log_dir: Path) -> None:
        self._renderer = renderer
        self.log_path = log_dir / "environment-server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._broken: Exception | None = None
        """Why the server cannot be restarted; None while it can."""
        self._replacing: asyncio.Task[None] | None = None
        self._restart_times: list[float] = []
        self._pending: dict[int, WorkerProcess] = {}
        """Requested workers that are not forked yet."""
        self._last_request = 0
        self._children: dict[int, WorkerProcess] = {}

    async def start(self, timeout_seconds: float) -> None:
        """Starts the process and loads the tokenizer.

        Raises `UserError` when the tokenizer cannot be loaded, `DeadlineExceeded`, `InfrastructureError`.
        """
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._spawn()
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), timeout_seconds)
        except TimeoutError:
            raise DeadlineExceeded(
                f"Loading the tokenizer for the environments took longer than {timeout_seconds:g} seconds; the log "
                f"({self.log_path}) ends:\n{self.log_tail()}"
            ) from None

    def _spawn(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        renderer = asdict(self._renderer) if self._renderer is not None else None
        arguments = [json.dumps(sys.path), "telescope-environment-server", str(theirs.fileno()), str(os.getpid())]
        with theirs, open_log(self.log_path) as log, sigterm_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *arguments, json.dumps(renderer)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=_DEFAULT_VARIABLES | os.environ | _VARIABLES,
            )
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def fork(self, worker: WorkerProcess, descriptors: tuple[int, int, int]) -> None:
        """Requests a worker that receives the descriptors (socket, slot, log). The caller may close them afterwards.

        Raises `InfrastructureError` or `UserError` when the server cannot be restarted.
        """
        if self._broken is not None:
            raise self._broken
        self._last_request += 1
        self._pending[self._last_request] = worker
        self._send({"fork": self._last_request}, descriptors)

    def reap(self, pid: int) -> None:
        """Releases the process id of a worker that has ended."""
        self._children.pop(pid, None)
        self._send({"reap": pid})

    async def close(self) -> None:
        """Ends the server. Workers that still run end with it."""
        self._closing = True
        if self._replacing is not None:
            self._replacing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._replacing
        if self._process is None:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        await self._end(self._process, _CLOSE_SECONDS)
        self._process = None

    @staticmethod
    async def _end(process: subprocess.Popen[bytes], timeout: float) -> int:
        """Waits for a server to end, and kills it after `timeout` seconds. Returns its exit code."""
        try:
            return await asyncio.to_thread(process.wait, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            return await asyncio.to_thread(process.wait)

    def log_tail(self) -> str:
        """Returns the last lines of the server's log."""
        return log_tail(self.log_path, _LOG_TAIL_BYTES)

    def _send(self, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        if self._replacing is not None or self._broken is not None:
            return  # the worker is notified by `lost`
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], list(descriptors))
        except OSError as error:  # a full buffer of these rare small packets means that the server hangs
            self._lost(f"does not accept messages ({error})")

    def _readable(self) -> None:
        try:
            packet = self._socket.recv(PACKET_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            packet = b""
        if not packet:
            self._loop.remove_reader(self._socket.fileno())
            self._lost(None)
            return
        message = json.loads(packet)
        if "forked" in message:
            worker = self._pending.pop(message["forked"])
            self._children[message["pid"]] = worker
            worker.forked(message["pid"])
        elif "ended" in message:
            self._children[message["ended"]].ended(message["code"])
        elif "ready" in message:
            if not self._ready.done():  # only the workers wait for a replacement
                self._ready.set_result(None)
        elif message["user_error"]:
            self._fail(UserError(message["failed"]))
        else:
            self._fail(InfrastructureError(f"The tokenizer cannot be loaded: {message['failed']}\n{self.log_tail()}"))

    def _lost(self, fault: str | None) -> None:
        """Replaces a server that has closed its socket, or has the fault."""
        if self._closing or self._replacing is not None or self._broken is not None:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._replacing = self._loop.create_task(self._replace(fault))

    async def _replace(self, fault: str | None) -> None:
        """Reaps the server, starts a new one, and notifies the lost workers."""
        process = self._process
        assert process is not None
        if fault is not None:
            process.kill()
        code = await self._end(process, _LINGER_SECONDS)
        self._socket.close()
        self._process = None
        what = f"The process that environment workers are forked from {fault or describe_exit(code)}"
        error: Exception | None = None
        try:
            now = time.monotonic()
            self._restart_times = [at for at in self._restart_times if now - at < RESTART_WINDOW_SECONDS]
            if self._ready.done() and len(self._restart_times) < MAX_RESTARTS:
                self._restart_times.append(now)
                logger.warning("%s; restarting it and its workers", what)
                self._spawn()
            else:
                often = f" after {len(self._restart_times)} restarts" if self._restart_times else " while it started"
                error = InfrastructureError(f"{what}{often}; its log ({self.log_path}) ends:\n{self.log_tail()}")
        except OSError as problem:
            error = InfrastructureError(f"{what}, and cannot be restarted: {problem}")
        self._replacing = None
        if error is None:
            self._notify_lost()
        else:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._broken = error
        if not self._ready.done():
            self._ready.set_exception(error)
        self._notify_lost()

    def _notify_lost(self) -> None:
        lost = (*self._children.values(), *self._pending.values())
        self._children.clear()
        self._pending.clear()
        for worker in lost:
            worker.lost()
