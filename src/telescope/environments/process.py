"""One worker process as the driver sees it: asked for, written to, read from, killed, buried.

Owns the socket, the slot, the log file and the process group. Does not know what the frames mean (`pool`), nor how
processes are made (`launcher`, `fork_server`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from telescope.environments.launcher import Launcher
from telescope.environments.slot import Slot
from telescope.environments.wire import BrokenFrameError, FrameReader, pack_frame
from telescope.log_file import log_size, log_tail, open_log

_LINGER_SECONDS = 0.5
"""How long a process may live on after it has closed its socket."""
STACK_SECONDS = 0.1
"""Given to a process to write its stacks before it is killed."""
_LOG_TAIL_BYTES = 4000


class WorkerProcess:
    """A worker. `on_frame(header, blob)` and, once, `on_gone()` are called from the event loop."""

    def __init__(
        self,
        launcher: Launcher,
        log_path: Path,
        *,
        on_frame: Callable[[dict[str, Any], bytes], None],
        on_gone: Callable[[], None],
    ) -> None:
        self.log_path = log_path
        self.started = time.monotonic()
        self._launcher = launcher
        self._on_frame = on_frame
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._pid: int | None = None
        self._code: int | None = None
        self._killed = False
        self._buried = False
        self.is_lost = False
        """It went with the server that it was forked from."""
        self._hung_up = False
        self._log_start = log_size(log_path)

        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        slot_descriptor = Slot.create()
        self.slot = Slot(slot_descriptor)
        try:
            with theirs, open_log(log_path) as log:
                launcher.fork(self, (theirs.fileno(), slot_descriptor, log.fileno()))
        except BaseException:
            self._socket.close()
            self.slot.close()
            raise
        finally:
            os.close(slot_descriptor)
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def forked(self, pid: int) -> None:
        """The launcher's word: the process is there."""
        self._pid = pid
        if self._killed:
            self.kill()

    def ended(self, code: int) -> None:
        """The launcher's word: the process has ended, and is a zombie until it is buried here."""
        assert self._pid is not None
        self._code = code
        self._signal_group(signal.SIGKILL)  # what it started and left behind
        self._stop_listening()
        self._read_last_words()
        self._launcher.bury(self._pid)
        self._gone()

    def lost(self) -> None:
        """The launcher's word: its server has ended, and the kernel ends this process with it, if it was forked."""
        self.is_lost = True
        self._code = -signal.SIGKILL
        self._signal_group(signal.SIGKILL)  # what it started; no other group has had time to get this number
        self._read_last_words()
        self._stop_listening()
        self._gone()

    def _gone(self) -> None:
        self._buried = True
        self._socket.close()
        self._on_gone()
        self.slot.close()

    @property
    def pid(self) -> int | None:
        """None until it is forked."""
        return self._pid

    def write(self, frame: bytes) -> None:
        """Queue bytes for the worker and send what fits."""
        if not self._hung_up:  # otherwise it is dying, and its calls are taken over when it is gone
            self._unsent += frame

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it."""
        if not self._unsent or self._hung_up:
            return
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):
            self._stop_listening()
            return
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._socket.fileno(), self._writable)

    def send(self, header: dict[str, Any], blob: bytes = b"") -> None:
        """Queue a frame."""
        self.write(pack_frame(header, blob))

    def kill(self) -> None:
        """End the process and all that it started, now."""
        self._killed = True
        self._signal_group(signal.SIGKILL)

    def kill_with_stacks(self) -> None:
        """Let the process write its stacks to the log, then kill it."""
        self.dump_stacks()
        self._loop.call_later(STACK_SECONDS, self.kill)

    def dump_stacks(self) -> None:
        """Write the stacks of all threads to the log."""
        if self._pid is not None and self._code is None:
            with contextlib.suppress(ProcessLookupError):  # the server has just ended, and this with it
                os.kill(self._pid, signal.SIGUSR1)

    def hang_up(self) -> None:
        """Close our end of the stream, which an idle worker takes for the end."""
        if not self._hung_up:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def _signal_group(self, number: signal.Signals) -> None:
        """Until the burial only: so long the process id is not given to another."""
        if self._pid is None or self._buried:
            return
        for send in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):  # it has no group yet, or the server has just ended
                send(self._pid, number)

    def epitaph(self) -> str:
        """How the process ended, and the last lines of its log."""
        ended, tail = self.how_it_ended(), self.log_tail()
        return f"{ended}; its log ({self.log_path}) ends:\n{tail}" if tail else f"{ended}; its log is empty"

    def how_it_ended(self) -> str:
        """The end in a few words that follow a subject."""
        if self._code is None:
            return "is still running"
        if self._code < 0:
            return f"was killed by {signal.Signals(-self._code).name}"
        return f"ended with exit code {self._code}"

    @property
    def ended_from_outside(self) -> bool:
        """A signal ended it that user code does not cause in itself, and that this side did not send."""
        return not self._killed and self._code in (-signal.SIGKILL, -signal.SIGTERM)

    def log_tail(self) -> str:
        """The last lines that this process wrote."""
        return log_tail(self.log_path, _LOG_TAIL_BYTES, start=self._log_start)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(2**20)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._stop_listening()
            self._loop.call_later(_LINGER_SECONDS, self.kill)
            return
        try:
            frames = self._reader.feed(data)
        except (BrokenFrameError, ValueError):
            self._stop_listening()
            self.kill()  # something else wrote to the socket: nothing after this can be trusted
            return
        for header, blob in frames:
            self._on_frame(header, blob)

    def _writable(self) -> None:
        self._loop.remove_writer(self._socket.fileno())
        self.flush()

    def _stop_listening(self) -> None:
        if not self._hung_up:
            self._hung_up = True
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())

    def _read_last_words(self) -> None:
        """Answers that were written before the death count."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError, BrokenFrameError, ValueError):
            while data := self._socket.recv(2**20):
                for header, blob in self._reader.feed(data):
                    self._on_frame(header, blob)
