"""Resources of this machine: cores, memory, GPUs, and ports. Imports no torch and no Ray.

A running cluster is queried through Ray instead (`telescope.cluster`).

Ports: vLLM binds its port seconds after its start and listens only when the model is loaded. Until then other sockets
can bind the same port (SO_REUSEADDR). So the owner of a server also reserves its port by name: with a socket in
Linux's abstract namespace, which is per network namespace, as ports are, and which ends with its process.

Invariant: at most one server of all runs on a machine has a port reserved, starting before its process starts.
"""

import errno
import functools
import math
import os
import platform
import socket
import subprocess
from pathlib import Path

import psutil

from telescope.config.plan import ClusterResources, NodeResources
from telescope.errors import ConfigError
from telescope.utils.text import single_line

NVIDIA_SMI_TIMEOUT_SECONDS = 60.0  # without persistence mode the driver wakes the GPUs, seconds for each
CLUSTER_TIMEOUT_SECONDS = 5.0  # for a connection to the head node of a cluster
MIB = 1 << 20
LOOPBACK = "127.0.0.1"
SHARED_MEMORY = Path("/dev/shm")
CGROUP_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
"""Microseconds of all cores that a container may use, and in how many."""
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def local_resources() -> ClusterResources:
    """This machine as a cluster of one node."""
    node = NodeResources(
        name=platform.node() or "localhost",
        cpus=float(num_cores()),
        gpus=len(visible_gpus("memory.total")),
        memory_bytes=memory_bytes(),
        # None also for GPUs with the memory of the machine, such as GB10, of which nvidia-smi says "[N/A]".
        gpu_memory_bytes=min(visible_gpu_memory(), default=None),
    )
    return ClusterResources((node,))


def num_cores() -> int:
    """Returns the number of cores that this process may use: fewer than there are in a container with a limit."""
    cores = len(os.sched_getaffinity(0))
    for files in CGROUP_QUOTAS:
        if all(map(os.path.exists, files)):
            quota, period = " ".join(Path(file).read_text() for file in files).split()
            if quota.isdigit():  # else "max" or -1: no limit
                cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def memory_bytes() -> int:
    """Returns the memory of this machine or, if lower, of its container."""
    texts = [file.read_text().strip() for file in map(Path, CGROUP_LIMITS) if file.exists()]
    return min([psutil.virtual_memory().total, *(int(text) for text in texts if text.isdigit())])


def cpu_flags() -> frozenset[str]:
    """Returns the instruction sets of the CPU by Linux's names, such as `avx2`. Empty if they are not known."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def visible_gpu_memory() -> list[int]:
    """Returns the memory in bytes of each visible NVIDIA GPU that has its own. Empty without GPUs or a driver."""
    return [int(memory) * MIB for (memory,) in visible_gpus("memory.total") if memory.isdigit()]


def visible_gpu_capabilities() -> list[float]:
    """Returns the compute capability of each visible NVIDIA GPU, such as 9.0."""
    return [float(value) for (value,) in visible_gpus("compute_cap") if value.replace(".", "", 1).isdigit()]


def visible_gpus(*quantities: str) -> list[list[str]]:
    """Asks nvidia-smi for quantities of each visible GPU. Empty without GPUs or a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    gpus = [[part.strip() for part in line.split(",")] for line in _ask_nvidia_smi(quantities)[0] if line.strip()]
    if visible is not None:
        wanted = [part.strip() for part in visible.split(",")]
        gpus = [gpu for gpu in gpus if gpu[0] in wanted or any(gpu[1].startswith(name) for name in wanted if name)]
    return [values for _, _, *values in gpus if len(values) == len(quantities)]


def driver_problem() -> str | None:
    """Returns why nvidia-smi, which is installed, lists no GPUs. None if it lists some, or is not installed."""
    return _ask_nvidia_smi(("memory.total",))[1]


@functools.cache  # the checks before a start ask ten times
def _ask_nvidia_smi(quantities: tuple[str, ...]) -> tuple[list[str], str | None]:
    """Returns the lines of nvidia-smi, and why there are none."""
    command = ["nvidia-smi", f"--query-gpu=index,uuid,{','.join(quantities)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_SECONDS, check=False
        )
    except OSError:
        return [], None  # no driver is the ordinary case of a machine without GPUs
    except subprocess.TimeoutExpired:
        return [], f"it does not end within {NVIDIA_SMI_TIMEOUT_SECONDS:.0f} s"
    if result.returncode:
        return [], single_line(" ".join((result.stdout + result.stderr).split())) or f"exit code {result.returncode}"
    return result.stdout.splitlines(), None


def ray_cluster_is_configured(ray_address: str) -> bool:
    """Returns whether the run would join a cluster, without contacting Ray."""
    if ray_address == "local":
        return False
    if ray_address != "auto" or os.environ.get("RAY_ADDRESS"):
        return True
    # Ray's note of the cluster that this machine belongs to. A stopped cluster removes it, a killed one does not.
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    note = Path(folder, "ray", "ray_current_cluster")
    try:
        host, _, port = note.read_text().strip().rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=CLUSTER_TIMEOUT_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


IN_USE = "in use"
PORTS_TO_TRY = 20  # blocks of ports to look at for a suggestion


def hold_port(host: str, port: int, *, server: int, num_servers: int) -> socket.socket:
    """Reserves the port for server `server` of `num_servers` until the returned socket is closed.

    Raises `ConfigError` with the fix.
    """
    require_port(host, port, server=server, num_servers=num_servers)
    # Not inherited by the server: the supervisor keeps the reservation through restarts.
    hold = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        hold.bind(_name(port))
    except OSError:
        hold.close()
        raise ConfigError(_explain(host, port, IN_USE, server, num_servers)) from None
    return hold


def require_port(host: str, port: int, *, server: int, num_servers: int) -> None:
    """Raises `ConfigError` with the fix when server `server` cannot use the port."""
    if (problem := listen_problem(host, port)) is not None:
        raise ConfigError(_explain(host, port, problem, server, num_servers))


def split_address(address: str) -> tuple[str, int]:
    """Returns the host and the port of `HOST:PORT`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def prometheus_error(address: str, problem: str) -> ConfigError:
    """Returns the error for a `prometheus_address` where the driver cannot listen."""
    return ConfigError(
        f"prometheus_address is {address}, where the driver cannot listen: {problem}. Choose another one"
    )


def listen_problem(host: str, port: int) -> str | None:
    """Returns why a server could not listen there; None if it could."""
    # In this order: a probe must not disturb the server whose port is reserved.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return IN_USE if probe.connect_ex(_name(port)) == 0 else _bind_problem(host, port)


def _name(port: int) -> str:
    return f"\0telescope/inference-port/{port}"


def _bind_problem(host: str, port: int) -> str | None:
    for reuse in (True, False):  # without it, a server that is bound and does not listen yet is noticed
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    return error.strerror or str(error)
                # Connections, also those in TIME_WAIT, keep a socket without SO_REUSEADDR from binding, not a server.
                if reuse or all(connection.laddr.port != port for connection in psutil.net_connections("tcp")):
                    return IN_USE
    return None


def _explain(host: str, port: int, problem: str, server: int, num_servers: int) -> str:
    if problem != IN_USE:
        return (
            f"inference_host is {host!r}, but no server can listen there ({problem}). Give an address of this machine"
        )
    base = port - server
    free = free_block(host, num_servers, base + 100)
    suggestion = f"for example to {free}" if free else "to a free one"
    return (
        f"inference_base_port is {base}, but port {port}, which server {server} would listen on, is in use. Stop the "
        f"process that uses it, or set inference_base_port {suggestion}"
    )


CHOSEN_PORTS = "\0telescope/chosen-ports"
"""Beginning of the names of the abstract sockets that reserve blocks of ports."""
_chosen: dict[int, socket.socket] = {}
"""Reservations of the blocks of ports that this process chose, by their first port."""


def free_block(host: str, count: int, first: int, *, choose: bool = False) -> int | None:
    """Returns the first of `count` free ports, from `first` on in steps of 100.

    With `choose`, skips blocks that other processes have chosen, and chooses it until this process ends: of runs that
    start at once, each has its own. None without a free block.
    """
    for base in range(first, min(first + 100 * PORTS_TO_TRY, 65537 - count), 100):
        if all(listen_problem(host, port) is None for port in range(base, base + count)) and (
            not choose or _choose(base)
        ):
            return base
    return None


def _choose(base: int) -> bool:
    """Chooses a block of ports. Returns False if another process has it."""
    if base not in _chosen:
        hold = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            hold.bind(f"{CHOSEN_PORTS}/{base}")
        except OSError:
            hold.close()
            return False
        _chosen[base] = hold
    return True


def existing_parent(path: Path) -> Path:
    """Returns the path itself, or the nearest folder above it that exists as far as this user may see."""
    while not os.path.exists(path) and path != path.parent:  # Path.exists raises PermissionError
        path = path.parent
    return path
