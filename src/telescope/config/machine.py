"""What this machine has, without torch and without Ray: cores, memory, GPUs.

Used for a dry run and for the check before a cluster is started on this machine. A cluster that already runs is asked
through Ray instead (`telescope.cluster`).
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from pathlib import Path

from telescope.config.plan import ClusterResources, NodeResources

NVIDIA_SMI_TIMEOUT_SECONDS = 10.0  # the driver may need seconds to wake sleeping GPUs
CLUSTER_TIMEOUT_SECONDS = 5.0  # for a connection to the head node of a cluster
MIB = 1 << 20
LOOPBACK = "127.0.0.1"


def local_resources() -> ClusterResources:
    """This machine as a cluster of one node."""
    gpus = visible_gpu_memory()
    node = NodeResources(
        name=platform.node() or "localhost",
        cpus=float(len(os.sched_getaffinity(0))),
        gpus=len(gpus),
        memory_bytes=_memory_bytes(),
        gpu_memory_bytes=min(gpus, default=None),
    )
    return ClusterResources((node,))


def visible_gpu_memory() -> list[int]:
    """Memory in bytes of each NVIDIA GPU that a process started now would see. Empty without GPUs or a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []  # no driver is the ordinary case of a machine without GPUs
    gpus = [[part.strip() for part in line.split(",")] for line in result.stdout.splitlines() if line.strip()]
    if visible is not None:
        wanted = [part.strip() for part in visible.split(",")]
        gpus = [gpu for gpu in gpus if gpu[0] in wanted or any(gpu[1].startswith(name) for name in wanted if name)]
    return [int(memory) * MIB for _, _, memory in gpus if memory.isdigit()]


def ray_cluster_is_configured(ray_address: str) -> bool:
    """Whether the run would join a cluster rather than start one here, as far as can be seen without asking Ray."""
    if ray_address == "local":
        return False
    if ray_address != "auto" or os.environ.get("RAY_ADDRESS"):
        return True
    # Here Ray notes the address of the cluster that this machine is part of. A cluster that is stopped takes the note
    # with it, one that is killed does not.
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    note = Path(folder, "ray", "ray_current_cluster")
    try:
        host, _, port = note.read_text().strip().rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=CLUSTER_TIMEOUT_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
