"""The lock of a run directory, and the identity of its writer.

One process at a time may write a run directory. The lock also checks that the directory is still the one that was
locked; the `recorder` decides what happens to rows when it is not.

A process id alone does not identify a process: ids are reused, and a run directory may be read on another machine, in
another container or after a reboot.
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
    """Lock of one run directory. `is_removed` is the result of the last `acquire`."""

    def __init__(self, files: RunFiles) -> None:
        self.is_removed = False
        self._files = files
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Returns whether this process may write the directory."""
        return self._descriptor is not None and not self.is_removed

    def acquire(self) -> None:
        """Becomes the only writer, or checks that it still is.

        Raises `UserError` if another process is the writer, and `OSError` if the directory cannot be created or was
        removed. A removed directory is not created again, because its earlier rows would be missing.
        """
        if self._descriptor is not None:
            self._check_directory(self._descriptor)
            return
        self._files.tables.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._files.writer_lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(_other_writer(self._files.run_dir)) from None
        except OSError as error:
            # Some network file systems have no locks. The run continues without that protection.
            logger.warning(
                "record: %s cannot be locked (%s): do not start a second run in it", self._files.tables, error
            )
        self._descriptor = descriptor

    def release(self) -> None:
        """Lets another process write. Safe to call without the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _check_directory(self, descriptor: int) -> None:
        try:
            found = os.stat(self._files.writer_lock)
        except FileNotFoundError:
            found = None
        self.is_removed = found is None or not os.path.samestat(found, os.fstat(descriptor))
        if self.is_removed:
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
        f"run_dir {str(run_dir)!r} is in use: {who} writes it. "
        "Wait until that run ends, stop it, or choose another run_dir."
    )


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process id with what makes it unique. Fields are empty where the system does not report them."""

    host: str
    pid: int
    started: str
    """Start of the process in ticks since boot."""
    boot: str
    namespace: str
    """The process id namespace; containers have their own."""

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Returns the identity of this process."""
        pid = os.getpid()
        boot, namespace = _boot_id(), _pid_namespace()
        return cls(socket.gethostname(), pid, _start_ticks(pid) or "", boot, namespace)

    @classmethod
    def from_json(cls, value: Any) -> ProcessIdentity | None:
        """Reads what `to_json` wrote. Returns None for anything else."""
        try:
            return cls(**{name: value[name] for name in cls.__slots__})
        except (TypeError, KeyError):
            return None

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return asdict(self)

    def is_alive(self) -> bool | None:
        """Returns whether the process runs, or None if this machine cannot tell."""
        if not self.boot or not self.started or self.boot != _boot_id() or self.namespace != _pid_namespace():
            return None
        return _start_ticks(self.pid) == self.started


def _start_ticks(pid: int) -> str | None:
    """Returns when a local process started, or None if it has exited. A zombie has exited."""
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
