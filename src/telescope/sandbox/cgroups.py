"""Limits memory, processes and CPU of a sandbox with cgroups, where this process may create them.

Works with cgroups v2 below a delegated folder (`TELESCOPE_CGROUP`, else the root) and with v1. Skips a limit that
cannot be set; `Cgroup.enforced` names the limits that are in force.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
FOLDER_VARIABLE = "TELESCOPE_CGROUP"
"""Environment variable with a cgroup v2 folder that belongs to this user and has no processes of its own."""
PARENT = "telescope"
PERIOD_US = 100_000
REMOVE_SECONDS = 2.0
"""Time for the kernel to end killed processes."""


def remove_old() -> None:
    """Removes the cgroups (`local-PID-...`) of processes that have exited."""
    for controller in ("", "memory", "pids", "cpu"):
        base = ROOT / controller if controller else Path(os.environ.get(FOLDER_VARIABLE) or ROOT)
        for folder in (base / PARENT).glob("local-*"):
            if not Path("/proc", folder.name.split("-")[1]).exists():
                with contextlib.suppress(OSError):  # its processes still run, or another process removes it too
                    folder.rmdir()


def are_usable() -> bool:
    """Returns whether this process may create cgroups with limits and move processes into them."""
    cgroup = Cgroup(f"local-{os.getpid()}-{uuid.uuid4().hex[:8]}", memory_bytes=2**30, num_processes=10, cpu=1.0)
    child = subprocess.Popen(["sleep", "60"])
    try:
        cgroup.add(child.pid)
    except OSError:
        return False
    finally:
        child.kill()
        child.wait()
        cgroup.remove()
    return bool(cgroup.enforced) and Path("/proc/thread-self/children").exists()  # needed to find sandboxes


class Cgroup:
    """The cgroup of one sandbox. The constructor creates its folders."""

    def __init__(self, name: str, *, memory_bytes: int, num_processes: int, cpu: float) -> None:
        self.folders: list[Path] = []
        self.enforced: set[str] = set()
        """Limits that the kernel enforces: `memory`, `processes`, `cpu`, `swap`."""
        quota = max(1000, int(cpu * PERIOD_US))
        base = Path(os.environ.get(FOLDER_VARIABLE) or ROOT)
        if (base / "cgroup.controllers").exists():
            with contextlib.suppress(OSError):
                (base / PARENT).mkdir(exist_ok=True)
            for folder in (base, base / PARENT):
                for controller in ("+memory", "+pids", "+cpu"):  # systemd may delegate only some of them
                    with contextlib.suppress(OSError):
                        (folder / "cgroup.subtree_control").write_text(controller)
            folder = base / PARENT / name
            limits = [
                (folder / "memory.max", memory_bytes),
                (folder / "pids.max", num_processes),
                (folder / "cpu.max", f"{quota} {PERIOD_US}"),
                (folder / "memory.swap.max", 0),
            ]
        else:
            limits = [
                (ROOT / "memory" / PARENT / name / "memory.limit_in_bytes", memory_bytes),
                (ROOT / "pids" / PARENT / name / "pids.max", num_processes),
                (ROOT / "cpu" / PARENT / name / "cpu.cfs_quota_us", quota),
                (ROOT / "memory" / PARENT / name / "memory.memsw.limit_in_bytes", memory_bytes),  # above the memory's
            ]
        for kind, (path, value) in zip(("memory", "processes", "cpu", "swap"), limits, strict=True):
            if not (path.parents[2] / "cgroup.procs").exists():  # no such controller
                continue
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.parent not in self.folders:
                    self.folders.append(path.parent)
                path.write_text(str(value))
                self.enforced.add(kind)

    def add(self, pid: int) -> None:
        """Moves a process into the cgroup. Raises `OSError` if that is not permitted."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def ran_out_of_memory(self) -> bool:
        """Returns whether the kernel killed one of its processes because memory ran out."""
        for folder in self.folders:
            for file in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError, IndexError):
                    text = (folder / file).read_text()
                    return int(text.split("oom_kill ")[1].split()[0]) > 0
        return False

    def remove(self) -> None:
        """Removes the folders as soon as the killed processes have exited."""
        deadline = time.monotonic() + REMOVE_SECONDS
        for folder in reversed(self.folders):
            while folder.exists() and time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.002)
