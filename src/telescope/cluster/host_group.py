"""The machines of the cluster that the driver does not run on: an actor on each, which reads its gauges.

Such an actor takes no share of its machine. One that does not come up, or dies, costs the gauges of that machine.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from telescope.cluster.actors import HostActor, answer, make_actor
from telescope.cluster.ray_cluster import Cluster
from telescope.config import TelescopeConfig
from telescope.record.gauges import Taken


class HostGroup:
    """The actors, by the names of their machines. Making it waits for none of them. `here` is the driver's."""

    def __init__(self, config: TelescopeConfig, cluster: Cluster) -> None:
        seconds = config.system_metrics_collection_interval_seconds
        self.here = cluster.node_names[cluster.driver_node]
        self._actors: dict[str, Any] = {}
        for node, name in cluster.node_names.items():
            if node != cluster.driver_node:
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                actor = make_actor(HostActor, {"num_cpus": 0, "scheduling_strategy": there})
                self._actors[name] = actor.remote(seconds)

    @property
    def names(self) -> list[str]:
        return list(self._actors)

    async def take_readings(self, name: str) -> Taken:
        """What was read of a machine since the last call."""
        taken: Taken = await answer(self._actors[name].take_readings.remote(), f"gauges of machine {name}")
        return replace(taken, node=name)

    async def stop(self) -> None:
        """End the actors."""
        for actor in self._actors.values():
            await asyncio.to_thread(ray.kill, actor)
