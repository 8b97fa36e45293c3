"""One engine process: session, process group and log file.

Owns the operating system's side of a server: process group, signals, log tail, and what the log of a starting
vLLM tells: the current stage, or why it failed. Does not know whether the process is healthy, or whether to restart it
(`server`).

A failure is shown as what failed, the likely fix, the one or two relevant log lines, and the path of the log. A line of
no known stage is ignored, so another version of vLLM shows fewer stages and no noise.

Invariant: no process of the group outlives `kill`, the exit of this object's owner process, or the exit of the shim
(`child_guard`).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from telescope.errors import InfrastructureError
from telescope.inference.vllm.launch import hint_for
from telescope.utils.child_guard import kill_group
from telescope.utils.process import log_size, log_tail, open_log
from telescope.utils.text import plain, single_line

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

    def terminate(self, grace_seconds: float) -> int | None:
        """Sends SIGTERM, waits, then kills the whole group. Returns the exit code."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_seconds
            while self.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
        return self.kill()

    def kill(self) -> int | None:
        """Kills every process of the group and waits for their exit.

        Returns the exit code. Raises `InfrastructureError` when the kernel does not end one of them (a hung device).
        """
        kill_group(self.pid)
        code = self._process.wait(timeout=KILL_SECONDS)
        deadline = time.monotonic() + KILL_SECONDS
        while members := group_members(self.pid):
            if time.monotonic() > deadline:
                raise InfrastructureError(f"processes {members} still exist {KILL_SECONDS:.0f} s after SIGKILL")
            time.sleep(0.02)
        return 128 - code if code > 128 else code

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


NUM_LINES = 5

_PREFIX = re.compile(r"^(?:\([\w-]+ pid=\d+\) )?(?:(DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\] ?)?")
_NOT_TELLING = re.compile(
    r"\s|$|Traceback \(most|During handling of the above|The above exception was|\S*:\d+: \w*Warning: |"
    r"telescope: engine process \d+ (?:ended|was killed)"
)
_ERROR = re.compile(r"[\w.]*(?:Error|Exception)\b")


def start_failure(name: str, what: str, log: Sequence[str], log_path: Path, *, ended: bool) -> str:
    """Returns the message; its first line is complete by itself. `ended`: the process exited, so its log says why."""
    first = f"{name} {what}"
    hint = hint_for("\n".join(log))
    if hint is not None:
        first += f". Likely fix: {hint}"
    lines = (error_lines(log) if ended else []) or [line for line in log if line.strip()][-NUM_LINES:]
    parts = [first]
    if lines:
        parts += ["Its log:", *(f"  {single_line(line)}" for line in lines)]
    return "\n".join([*parts, f"Log: {log_path}"])


def error_lines(log: Sequence[str]) -> list[str]:
    """Returns the last distinct error lines of a log.

    Leaves out vLLM's prefixes, traceback frames, progress, the banner, and lines before the first error.
    """
    found: dict[str, None] = {}
    seen_error = False
    for line in log:
        text = plain(line)
        prefix = _PREFIX.match(text)
        assert prefix is not None  # every part of it is optional
        text = text[prefix.end() :]
        if prefix[1] in ("DEBUG", "INFO", "WARNING") or _NOT_TELLING.match(text):
            continue
        if not seen_error and (prefix[1] is not None or _ERROR.match(text)):
            seen_error = True
            found.clear()
        found.setdefault(text.rstrip())
    return list(found)[-NUM_LINES:]


FIRST_STAGE = "loading libraries"

STAGES = (
    (r"Initializing a V\d LLM engine|vLLM API server version", "starting the engine"),
    (r"Starting to load model|Loading weights|Loading safetensors checkpoint", "loading the weights"),
    (r"Loading weights took|Model loading took", "weights loaded"),
    (r"torch\.compile takes|Dynamo bytecode|Compiling a graph", "compiling"),
    (r"KV cache|cache blocks|Maximum concurrency", "allocating the KV cache"),
    (r"[Cc]apturing (CUDA )?graph|Graph capturing", "capturing CUDA graphs"),
    (r"init engine .*took|Starting vLLM (API )?server|Started server process|Application startup", "opening the API"),
)
"""Patterns of log lines of vLLM 0.26 to 0.32 and their stages; the last match of a line counts."""

_SHARE = re.compile(r"(\d+)% Completed")


def start_stage(lines: Sequence[str]) -> str | None:
    """Returns the stage of the newest matching line. None when no line matches."""
    for line in reversed(lines):
        for pattern, stage in reversed(STAGES):
            if re.search(pattern, line):
                share = _SHARE.search(line)
                return f"{stage}, {share[1]} %" if share else stage
    return None
