"""Reserves the placement groups of servers and trainer ranks before their start.

`telescope.config.plan` refuses a placement that the cluster can never fit. This module waits, with a deadline, for
resources that others use.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from telescope.cluster.ray_cluster import daemon_failure
from telescope.config import TelescopeConfig
from telescope.config.plan import Placement as Plan
from telescope.config.plan import Role
from telescope.errors import DeadlineExceeded


@dataclass
class Placement:
    """The reserved bundles: one per inference server, one per trainer rank."""

    inference: PlacementGroup
    trainer: PlacementGroup
    gpus_per_server: float
    gpus_per_rank: float
    server_nodes: list[str] = field(default_factory=list)
    """The node of each server, by its id in Ray."""
    rank_nodes: list[str] = field(default_factory=list)

    def server_options(self, index: int, cpus: float) -> dict[str, object]:
        """Options of the actor of server `index`."""
        return _options(self.inference, index, cpus, self.gpus_per_server)

    def rank_options(self, rank: int, cpus: float) -> dict[str, object]:
        """Options of the actor of trainer rank `rank`."""
        return _options(self.trainer, rank, cpus, self.gpus_per_rank)

    def remove(self) -> None:
        """Gives the bundles back; Ray ends the actors in them. Without Ray's daemons there is nothing to do."""
        if daemon_failure() is not None:
            return
        remove_placement_group(self.inference)
        if self.trainer is not self.inference:
            remove_placement_group(self.trainer)


def _options(group: PlacementGroup, bundle: int, cpus: float, gpus: float) -> dict[str, object]:
    return {
        "num_cpus": cpus,
        "num_gpus": gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle
        ),
    }


async def reserve(config: TelescopeConfig, plan: Plan) -> Placement:
    """Reserves both groups, each within `ray_placement_timeout_s`, in the order of `plan`.

    Raises DeadlineExceeded with the requested and the free resources.
    """
    on_gpu = plan.device == "cuda"
    tensor_parallel = config.inference_tensor_parallel_size
    server = _bundle(config.ray_inference_cpus_per_worker * tensor_parallel, tensor_parallel if on_gpu else 0)
    rank = _bundle(config.ray_trainer_cpus_per_worker, 1 if on_gpu else 0)
    if on_gpu and config.share_gpus:
        pair = {"CPU": server["CPU"] + rank["CPU"], "GPU": 1}
        group = await _reserve_one(
            config, "inference", [pair] * config.trainer_num_workers, config.ray_inference_placement_strategy
        )
        nodes = _nodes_of(group)
        # One bundle with a GPU for each pair of a server and a rank; each of the two gets half of that GPU.
        return Placement(group, group, 0.5, 0.5, nodes, nodes)
    asked: dict[Role, tuple[list[dict[str, float]], str]] = {
        "inference": ([server] * config.num_inference_servers, config.ray_inference_placement_strategy),
        "trainer": ([rank] * config.trainer_num_workers, config.ray_trainer_placement_strategy),
    }
    groups: dict[Role, PlacementGroup] = {}
    try:
        for role in plan.order:
            groups[role] = await _reserve_one(config, role, *asked[role])
    except BaseException:
        for group in groups.values():
            remove_placement_group(group)
        raise
    return Placement(
        groups["inference"],
        groups["trainer"],
        server.get("GPU", 0),
        rank.get("GPU", 0),
        _nodes_of(groups["inference"]),
        _nodes_of(groups["trainer"]),
    )


async def _reserve_one(
    config: TelescopeConfig, role: Role, bundles: list[dict[str, float]], strategy: str
) -> PlacementGroup:
    """Reserves one group; returns when Ray has placed all of it."""
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
        remove_placement_group(group)  # Ctrl-C while it waits: keep nothing reserved in a shared cluster
        raise
    return group


def _nodes_of(group: PlacementGroup) -> list[str]:
    """The node of each bundle, by its id."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [nodes[index] for index in range(len(group.bundle_specs))]


def _bundle(cpus: float, gpus: int) -> dict[str, float]:
    bundle: dict[str, float] = {"CPU": cpus}
    if gpus:
        bundle["GPU"] = gpus
    return bundle
