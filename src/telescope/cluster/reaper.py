"""Kills a run's processes when its driver exits, and removes temporary files.

`Reaper` is the driver's handle. The file itself, run as a program, is a small process that waits at a pipe for the
driver's exit, even by SIGKILL, then kills the remaining processes and removes the files. It imports only the standard
library, because it stays in memory beside every run.

A process belongs to the run if its environment has the run's mark, which every process that the driver starts inherits,
or if its parent belongs to the run. Some processes overwrite their environment with a title, or lose their parents, so
the reaper scans for new ones every `SCAN_SECONDS`. It identifies a process by id and start time, because the kernel
reuses ids. Ray ends the processes on other machines.
"""

from __future__ import annotations

import contextlib
import getpass
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MARK_VARIABLE = "TELESCOPE_RUN_MARK"
"""Environment variable of every process of a run. Its value is the run's temporary directory."""

ALSO_REMOVED = "also-removed-"
"""Name prefix of links in the temporary directory to other folders that are removed with it."""

SCAN_SECONDS = 0.5
KILL_SECONDS = 20.0
"""The reaper gives up on a process that the kernel has not ended after this time."""
CLOSE_SECONDS = KILL_SECONDS + 25.0

SOCKET_PATH_BYTES = 107
"""The longest path of a unix socket on Linux."""
LONGEST_SOCKET = len("/telescope-12345678/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
"""The longest path below the base directory: Ray's."""

SHARED_MEMORY = Path("/dev/shm")
SHARED_PREFIXES = ("psm_", "sem.mp-", "vllm_dist_", "nccl-")
"""Shared memory and semaphores of multiprocessing, vLLM and NCCL, which a killed process leaves behind."""
SCANS_FOR_OWNER = 6
"""A file that no process of the run has mapped after this many scans belongs to others."""


class Reaper:
    """Context manager of a run whose processes end with it.

    `directory` is the run's temporary directory, accessible only to this user and removed at the end. Processes that
    the driver started before, or without its environment, are not touched.
    """

    directory: Path

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> Reaper:
        base = temporary_base()
        self.directory = Path(tempfile.mkdtemp(prefix="telescope-", dir=base))  # mode 0700
        clean = {name: value for name, value in os.environ.items() if name != MARK_VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(self.directory), repr(time.time())],
            stdin=subprocess.PIPE,  # closes however the driver ends
            stdout=subprocess.DEVNULL,  # a reader of the driver's output must not wait for this process
            env=clean,
            start_new_session=True,  # out of reach of Ctrl-C and of kills of the driver's group
        )
        variables = {MARK_VARIABLE: str(self.directory), **temporary_variables(str(self.directory))}
        self._before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        tempfile.tempdir = None  # read TMPDIR again
        return self

    def __exit__(self, *_: object) -> None:
        """Kills the remaining processes, removes the files, and waits for both."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        tempfile.tempdir = None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=CLOSE_SECONDS)


def temporary_variables(directory: str) -> dict[str, str]:
    """Returns the variables that send temporary files to `directory`."""
    usual = os.environ.get("TMPDIR") or "/tmp"
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # in a container the user may have no name
        user = f"uid_{os.getuid()}"
    return {
        "TMPDIR": directory,
        # Ray finds a running cluster by a file in its usual directory.
        "RAY_TMPDIR": os.environ.get("RAY_TMPDIR") or usual,
        # torch.compile's own choice for the usual directory: compiled kernels are kept for the next run.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{usual}/torchinductor_{user}",
    }


def temporary_base() -> str:
    """Returns the first of RAY_TMPDIR, TMPDIR and /tmp that is short enough for socket paths."""
    for base in (os.environ.get("RAY_TMPDIR"), os.environ.get("TMPDIR")):
        if base and os.path.isdir(base):
            path = os.path.abspath(base)
            if len(os.fsencode(path)) + LONGEST_SOCKET <= SOCKET_PATH_BYTES:
                return path
    return "/tmp"


class _ProcessTree:
    """The known processes of a run and their files in /dev/shm. `members` has their start times by pid."""

    def __init__(self, mark: str, started: float) -> None:
        self._entry = f"{MARK_VARIABLE}={mark}".encode()
        self._present: set[int] = set()
        self._scanned: set[int] = set()
        """Processes that were scanned twice, because at the first scan a process may not run its program yet."""
        self.members: dict[int, str] = {}
        self._scans = dict.fromkeys(_shared_files(changed_before=started), SCANS_FOR_OWNER)
        """How often each file was scanned. Files from before the run's start belong to others."""
        self.shared: set[tuple[str, int]] = set()

    def scan(self) -> None:
        """Adds new processes and files, and forgets processes that have exited."""
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._scanned &= present
        self.members = {pid: start for pid, start in self.members.items() if _parent_and_start(pid)[1] == start}
        candidates = sorted(present - self._scanned)
        found = True
        while found:  # a child may have a lower id than its parent
            found = False
            for pid in candidates:
                parent, start = _parent_and_start(pid)
                if pid not in self.members and start and (parent in self.members or self._carries_mark(pid)):
                    self.members[pid] = start
                    found = True
        self._scanned |= self._present & present
        self._present = present

        files = _shared_files()
        self._scans = {file: count for file, count in self._scans.items() if file in files}
        unknown = {file for file in files - self.shared if self._scans.get(file, 0) < SCANS_FOR_OWNER}
        if not unknown:
            return
        mapped: set[int] = set()
        for pid in self.members:
            with contextlib.suppress(OSError):  # it has ended
                lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
                mapped |= {int(line.split()[4]) for line in lines if b" /dev/shm/" in line}
        for file in unknown:
            self._scans[file] = self._scans.get(file, 0) + 1
            if file[1] in mapped:
                self.shared.add(file)

    def _carries_mark(self, pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/environ", "rb") as environ:
                return self._entry in environ.read().split(b"\0")
        except OSError:  # it has ended, or belongs to another user
            return False

    def kill(self) -> None:
        for pid, start in self.members.items():
            if _parent_and_start(pid)[1] == start:
                with contextlib.suppress(OSError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)


def _shared_files(changed_before: float = math.inf) -> set[tuple[str, int]]:
    """Returns names and inodes of this user's files in /dev/shm of the kinds that killed processes leave behind."""
    try:
        files = [entry for entry in os.scandir(SHARED_MEMORY) if entry.name.startswith(SHARED_PREFIXES)]
        found = [(entry.name, entry.inode(), entry.stat(follow_symlinks=False)) for entry in files]
        return {(name, inode) for name, inode, s in found if s.st_uid == os.getuid() and s.st_ctime < changed_before}
    except OSError:  # a file was removed meanwhile: the next scan finds the others
        return set()


def _parent_and_start(pid: int) -> tuple[int, str]:
    """Returns parent and start time of a process. (0, "") if there is none, or only a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return 0, ""
    return (0, "") if fields[0] in "ZX" else (int(fields[1]), fields[19])


def main(directory: str, started: float) -> None:
    """Waits for the driver's exit, then kills and removes everything."""
    driver = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    tree = _ProcessTree(directory, started)
    # A fork of the driver may keep the pipe open, so the parent's pid is checked too.
    while not select.select([0], [], [], SCAN_SECONDS)[0] and os.getppid() == driver:
        tree.scan()
    deadline = time.monotonic() + KILL_SECONDS
    empty_scans = 0
    while empty_scans < 2 and time.monotonic() < deadline:  # twice, because a process may have been starting another
        tree.scan()
        empty_scans = 0 if tree.members else empty_scans + 1
        tree.kill()
        time.sleep(0.05)
    for name, _ in tree.shared & _shared_files():  # left by killed processes
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    for link in Path(directory).glob(f"{ALSO_REMOVED}*"):
        shutil.rmtree(link.resolve(), ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
