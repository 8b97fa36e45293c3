"""Who a process is, so that another one can tell whether it still runs.

A process id alone is not enough: ids are reused, and a run directory may be read on another machine, in another
container, or after a reboot.
"""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


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
