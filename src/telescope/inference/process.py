"""One engine process: session, process group and log file.

Owns the operating system's side of a server: process group, signals and log tail. Does not know whether the process is
healthy, or whether to restart it (`server`).

Invariant: no process of the group outlives `kill`, the exit of this object's owner process, or the exit of the shim
(`child_guard`).
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from telescope.errors import InfrastructureError
from telescope.utils.child_guard import kill_group
from telescope.utils.process import log_size, log_tail, open_log

TAIL_BYTES = 64 * 1024

KILL_SECONDS = 30.0
"""Time for the kernel to end a killed process; freeing much GPU memory takes seconds."""


class EngineProcess:
    """A running command and its process group. `pid` is the shim's and the group's id."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str], log_path: Path) -> None:
        self.log_path = log_path
        self._log_start = log_size(log_path)
        with open_log(log_path) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "telescope.utils.child_guard", str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Returns the command's exit code, or None while it runs. A negative code is a signal's number."""
        code = self._process.poll()
        return 128 - code if code is not None and code > 128 else code

    def terminate(self, grace_seconds: float) -> None:
        """Sends SIGTERM, waits, then kills the whole group."""
        if self.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_seconds)
        self.kill()

    def kill(self) -> None:
        """Kills every process of the group and waits for their exit.

        Raises `InfrastructureError` when the kernel does not end one of them (a hung device).
        """
        kill_group(self.pid)
        with suppress(subprocess.TimeoutExpired):  # then it is still a member of its group
            self._process.wait(timeout=KILL_SECONDS)
        deadline = time.monotonic() + KILL_SECONDS
        while members := group_members(self.pid):
            if time.monotonic() > deadline:
                raise InfrastructureError(f"processes {members} still exist {KILL_SECONDS:.0f} s after SIGKILL")
            time.sleep(0.02)

    def log_tail(self, num_lines: int = 30) -> list[str]:
        """Returns the last lines that this process wrote, without blank ones."""
        text = log_tail(self.log_path, TAIL_BYTES, start=self._log_start)
        return [line for line in text.splitlines() if line.strip()][-num_lines:]


def group_members(group: int) -> list[int]:
    """Returns the pids of a process group's running processes (zombies left out)."""
    members = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):  # exited meanwhile
            if os.getpgid(process.pid) == group and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                members.append(process.pid)
    return members
