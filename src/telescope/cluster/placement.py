"""Reserves placement groups for servers and ranks, and chooses their addresses.

`telescope.config.plan` refuses a placement that the cluster can never fit. This module waits, with a deadline, for
resources that others use. Processes that are all on one node connect over loopback, other processes over the address by
which Ray knows the node. NCCL and gloo variables that the user has set are kept.
"""

import asyncio
import ipaddress
import os
from collections.abc import MutableMapping
from dataclasses import dataclass, field

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from telescope.cluster.ray_cluster import daemon_failure, own_address
from telescope.config import TelescopeConfig
from telescope.config.machine import LOOPBACK
from telescope.config.plan import Placement as Plan
from telescope.config.plan import Role
from telescope.errors import DeadlineExceeded
from telescope.inference.server import advertised_host


@dataclass
class Placement:
    """The reserved bundles: one per inference server, one per trainer rank."""

    inference: PlacementGroup
    trainer: PlacementGroup
    gpus_per_server: float
    gpus_per_rank: float
    server_nodes: list[str] = field(default_factory=list)
    """Ray's id of each server's node."""
    rank_nodes: list[str] = field(default_factory=list)

    def options(self, role: Role, index: int, cpus: float) -> dict[str, object]:
        """Returns the options of the actor of a server or of a trainer rank."""
        is_server = role == "inference"
        group = self.inference if is_server else self.trainer
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        gpus = self.gpus_per_server if is_server else self.gpus_per_rank
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}

    def find_ranks(self) -> None:
        """Updates `rank_nodes` after Ray has moved the ranks of a lost node."""
        self.rank_nodes = _nodes_of(self.trainer)

    def remove(self) -> None:
        """Releases the bundles, which ends the actors in them. Does nothing if a Ray daemon has exited."""
        if daemon_failure() is not None:
            return
        remove_placement_group(self.inference)
        if self.trainer is not self.inference:
            remove_placement_group(self.trainer)


async def reserve(config: TelescopeConfig, plan: Plan) -> Placement:
    """Reserves the plan's placement groups, in the plan's order.

    Raises DeadlineExceeded with the requested and the free resources after `ray_placement_timeout_s`.
    """
    bundles: dict[Role, list[dict[str, float]]] = {"inference": [], "trainer": []}
    for bundle in (placed.bundle for placed in plan.bundles):
        bundles[bundle.role].append({"CPU": bundle.cpus} | ({"GPU": bundle.gpus} if bundle.gpus else {}))
    if plan.device == "cuda" and config.share_gpus:
        pairs = zip(bundles["inference"], bundles["trainer"], strict=True)
        joint = [{"CPU": server["CPU"] + rank["CPU"], "GPU": server["GPU"]} for server, rank in pairs]
        group = await _reserve_one(config, "inference", joint)
        nodes = _nodes_of(group)
        # One bundle with one GPU for each pair of a server and a rank. Each of the two gets half of the GPU.
        return Placement(group, group, 0.5, 0.5, nodes, nodes)
    groups: dict[Role, PlacementGroup] = {}
    try:
        for role in plan.order:
            groups[role] = await _reserve_one(config, role, bundles[role])
    except BaseException:
        for group in groups.values():
            remove_placement_group(group)
        raise
    trainer = groups.get("trainer")  # None if there are only servers
    return Placement(
        groups["inference"],
        trainer or groups["inference"],
        bundles["inference"][0].get("GPU", 0),
        bundles["trainer"][0].get("GPU", 0) if trainer else 0,
        _nodes_of(groups["inference"]),
        _nodes_of(trainer) if trainer else [],
    )


async def _reserve_one(config: TelescopeConfig, role: Role, bundles: list[dict[str, float]]) -> PlacementGroup:
    """Reserves one group. Returns when Ray has placed all of it."""
    is_server = role == "inference"
    strategy = config.ray_inference_placement_strategy if is_server else config.ray_trainer_placement_strategy
    group = placement_group(bundles, strategy=strategy)
    try:
        async with asyncio.timeout(config.ray_placement_timeout_s):
            await group.ready()
    except TimeoutError:
        free = ray.available_resources()
        remove_placement_group(group)
        raise DeadlineExceeded(
            f"placement of {role} workers: not reserved within ray_placement_timeout_s = "
            f"{config.ray_placement_timeout_s} s; asked for {len(bundles)} x {bundles[0]} by "
            f'ray_{role}_placement_strategy "{strategy}", free in the cluster: '
            f"{free.get('CPU', 0):g} CPUs, {free.get('GPU', 0):g} GPUs. Another run may use them: stop it, or lower "
            f"{role}_num_workers or ray_{role}_cpus_per_worker."
        ) from None
    except BaseException:
        remove_placement_group(group)  # Ctrl-C while waiting: nothing may stay reserved in a shared cluster
        raise
    return group


def _nodes_of(group: PlacementGroup) -> list[str]:
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [nodes[index] for index in range(len(group.bundle_specs))]


INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""By default NCCL uses the first interface that is not loopback, and gloo the one to which the host's name resolves,
which is 127.0.1.1 on many systems."""


@dataclass(frozen=True)
class Network:
    """Which processes of a run connect over loopback."""

    servers_on_loopback: bool
    """The driver and all servers are on one node."""
    broadcast_on_loopback: bool
    """All ranks and all servers are on one node, and `ray_broadcast_prefer_loopback_if_single_node` is on."""


def network_of(config: TelescopeConfig, placement: Placement, driver_node: str) -> Network:
    """Returns the network for a placement. `driver_node` is Ray's id of the driver's node."""
    nodes = {*placement.server_nodes, *placement.rank_nodes}
    return Network(
        servers_on_loopback={driver_node, *placement.server_nodes} == {driver_node},
        broadcast_on_loopback=len(nodes) == 1 and config.ray_broadcast_prefer_loopback_if_single_node,
    )


def own_host(*, loopback: bool) -> str:
    """Returns this machine's host for the run's other processes.

    A cluster started for one run knows its node only by loopback. Then it is the address of the default route.
    """
    if loopback:
        return LOOPBACK
    address = own_address()
    return advertised_host("") if address == LOOPBACK else address


def use_interface_of(address: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes NCCL and gloo use the interface with `address`. Call it before they or child processes start.

    Keeps variables that the user or the node has set.
    """
    if interface := interface_of(address):
        for variable in INTERFACE_VARIABLES:
            environment.setdefault(variable, interface)


def interface_of(address: str) -> str | None:
    """Returns this machine's interface with an address, None if there is none. Loopback has all of 127.0.0.0/8."""
    wanted = LOOPBACK if ipaddress.ip_address(address).is_loopback else address
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces if any(entry.address == wanted for entry in entries)), None)
