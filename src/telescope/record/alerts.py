"""Records the alerts of a run in the table `alerts`, and runs the user's command for each.

Owns the queue and the process of the command. Does not decide what is an alert: `telescope.health`, `RunStatus.report`
and warnings of the log do.

Invariants: `add` never waits. One command runs at a time, for at most `COMMAND_SECONDS`, and none outlives `close`. A
command cannot fill the disk.
"""

import json
import logging
import os
import queue
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from telescope.record.recorder import REPORTED, Recorder
from telescope.utils.child_guard import kill_group
from telescope.utils.process import describe_exit, open_log, rotate_log
from telescope.utils.text import pluralize

logger = logging.getLogger(__name__)

COMMAND_SECONDS = 30.0
CLOSE_SECONDS = 10.0
"""How long the end of a run waits for the commands of its last alerts, such as the error that ended it."""

MOST_WAITING = 100
"""Alerts that wait for the command. More are recorded without it."""

OUTPUT_BYTES = 2**20
"""Bytes of a command's output that are kept. The command cannot write more."""

LOG_BYTES = 4 * 2**20
"""Size at which the log of the commands is moved to `.log.1`, before the next command."""

LOG_NAME = "alert_command"
VARIABLE = "TELESCOPE_ALERT_"


class Alerts:
    """Records alerts and runs `command` for each. Thread-safe. Close it before the recorder.

    The command gets the alert as JSON on standard input and in environment variables. Its output goes to
    `logs/alert_command.log`. The first failure is a warning.
    `tell` gets the warnings of the log and of the command, so that a run without a terminal prints them.
    """

    def __init__(
        self,
        recorder: Recorder,
        command: Sequence[str] | None = None,
        run_name: str = "",
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._recorder = recorder
        self._command = list(command or ())
        self._run = {"run": run_name, "run_dir": str(recorder.files.run_dir)}
        self._log = recorder.files.log(LOG_NAME)
        self._shown = f"{shlex.join(self._command)}. Its output is in {self._log}"
        self._queue: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._warned: set[str] = set()
        self._tell = tell or (lambda message: None)
        self._thread = threading.Thread(target=self._work, name="telescope-alert-command", daemon=True)
        if self._command:
            self._thread.start()

    def add(self, row: Mapping[str, Any]) -> None:
        """Records a row of `alerts`, and runs the command. Returns at once."""
        self._record(row)
        self.run_command(row)

    def run_command(self, row: Mapping[str, Any]) -> None:
        """Runs the command for an event that is not an alert, such as the end of a run. Returns at once."""
        if not self._command:
            return
        try:
            self._queue.put_nowait({**self._run, "attempt": self._recorder.attempt, **row})
        except queue.Full:
            self._warn("full", f"{MOST_WAITING} alerts wait for alert_command; more are recorded without it")

    def close(self) -> None:
        """Runs the waiting commands for at most `CLOSE_SECONDS`, then kills the running one."""
        if not self._command:
            return
        deadline = time.monotonic() + CLOSE_SECONDS
        with suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._closed = True
            with self._queue.mutex:
                waiting = sum(alert is not None for alert in self._queue.queue)
            is_late = self._process is not None
            if self._process is not None:
                kill_group(self._process.pid)
        if is_late:
            unsent = f", and {pluralize(waiting, 'alert')} did not reach it" if waiting else ""
            late = f"alert_command was killed {CLOSE_SECONDS:g} s after the run had ended{unsent}"
            self._warn("late", f"{late}: {self._shown}")

    def _work(self) -> None:
        while (alert := self._queue.get()) is not None and not self._closed:
            try:
                self._run_once(alert)
            except (OSError, ValueError) as error:  # a command cannot contain null bytes
                self._warn("failed", f"alert_command cannot be started: {error}")

    def _run_once(self, alert: Mapping[str, Any]) -> None:
        text = json.dumps(alert, default=str)
        values = {key: value for key, value in alert.items() if value is not None}
        environment = {f"{VARIABLE}{key.upper()}": _as_text(value) for key, value in values.items()}
        rotate_log(self._log, LOG_BYTES)
        source, output = os.pipe()
        # A process that left the group can hold the pipe open, so the thread may outlive the command.
        copying = threading.Thread(target=_keep, args=(source, self._log), name="telescope-alert-output", daemon=True)
        copying.start()
        try:
            with self._lock:
                if self._closed:
                    return
                process = self._process = subprocess.Popen(
                    self._command, env=os.environ | environment, stdin=subprocess.PIPE, stdout=output, stderr=output,
                    start_new_session=True,
                )  # fmt: skip
        finally:
            os.close(output)
        try:
            process.communicate(text.encode(), timeout=COMMAND_SECONDS)
            ending = None if process.returncode == 0 else describe_exit(process.returncode)
        except subprocess.TimeoutExpired:
            ending = f"was killed after {COMMAND_SECONDS:g} s"
        finally:
            with self._lock:
                kill_group(process.pid)
                process.wait()
                self._process = None
            copying.join(1.0)
        if ending is not None and not self._closed:
            self._warn("failed", f"alert_command {ending}: {self._shown}")

    def _warn(self, what: str, message: str) -> None:
        """Warns once. The warning itself does not run the command."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s", message, extra=REPORTED)
            self._record({"time": time.time(), "level": "warning", "kind": "log", "message": message})

    def _record(self, row: Mapping[str, Any]) -> None:
        self._recorder.write("alerts", row)
        if row["kind"] == "log":
            self._tell(row["message"])


def _keep(source: int, path: Path) -> None:
    """Appends the first `OUTPUT_BYTES` of a pipe to the log, then closes it, which ends the command."""
    left = OUTPUT_BYTES
    try:
        with open(source, "rb", buffering=0) as pipe, open_log(path) as log:
            while left and (part := pipe.read(min(left, 2**16))):
                log.write(part)
                log.flush()
                left -= len(part)
            if not left:
                log.write(f"\n[only {OUTPUT_BYTES} bytes are kept]\n".encode())
    except OSError as error:
        logger.warning("%s cannot be written (%s): its output is lost", path, error.strerror or error)


def _as_text(value: Any) -> str:
    # The kernel accepts no null bytes and at most 128 KiB in a variable. Texts of models may have lone surrogates.
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text.replace("\0", "")[:10_000].encode("utf-8", "replace").decode()
