"""Nothing of a run outlives its driver on this machine, even when the driver is killed with signal 9.

`Reaper` is the driver's handle; the file itself, run as a program, is a small process that waits for the end of the
driver at a pipe and then kills what is left. Most processes of a run end by themselves when their parents do, each by
its own means (see docs/architecture.md), but Ray's agents take more than a minute to notice, and an actor that is busy
tens of seconds. Imports the standard library only, because the process stays in memory beside every run.

Which processes belong to the run: those that carry its mark in their environment, which every process that the driver
starts inherits, and their children. Some overwrite their environment with a title, and lose their parents before
anybody asks, so newcomers are looked at every `LOOK_SECONDS`. A process is known by its id and its start time, so that
an id that was given to another is left alone. Processes on other machines are Ray's matter, which ends the actors of a
driver that has gone.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from types import TracebackType

MARK_VARIABLE = "TELESCOPE_RUN_MARK"
"""In the environment of every process of a run."""

LOOK_SECONDS = 0.5
KILL_SECONDS = 20.0
"""After which the reaper gives up on a process that the kernel does not let go of."""
CLOSE_SECONDS = KILL_SECONDS + 5.0


class Reaper:
    """A context: processes that are started inside, directly or not, are gone soon after it or the driver ends.

    Leaves what the driver started before alone, and so what it starts without its environment.
    """

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self._outer: str | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Reaper:
        clean = {name: value for name, value in os.environ.items() if name != MARK_VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self.mark],
            stdin=subprocess.PIPE,  # its other end closes however we end
            stdout=subprocess.DEVNULL,  # whoever reads our output waits for its end, and must not wait for this
            env=clean,
            start_new_session=True,  # neither Ctrl-C nor a kill of the driver's group is meant for it
        )
        self._outer = os.environ.get(MARK_VARIABLE)
        os.environ[MARK_VARIABLE] = self.mark
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Kill what has not ended yet, and wait for it."""
        if self._outer is None:
            os.environ.pop(MARK_VARIABLE, None)
        else:
            os.environ[MARK_VARIABLE] = self._outer
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=CLOSE_SECONDS)


class _Family:
    """The processes of a run, as far as they were seen: pid to start time."""

    def __init__(self, mark: str) -> None:
        self._entry = f"{MARK_VARIABLE}={mark}".encode()
        self._seen: set[int] = set()
        self.members: dict[int, str] = {}

    def look(self) -> None:
        """Take in newcomers, and forget who has gone."""
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._seen &= present
        self.members = {pid: start for pid, start in self.members.items() if _state(pid)[2] == start}
        newcomers = sorted(present - self._seen)
        found = True
        while found:  # a child may have a lower id than its parent
            found = False
            for pid in newcomers:
                _, parent, start = _state(pid)
                if pid not in self.members and start and (parent in self.members or self._carries_mark(pid)):
                    self.members[pid] = start
                    found = True
        self._seen |= present

    def _carries_mark(self, pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/environ", "rb") as environ:
                return self._entry in environ.read().split(b"\0")
        except OSError:  # it has ended, or is another person's
            return False

    def kill(self) -> None:
        for pid, start in self.members.items():
            if _state(pid)[2] == start:
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    continue  # it has just ended


def _state(pid: int) -> tuple[str, int, str]:
    """State, parent and start time of a process; ("", 0, "") when there is none, or only its zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return "", 0, ""
    return ("", 0, "") if fields[0] in "ZX" else (fields[0], int(fields[1]), fields[19])


def main(mark: str) -> None:
    """Watch until the pipe at standard input closes, or the parent is gone, then kill until nobody is left."""
    driver = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    family = _Family(mark)
    # A fork of the driver may hold the pipe open, so its end is not the only sign.
    while not select.select([0], [], [], LOOK_SECONDS)[0] and os.getppid() == driver:
        family.look()
    deadline = time.monotonic() + KILL_SECONDS
    rounds_alone = 0
    while rounds_alone < 2 and time.monotonic() < deadline:  # twice: one may have been starting another meanwhile
        family.look()
        rounds_alone = 0 if family.members else rounds_alone + 1
        family.kill()
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1])
