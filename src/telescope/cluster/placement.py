"""Placement groups: where inference and trainer workers go, reserved before any of them starts.

A placement that the cluster can never fit is refused by `telescope.config.plan` before Ray is asked; what is left here
is waiting, with a deadline, for resources that somebody else holds.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from telescope.config import TelescopeConfig
from telescope.errors import DeadlineExceeded


@dataclass
class Placement:
    """The reserved bundles: one per inference server, one per trainer rank."""

    inference: PlacementGroup
    trainer: PlacementGroup
    gpus_per_server: float
    gpus_per_rank: float

    def server_options(self, index: int, cpus: float) -> dict[str, object]:
        """Options of the actor of server `index`."""
        return _options(self.inference, index, cpus, self.gpus_per_server)

    def rank_options(self, rank: int, cpus: float) -> dict[str, object]:
        """Options of the actor of trainer rank `rank`."""
        return _options(self.trainer, rank, cpus, self.gpus_per_rank)

    def remove(self) -> None:
        """Give the bundles back; actors still in them are ended by Ray."""
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


async def reserve(config: TelescopeConfig, *, on_gpu: bool) -> Placement:
    """Reserve both groups within `ray_placement_timeout_s`.

    Raises DeadlineExceeded that says what was asked for and what the cluster has free.
    """
    tensor_parallel = config.inference_tensor_parallel_size
    num_servers = config.inference_num_workers // tensor_parallel
    gpus_per_server = tensor_parallel if on_gpu else 0
    gpus_per_rank = 1 if on_gpu else 0
    inference_cpus = config.ray_inference_cpus_per_worker * tensor_parallel
    if on_gpu and config.share_gpus:
        return await _reserve_shared(config, inference_cpus + config.ray_trainer_cpus_per_worker)
    inference = placement_group(
        [_bundle(inference_cpus, gpus_per_server)] * num_servers, strategy=config.ray_inference_placement_strategy
    )
    trainer = placement_group(
        [_bundle(config.ray_trainer_cpus_per_worker, gpus_per_rank)] * config.trainer_num_workers,
        strategy=config.ray_trainer_placement_strategy,
    )
    return await _ready(config, Placement(inference, trainer, gpus_per_server, gpus_per_rank))


async def _reserve_shared(config: TelescopeConfig, cpus: float) -> Placement:
    """One bundle with a GPU for each pair of a server and a rank; each of the two is given half of that GPU."""
    pairs = placement_group(
        [_bundle(cpus, 1)] * config.trainer_num_workers, strategy=config.ray_inference_placement_strategy
    )
    return await _ready(config, Placement(pairs, pairs, 0.5, 0.5))


async def _ready(config: TelescopeConfig, placement: Placement) -> Placement:
    for name, group in (("inference", placement.inference), ("trainer", placement.trainer)):
        try:
            async with asyncio.timeout(config.ray_placement_timeout_s):
                await group.ready()
        except TimeoutError:
            free = ray.available_resources()
            placement.remove()
            raise DeadlineExceeded(
                f"placement of {name} workers: not reserved within ray_placement_timeout_s = "
                f"{config.ray_placement_timeout_s} s; asked for {group.bundle_specs}, free in the cluster: "
                f"{free.get('CPU', 0):g} CPUs, {free.get('GPU', 0):g} GPUs. Another run may hold them, or lower "
                f"{name}_num_workers or ray_{name}_cpus_per_worker."
            ) from None
        except BaseException:
            placement.remove()  # Ctrl-C while it waits: a cluster of others keeps nothing of ours
            raise
    return placement


def _bundle(cpus: float, gpus: int) -> dict[str, float]:
    bundle: dict[str, float] = {"CPU": cpus}
    if gpus:
        bundle["GPU"] = gpus
    return bundle
