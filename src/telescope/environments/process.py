"""One worker process as the driver sees it: started, written to, read from, killed, buried.

Owns the socket, the slot, the log file and the process group. Does not know what the frames mean (`pool`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from telescope.environments.slot import Slot
from telescope.environments.wire import BrokenFrameError, FrameReader, pack_frame

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from telescope.environments.worker import main; "
    "main(sys.argv[3:])"
)
"""The worker sees the modules that the driver sees, however the driver came to see them."""

_DEFAULT_VARIABLES = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
"""Workers are many, so each takes one core; and what user code prints is in the log at once."""

_REAP_SECONDS = 0.02
_LINGER_SECONDS = 0.5
"""How long a process may live on after it has closed its socket."""
STACK_SECONDS = 0.1
"""Given to a process to write its stacks before it is killed."""
_LOG_TAIL_BYTES = 4000


class WorkerProcess:
    """A running worker. `on_frame(header, blob)` and, once, `on_gone()` are called from the event loop."""

    def __init__(
        self,
        log_path: Path,
        *,
        on_frame: Callable[[dict[str, Any], bytes], None],
        on_gone: Callable[[], None],
    ) -> None:
        self.log_path = log_path
        self.started = time.monotonic()
        self._on_frame = on_frame
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._reaping_since: float | None = None
        self._gone = False
        self._log_start = log_path.stat().st_size if log_path.exists() else 0

        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        slot_descriptor = Slot.create()
        self.slot = Slot(slot_descriptor)
        try:
            with log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        _BOOT,
                        json.dumps(sys.path),
                        "telescope-environment-worker",
                        str(theirs.fileno()),
                        str(slot_descriptor),
                        str(os.getpid()),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(), slot_descriptor),
                    start_new_session=True,  # a group of its own: Ctrl-C is the driver's, and kills reach grandchildren
                    env={"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
                    | os.environ,
                )
        finally:
            theirs.close()
            os.close(slot_descriptor)
        self._loop.add_reader(self._socket.fileno(), self._readable)

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, frame: bytes) -> None:
        """Queue bytes for the worker and send what fits."""
        if self._reaping_since is not None:
            return  # it is dying; its calls are taken over when it is gone
        self._unsent += frame

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it."""
        if not self._unsent or self._reaping_since is not None:
            return
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):
            self._reap()
            return
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._socket.fileno(), self._writable)

    def send(self, header: dict[str, Any], blob: bytes = b"") -> None:
        self.write(pack_frame(header, blob))

    def kill(self) -> None:
        """End the process and all that it started, now."""
        if not self._gone:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(self.pid, signal.SIGKILL)
            self._reap()

    def kill_with_stacks(self) -> None:
        """Let the process write its stacks to the log, then kill it."""
        if not self._gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)
            self._loop.call_later(STACK_SECONDS, self.kill)

    def dump_stacks(self) -> None:
        """Write the stacks of all threads to the log."""
        if self.alive:
            os.kill(self.pid, signal.SIGUSR1)

    def hang_up(self) -> None:
        """Close our end of the stream, which an idle worker takes for the end."""
        if self._reaping_since is None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    @property
    def alive(self) -> bool:
        """Whether the process has not ended; it may be a zombie that is buried in a moment."""
        return not self._gone and not self._has_exited()

    def check(self) -> None:
        """Notice a death that the socket does not show, because a grandchild holds the other end."""
        if self._reaping_since is None and self._has_exited():
            self._reap()

    def epitaph(self) -> str:
        """How the process ended, and the last lines of its log."""
        code = self._process.returncode
        if code is None:
            ended = "is still running"
        elif code < 0:
            ended = f"was killed by {signal.Signals(-code).name}"
        else:
            ended = f"ended with exit code {code}"
        tail = self.log_tail()
        return f"{ended}; its log ({self.log_path}) ends:\n{tail}" if tail else f"{ended}; its log is empty"

    def log_tail(self) -> str:
        """The last lines that this process wrote."""
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - _LOG_TAIL_BYTES))
            return log.read().decode("utf-8", "replace").strip()

    def _has_exited(self) -> bool:
        """Without burying it: while the zombie is there, its process group cannot become someone else's."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _readable(self) -> None:
        try:
            data = self._socket.recv(2**20)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._reap()
            return
        try:
            frames = self._reader.feed(data)
        except (BrokenFrameError, ValueError):
            self.kill()  # something else wrote to the socket: nothing after this can be trusted
            return
        for header, blob in frames:
            self._on_frame(header, blob)

    def _writable(self) -> None:
        self._loop.remove_writer(self._socket.fileno())
        self.flush()

    def _reap(self) -> None:
        """Wait for the process to end, without blocking, then say that it is gone."""
        if self._gone:
            return
        now = time.monotonic()
        if self._reaping_since is None:
            self._reaping_since = now
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        if not self._has_exited():
            if now - self._reaping_since > _LINGER_SECONDS:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            self._loop.call_later(_REAP_SECONDS, self._reap)
            return
        self._bury()

    def _bury(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no grandchildren, or only zombies
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._gone = True
        self._read_last_words()
        self._socket.close()
        self._on_gone()
        self.slot.close()

    def _read_last_words(self) -> None:
        """Answers that were written before the death count."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError, BrokenFrameError, ValueError):
            while data := self._socket.recv(2**20):
                for header, blob in self._reader.feed(data):
                    self._on_frame(header, blob)
