"""The right to write a run directory, which one process has at a time.

Owns the lock and the look whether the directory is still the one that was locked. Does not own what becomes of rows
when it is not (`recorder`).

Who a process is, so that another one can tell whether it still runs.

A process id alone is not enough: ids are reused, and a run directory may be read on another machine, in another
container, or after a reboot.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from telescope.errors import UserError
from telescope.record.files import RunFiles, read_json

logger = logging.getLogger(__name__)


class WriterLock:
    """The lock of one run directory. `folder_is_gone` is what the last `take` saw."""

    def __init__(self, files: RunFiles) -> None:
        self.folder_is_gone = False
        self._files = files
        self._descriptor: int | None = None

    def take(self) -> None:
        """Become the one writer, or see that this still is. `UserError` if another process is, `OSError` if the folder
        cannot be made, or was taken away: it is not made again then, for its rows so far would be missing in it.
        """
        if self._descriptor is not None:
            self._see_that_the_folder_is_there(self._descriptor)
            return
        self._files.tables.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._files.writer_lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(_other_writer(self._files.run_dir)) from None
        except OSError as error:
            # Some network file systems have no locks. The run goes on without that protection.
            logger.warning("record: %s cannot be locked (%s): start no second run in it", self._files.tables, error)
        self._descriptor = descriptor

    def release(self) -> None:
        """Let another process write. Safe to call when the lock was never had."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _see_that_the_folder_is_there(self, descriptor: int) -> None:
        try:
            found = os.stat(self._files.writer_lock)
        except FileNotFoundError:
            found = None
        self.folder_is_gone = found is None or not os.path.samestat(found, os.fstat(descriptor))
        if self.folder_is_gone:
            raise FileNotFoundError(errno.ENOENT, "the run directory was removed or replaced", str(self._files.run_dir))


def _other_writer(run_dir: Path) -> str:
    who = "Another process"
    try:
        heartbeat = read_json(RunFiles(run_dir).heartbeat)
    except (OSError, ValueError):
        heartbeat = None
    identity = ProcessIdentity.from_json((heartbeat or {}).get("process"))
    if identity is not None:
        who = f"Process {identity.pid} on {identity.host}"
    return (
        f"run_dir {str(run_dir)!r} is being written by another run. {who} holds it: "
        "wait until it ends or stop it, or choose another run_dir."
    )


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process id with the place and the time that make it unique; empty texts where the system does not tell."""

    host: str
    pid: int
    started: str
    """Start of the process in ticks since boot."""
    boot: str
    namespace: str
    """The process id namespace: containers have their own."""

    @classmethod
    def current(cls) -> ProcessIdentity:
        """The identity of this process."""
        pid = os.getpid()
        boot, namespace = _boot_id(), _pid_namespace()
        return cls(socket.gethostname(), pid, _start_ticks(pid) or "", boot, namespace)

    @classmethod
    def from_json(cls, value: Any) -> ProcessIdentity | None:
        """Read what `to_json` wrote, or None where it is something else."""
        try:
            return cls(**{name: value[name] for name in cls.__slots__})
        except (TypeError, KeyError):
            return None

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)

    def is_alive(self) -> bool | None:
        """Whether the process runs; None where that cannot be seen from here."""
        if not self.boot or not self.started or self.boot != _boot_id() or self.namespace != _pid_namespace():
            return None
        return _start_ticks(self.pid) == self.started


def _start_ticks(pid: int) -> str | None:
    """When a process of this machine started, or None if it is gone. A zombie is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the name in parentheses, which may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else fields[19]


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
