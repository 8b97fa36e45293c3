"""Driver-side proxies of all inference servers: their actors and HTTP clients.

Owns the addresses and the run's secret. `orchestrator.servers` tracks which servers are up and handles failures.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from telescope.cluster.actors import InferenceActor, answer, dump_stacks, make_actor, stop_actors
from telescope.cluster.placement import Network, Placement
from telescope.cluster.ray_cluster import Cluster
from telescope.config import TelescopeConfig
from telescope.config.machine import LOOPBACK
from telescope.errors import DeadlineExceeded
from telescope.inference.base import Address, EngineBackend, TraceTarget, backend_of
from telescope.record.gauges import ReadingBatch

ANSWER_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class ActorHandle:
    """Driver-side handle of a server's actor, for the driver's event loop."""

    actor: Any
    index: int
    node_id: str
    """Id of the server's node in Ray."""

    async def status(self) -> Any:
        """Returns the process's `ServerStatus`. Raises InfrastructureError when the actor itself has exited."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_SECONDS):
                return await answer(self.actor.status.remote(), f"status of server {self.index}")
        except TimeoutError:
            nodes: list[dict[str, Any]] = []
            with suppress(TimeoutError):  # the head may be lost, too
                nodes = await asyncio.wait_for(asyncio.to_thread(ray.nodes), ANSWER_TIMEOUT_SECONDS)
            lost = {node["NodeID"]: node["NodeManagerHostname"] for node in nodes if not node["Alive"]}
            why = f": its node {lost[self.node_id]} is lost" if self.node_id in lost else ""
            raise DeadlineExceeded(
                f"the actor of inference server {self.index} did not answer within {ANSWER_TIMEOUT_SECONDS:g} s{why}"
            ) from None


class InferenceGroup:
    """The servers of a run, numbered from 0. Server i listens on `inference_base_port` + i."""

    def __init__(
        self,
        config: TelescopeConfig,
        placement: Placement,
        run_dir: Path,
        cluster: Cluster,
        network: Network,
        secret: str,
        *,
        traces: TraceTarget | None = None,
    ) -> None:
        self._config = config
        self._secret = secret
        self._clients: dict[int, EngineBackend] = {}
        cpus = config.ray_inference_cpus_per_worker * config.inference_tensor_parallel_size
        host = bind_host(config, network)
        self._nodes = [cluster.node_names[node] for node in placement.server_nodes]
        self._actors = [
            make_actor(InferenceActor, placement.options("inference", index, cpus)).remote(
                config.to_json(),
                Address(index, host, config.inference_base_port + index, secret, traces),
                str(run_dir),
                network.broadcast_on_loopback,
            )
            for index in range(config.num_inference_servers)
        ]
        placed = zip(self._actors, placement.server_nodes, strict=True)
        self.handles = [ActorHandle(actor, index, node) for index, (actor, node) in enumerate(placed)]

    async def start(self, index: int) -> Any:
        """Starts server `index`, waits until it responds, and creates its client. Returns its `ServerInfo`."""
        timeout = self._config.inference_start_timeout_seconds
        try:
            async with asyncio.timeout(timeout + 60):
                info = await answer(self._actors[index].start.remote(), f"start of inference server {index}")
        except TimeoutError:
            raise DeadlineExceeded(
                f"inference server {index} did not start within inference_start_timeout_seconds = {timeout:g} s; "
                "its log is in the run directory"
            ) from None
        self._clients[index] = backend_of(self._config).connect(self._config, info.url, self._secret, index)
        return info

    @property
    def clients(self) -> list[EngineBackend]:
        """Returns the clients of the started servers."""
        return [client for _, client in sorted(self._clients.items())]

    @property
    def addresses(self) -> list[tuple[str, str]]:
        """Returns address and secret of every started server, for clients in other processes."""
        return [(client.base_url, self._secret) for client in self.clients]

    async def take_readings(self, index: int) -> ReadingBatch:
        """Returns a server's metrics since the last call."""
        call = self._actors[index].take_readings.remote()
        batch: ReadingBatch = await answer(call, f"gauges of inference server {index}")
        return replace(batch, node=self._nodes[index])

    async def dump_stacks(self) -> dict[str, str]:
        """Returns the stacks of each server's actor, or why there are none. The engine's stacks are in its log."""
        return await dump_stacks("inference server", self._actors)

    async def stop(self) -> None:
        """Aborts requests in flight and stops every engine process. The engine also ends with its actor."""
        for client in self.clients:
            await client.close()
        await stop_actors("inference server", self._actors)


def bind_host(config: TelescopeConfig, network: Network) -> str:
    """Returns the host on which servers listen.

    It is loopback if all servers are on the driver's node and the user has not set `inference_host`.
    """
    if network.servers_on_loopback and "inference_host" not in config.user_set:
        return LOOPBACK
    return config.inference_host
