"""Driver-side handle of one worker process, with its calls' deadlines.

`WorkerProcess` owns the socket, the slot, the log file and the process group: start, send, receive, terminate, reap. It
does not know what the frames mean. `PoolWorker` checks deadlines when the pool calls `watch`, and kills its process
when one has passed. It does not choose what runs where and does not replace the process (`workers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from telescope.errors import EnvironmentFailure
from telescope.rollout.worker_pool.launcher import Launcher
from telescope.rollout.worker_pool.messages import Slot
from telescope.rollout.worker_pool.scheduling import Call, ExitCause, WorkerState
from telescope.utils.frames import FrameReader, pack_frame
from telescope.utils.process import describe_exit, log_size, log_tail, open_log, rotate_log

_LINGER_SECONDS = 0.5
"""Time for a process to exit after it has closed its socket."""
STACK_SECONDS = 0.5
"""Time for a process to write its stacks before it is killed."""
_LOG_TAIL_BYTES = 4000
MAX_LOG_BYTES = 8 * 2**20
"""Size above which a log is rotated: user code may print without end. At most twice as much is kept."""
LOG_CHECK_SECONDS = 0.2
"""Interval at which the size of the log is checked; printing in a loop writes 10 MB meanwhile."""


class WorkerProcess:
    """A worker process. Calls `on_frame(header, blob)` and, once, `on_ended()` from the event loop."""

    def __init__(
        self,
        launcher: Launcher,
        log_path: Path,
        *,
        on_frame: Callable[[dict[str, Any], bytes], None],
        on_ended: Callable[[], None],
    ) -> None:
        self.log_path = log_path
        self.started = time.monotonic()
        self._launcher = launcher
        self._on_frame = on_frame
        self._on_ended = on_ended
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._pid: int | None = None
        self._code: int | None = None
        self._killed = False
        self._reaped = False
        self.is_lost = False
        """It ended together with the fork server."""
        self._stream_closed = False
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
        self._log_timer = self._loop.call_later(LOG_CHECK_SECONDS, self._check_log)

    def forked(self, pid: int) -> None:
        """Called by the launcher when the process exists."""
        self._pid = pid
        if self._killed:
            self.kill()

    def ended(self, code: int) -> None:
        """Called by the launcher when the process has ended. It stays a zombie until it is reaped here."""
        assert self._pid is not None
        self._code = code
        self._signal_group(signal.SIGKILL)  # child processes that it left behind
        self._stop_listening()
        self._read_remaining_frames()
        self._launcher.reap(self._pid)
        self._finish()

    def lost(self) -> None:
        """Called by the launcher when the fork server ended with this process."""
        self.is_lost = True
        self._code = -signal.SIGKILL
        self._signal_group(signal.SIGKILL)  # its child processes; the group id cannot be reused this soon
        self._read_remaining_frames()
        self._stop_listening()
        self._finish()

    def _finish(self) -> None:
        self._reaped = True
        self._log_timer.cancel()
        self._socket.close()
        self._on_ended()
        self.slot.close()

    @property
    def pid(self) -> int | None:
        """None until it is forked."""
        return self._pid

    def flush(self) -> None:
        """Sends queued bytes until the socket's buffer is full."""
        if not self._unsent or self._stream_closed:
            return
        self._loop.remove_writer(self._socket.fileno())
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):
            self._stop_listening()
            return
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._socket.fileno(), self.flush)

    def send(self, header: dict[str, Any], blob: bytes = b"") -> None:
        """Queues a frame."""
        if not self._stream_closed:  # otherwise it is exiting, and its calls are requeued when it has ended
            self._unsent += pack_frame(header, blob)

    def kill(self) -> None:
        """Kills the process and its process group."""
        self._killed = True
        self._signal_group(signal.SIGKILL)

    def dump_stacks(self) -> None:
        """Makes the process write the stacks of all threads to its log."""
        if self._pid is not None and self._code is None:
            with contextlib.suppress(ProcessLookupError):  # it ended with the fork server just now
                os.kill(self._pid, signal.SIGUSR1)

    def close_stream(self) -> None:
        """Closes the driver's side of the stream, which ends an idle worker."""
        if not self._stream_closed:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def _signal_group(self, number: signal.Signals) -> None:
        """Signals the group until the process is reaped. Later its id may belong to another process."""
        if self._pid is None or self._reaped:
            return
        for send in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):  # it has no group yet, or the fork server has just ended
                send(self._pid, number)

    def describe_end(self) -> str:
        """Returns how the process ended, with the last lines of its log."""
        ended, tail = self.how_it_ended(), self.log_tail()
        return f"{ended}; its log ({self.log_path}) ends:\n{tail}" if tail else f"{ended}; its log is empty"

    def how_it_ended(self) -> str:
        """Returns how the process ended, as a predicate: "was killed by SIGKILL"."""
        if self._code is None:
            return "is still running"
        return describe_exit(self._code)

    @property
    def killed_externally(self) -> bool:
        """Returns whether neither user code nor the driver ended it."""
        return not self._killed and self._code in (-signal.SIGKILL, -signal.SIGTERM)

    def log_tail(self) -> str:
        """Returns the last lines that this process wrote."""
        return log_tail(self.log_path, _LOG_TAIL_BYTES, start=self._log_start)

    def _check_log(self) -> None:
        rotate_log(self.log_path, MAX_LOG_BYTES)
        self._log_timer = self._loop.call_later(LOG_CHECK_SECONDS, self._check_log)

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
        except ValueError:
            self._stop_listening()
            self.kill()  # user code wrote to the socket, so the stream is corrupt
            return
        for header, blob in frames:
            self._on_frame(header, blob)

    def _stop_listening(self) -> None:
        if not self._stream_closed:
            self._stream_closed = True
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())

    def _read_remaining_frames(self) -> None:
        """Reads answers that the process wrote before it ended."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError, ValueError):
            while data := self._socket.recv(2**20):
                for header, blob in self._reader.feed(data):
                    self._on_frame(header, blob)


TICK_SECONDS = 0.05
"""Interval of deadline checks. A call that runs longer counts as slow: the calls queued behind it are withdrawn."""

CANCEL_SECONDS = 2.0
"""Time for a waiting call to end after its cancellation, before its process is killed."""

logger = logging.getLogger(__name__)


class PoolWorker:
    """`ready`: its environments are loaded. `killed`: the pool has decided to kill the process."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = WorkerState()
        self.process: WorkerProcess | None = None
        self.ready = False
        self.killed = False
        self.loading = "starting"
        """The last loading stage that its process reported."""
        self.failed_starts = 0
        self.deadlines_passed = 0

    def attach(self, process: WorkerProcess) -> None:
        """Installs a new process."""
        self.process = process
        self.ready = self.killed = False
        self.loading = "starting"

    def process_ended(self) -> list[Call]:
        """Handles the end of the process. Fails the call that caused it, if any. Returns the calls to run again."""
        process = self.process
        assert process is not None
        cause = ExitCause.BY_SIGNAL if process.killed_externally else ExitCause.BY_ITSELF
        if self.killed or process.is_lost:
            cause = ExitCause.BY_POOL if self.killed else ExitCause.WITH_SERVER
        culprit, others = self.state.worker_ended(process.slot.read(), cause)
        if not (self.ready or process.is_lost):
            self.failed_starts += 1
        self.process, self.ready = None, False
        if culprit is not None and not culprit.future.done():
            culprit.future.set_exception(
                EnvironmentFailure(f"{culprit.label} ended its process, which {process.describe_end()}")
            )
        return others

    def watch(self, elapsed: float, timeout_seconds: float) -> list[Call]:
        """Charges the calls for `elapsed` seconds and enforces deadlines. Returns calls withdrawn for other workers."""
        process, state = self.process, self.state
        assert process is not None
        if not state.num_calls and not process.slot.read()[0]:
            return []
        state.charge(process.slot.read(), elapsed)
        for call_id, call in state.overdue(timeout_seconds):
            if not call.future.done():
                self.deadlines_passed += 1
                call.future.set_exception(
                    EnvironmentFailure(
                        f"{call.label} did not end within {call.limit(timeout_seconds):g} seconds"
                        f"{' (environment_timeout_seconds)' if call.timeout_seconds is None else ''}; its stack is "
                        f"in {process.log_path}"
                    )
                )
                if state.is_waiting(call_id):
                    process.send({"op": "cancel", "id": call_id})
                    process.flush()
            if state.is_waiting(call_id) and call.used_seconds < call.limit(timeout_seconds) + CANCEL_SECONDS:
                continue
            self._kill()
            return []
        if state.unowned_seconds >= timeout_seconds:
            self._kill()
        elif state.busy_seconds >= TICK_SECONDS and len(state.queued) > 1:
            withdrawn = state.withdraw_queued()  # from behind a slow one
            if withdrawn:
                process.send({"op": "withdraw", "ids": list(withdrawn)})
                process.flush()
            return list(withdrawn.values())
        return []

    def cancel_call(self, call: Call) -> None:
        """Cancels a call that waits in the worker's event loop."""
        for call_id, parked in self.state.parked.items():
            if parked is call and self.process is not None:
                self.process.send({"op": "cancel", "id": call_id})
                self.process.flush()

    def _kill(self) -> None:
        assert self.process is not None
        logger.warning("Environment worker %d exceeded a deadline and is being replaced", self.index)
        self.killed = True
        self.process.dump_stacks()
        asyncio.get_running_loop().call_later(STACK_SECONDS, self.process.kill)
