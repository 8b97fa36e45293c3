"""Checks between the nodes of a Ray cluster: equal packages and clocks, a shared folder, gloo and NCCL.

Collects the results of a probe on each node, which `telescope doctor --cluster` evaluates. Starts no engine and trains
nothing.
"""

import os
import platform
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from telescope.cluster.placement import use_interface_of
from telescope.cluster.ray_cluster import connect, disconnect, names_of_nodes, own_address
from telescope.config import TelescopeConfig
from telescope.errors import RunError, UserError
from telescope.inference.vllm import support
from telescope.utils.packages import installed_version

PACKAGES = ("telescope", "torch", "ray", "transformers")
START_SECONDS = 120.0  # for a probe, which may import torch from a shared disk or wait for a busy GPU
COLLECTIVE_SECONDS = 60.0
GPU_BYTES = 256 << 20  # enough for the link to dominate the time of a sum
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class ProbeResults:
    """The results of the probes, by node name."""

    gpus: dict[str, int]
    versions: dict[str, dict[str, str | None]]
    clock_offsets: dict[str, float]
    """Seconds that a node's clock is ahead of the driver's."""
    without_folder: tuple[str, ...]
    """The nodes that do not see a file that the driver wrote to the run directory."""
    collectives: dict[str, float | str]
    """Duration of a sum over all nodes in seconds, or its error, by backend."""


class Probe:
    """Runs the checks of one node."""

    def facts(self) -> dict[str, str | None]:
        versions = {name: installed_version(name) for name in PACKAGES}
        return {"python": platform.python_version(), "vllm": support.installed_version(), **versions}

    def clock(self) -> float:
        return time.time()

    def sees(self, path: str) -> bool:
        return Path(path).exists()

    def free_address(self) -> str:
        with socket.create_server((own_address(), 0)) as server:
            return f"tcp://{own_address()}:{server.getsockname()[1]}"

    def sum(self, backend: str, address: str, rank: int, size: int) -> float:
        """Returns the duration of a sum over all nodes, in seconds. Raises RuntimeError if the sum is wrong."""
        import torch
        from torch import distributed

        use_interface_of(own_address())
        limit = timedelta(seconds=COLLECTIVE_SECONDS)
        distributed.init_process_group(backend, init_method=address, rank=rank, world_size=size, timeout=limit)
        device, num_bytes = ("cuda", GPU_BYTES) if backend == "nccl" else ("cpu", 1 << 20)
        try:
            for _ in range(2):  # the first sum connects
                values = torch.full((num_bytes // 4,), rank + 1.0, device=device)
                start = time.perf_counter()
                distributed.all_reduce(values)
                total = values.mean(dtype=torch.float64).item()
                seconds = time.perf_counter() - start
            if total != size * (size + 1) / 2:
                raise RuntimeError(f"the sum over {size} nodes is {total}")
            return seconds
        finally:
            distributed.destroy_process_group()


def ask_nodes(address: str, run_dir: Path, num_nodes: int, wait_seconds: float) -> ProbeResults:
    """Runs a probe on each node, once there are `num_nodes`. Raises `UserError` without a cluster.

    A failed collective, or a node without the folder, is a result, not an exception.
    """
    config = TelescopeConfig(environments=[{"name": "none"}], ray_address=address, ray_auto_start_local=False)  # type: ignore[list-item]
    cluster = connect(config, run_dir, run_dir, local_cpus=0, local_gpus=0)
    try:
        deadline = time.monotonic() + wait_seconds
        while len(nodes := [node for node in ray.nodes() if node["Alive"]]) < num_nodes and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return ask_probes(nodes, cluster.driver_node, run_dir)
    finally:
        disconnect(replace(cluster, started_here=False), config)


def ask_probes(nodes: list[dict[str, Any]], driver_node: str, run_dir: Path) -> ProbeResults:
    nodes.sort(key=lambda node: node["NodeID"] != driver_node)
    names = [names_of_nodes(nodes)[node["NodeID"]] for node in nodes]
    gpus = [int(node["Resources"].get("GPU", 0)) for node in nodes]
    probe_of = ray.remote(num_cpus=0)(Probe).options
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    probes = [probe_of(num_gpus=min(n, 1), scheduling_strategy=at).remote() for n, at in zip(gpus, places, strict=True)]

    def each(method: str, *arguments: Any) -> list[Any]:
        return ray.get([getattr(probe, method).remote(*arguments) for probe in probes], timeout=START_SECONDS)

    try:
        versions, offsets = each("facts"), [_offset(probe) for probe in probes]
    except ray.exceptions.RayError as error:
        raise RunError(
            f"a probe does not start on every node: {_last_line(error)}. Each node needs {sys.executable} with this "
            "version of Telescope, and a GPU that is not in use"
        ) from error
    with_gpus = [probe for probe, count in zip(probes, gpus, strict=True) if count]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = tempfile.NamedTemporaryFile(prefix=".telescope-doctor-", dir=run_dir.absolute())  # noqa: SIM115
    except OSError as error:
        why = f"which is not writable ({error.strerror}). Name a folder that you may write on all nodes"
        raise UserError(f"--run-dir is {str(run_dir)!r}, {why}") from error
    with file:
        os.fsync(file.fileno())
        sees = each("sees", file.name)
    return ProbeResults(
        dict(zip(names, gpus, strict=True)),
        dict(zip(names, versions, strict=True)),
        dict(zip(names, offsets, strict=True)),
        tuple(name for name, found in zip(names, sees, strict=True) if not found),
        {backend: _sum(of, backend) for backend, of in (("gloo", probes), ("nccl", with_gpus)) if of},
    )


def _offset(probe: Any) -> float:
    """Returns how far a node's clock is ahead, from the fastest of five requests."""
    tries = []
    for _ in range(5):
        before, there, after = time.time(), ray.get(probe.clock.remote(), timeout=START_SECONDS), time.time()
        tries.append((after - before, there - (before + after) / 2))
    return float(min(tries)[1])


def _sum(probes: list[Any], backend: str) -> float | str:
    try:
        address = ray.get(probes[0].free_address.remote(), timeout=START_SECONDS)
        sums = [probe.sum.remote(backend, address, rank, len(probes)) for rank, probe in enumerate(probes)]
        return float(max(ray.get(sums, timeout=2 * COLLECTIVE_SECONDS)))
    except ray.exceptions.RayError as error:
        return _last_line(error)


def _last_line(error: ray.exceptions.RayError) -> str:
    return str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
