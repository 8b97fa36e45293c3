"""Where Ray puts the workers of a run on two nodes, and what they see there."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import ray
from ray import cloudpickle
from tests.integration.cluster.conftest import HEAD, OTHER, TwoNodes, config_of

from telescope.cluster.actors import make_actor
from telescope.cluster.network import network_of
from telescope.cluster.placement import Placement, reserve
from telescope.config import TelescopeConfig
from telescope.config.plan import PlacementError, plan_placement
from telescope.errors import DeadlineExceeded

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not have the tests on their path

ROLES = ("inference", "trainer")


class Witness:
    """Stands where an inference server or a trainer rank would, and says what it sees."""

    def look(self) -> dict[str, Any]:
        context = ray.get_runtime_context()
        return {
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","),
            "node": context.get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "namespace": context.namespace,
            "executable": sys.executable,
            "environment": dict(os.environ),
        }

    def say(self, words: str) -> None:
        print(words, flush=True)


@asynccontextmanager
async def place(config: TelescopeConfig, two_nodes: TwoNodes) -> AsyncIterator[Placement]:
    """The reserved places; afterwards all that the cluster has is free again."""
    placement = await reserve(config, plan_placement(config, two_nodes.cluster.resources))
    try:
        yield placement
    finally:
        placement.remove()
        await all_is_free(two_nodes)


async def all_is_free(two_nodes: TwoNodes) -> None:
    """Ray takes bundles back in its own time."""
    deadline = time.monotonic() + 30
    while (free := ray.available_resources().get("GPU")) != two_nodes.cluster.resources.gpus:
        assert time.monotonic() < deadline, f"only {free} GPUs are free"
        await asyncio.sleep(0.02)


def look_around(config: TelescopeConfig, placement: Placement) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the servers and the ranks see that are started in these places as the groups start theirs."""
    cpus = config.ray_inference_cpus_per_worker * config.inference_tensor_parallel_size
    servers = [
        make_actor(Witness, placement.server_options(index, cpus)).remote()
        for index in range(config.num_inference_servers)
    ]
    ranks = [
        make_actor(Witness, placement.rank_options(rank, config.ray_trainer_cpus_per_worker)).remote()
        for rank in range(config.trainer_num_workers)
    ]
    seen = ray.get([actor.look.remote() for actor in (*servers, *ranks)], timeout=120)
    return seen[: len(servers)], seen[len(servers) :]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("strategy", "workers", "on_each_node"),
    [("PACK", 4, [4]), ("STRICT_PACK", 4, [4]), ("SPREAD", 2, [1, 1]), ("STRICT_SPREAD", 2, [1, 1])],
)
async def test_each_strategy_puts_the_workers_where_it_says(
    two_nodes: TwoNodes, role: str, strategy: str, workers: int, on_each_node: list[int]
) -> None:
    (opposite,) = {*ROLES} - {role}
    config = config_of(
        **{f"{role}_num_workers": workers, f"ray_{role}_placement_strategy": strategy, f"{opposite}_num_workers": 2}
    )
    async with place(config, two_nodes) as placement:
        nodes = {"inference": placement.server_nodes, "trainer": placement.rank_nodes}[role]
        assert sorted(Counter(nodes).values()) == on_each_node


async def test_what_must_be_on_one_node_is_reserved_first_whichever_side_it_is(two_nodes: TwoNodes) -> None:
    """Four that are spread would leave no node whole for four that must be together."""
    for role in ROLES:
        (opposite,) = {*ROLES} - {role}
        config = config_of(
            ray_placement_timeout_s=5,
            **{
                f"{role}_num_workers": 4, f"ray_{role}_placement_strategy": "STRICT_PACK",
                f"{opposite}_num_workers": 4, f"ray_{opposite}_placement_strategy": "SPREAD",
            },
        )  # fmt: skip
        async with place(config, two_nodes) as placement:
            together = {"inference": placement.server_nodes, "trainer": placement.rank_nodes}[role]
            assert len(set(together)) == 1


async def test_no_two_workers_see_one_gpu_and_a_tensor_parallel_server_has_its_own_on_one_node(
    two_nodes: TwoNodes,
) -> None:
    config = config_of(
        inference_num_workers=4, inference_tensor_parallel_size=2, trainer_num_workers=2,
        ray_inference_placement_strategy="SPREAD", ray_trainer_placement_strategy="SPREAD",
    )  # fmt: skip
    async with place(config, two_nodes) as placement:
        servers, ranks = look_around(config, placement)
    assert [len(server["gpus"]) for server in servers] == [2, 2]
    assert [len(rank["gpus"]) for rank in ranks] == [1, 1]
    seen = [(worker["node"], gpu) for worker in (*servers, *ranks) for gpu in worker["gpus"]]
    assert len(seen) == len(set(seen)) == 6
    assert [server["node"] for server in servers] == placement.server_nodes
    assert [rank["node"] for rank in ranks] == placement.rank_nodes
    assert {worker["address"] for worker in servers} == {worker["address"] for worker in ranks} == {HEAD, OTHER}
    network = network_of(config, placement, two_nodes.cluster.driver_node)
    assert not network.servers_on_loopback
    assert not network.broadcast_on_loopback


async def test_with_share_gpus_rank_and_server_of_one_number_see_one_gpu_that_no_others_see(
    two_nodes: TwoNodes,
) -> None:
    config = config_of(
        inference_num_workers=2, trainer_num_workers=2, share_gpus=True, ray_inference_placement_strategy="PACK"
    )
    async with place(config, two_nodes) as placement:
        servers, ranks = look_around(config, placement)
    pairs = [(server["node"], *server["gpus"]) for server in servers]
    assert pairs == [(rank["node"], *rank["gpus"]) for rank in ranks]
    assert len(set(pairs)) == 2
    assert {len(pair) for pair in pairs} == {2}, "a node and a single GPU"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"ray_trainer_placement_strategy": "STRICT_SPREAD", "trainer_num_workers": 3},
            ['ray_trainer_placement_strategy is "STRICT_SPREAD"', "all 3 trainer bundles", "2 nodes", '"SPREAD"'],
        ),
        (
            {"ray_inference_placement_strategy": "STRICT_PACK", "inference_num_workers": 5},
            ['ray_inference_placement_strategy is "STRICT_PACK"', "2 nodes of 4 cores and 4 GPUs", '"PACK"'],
        ),
        ({"inference_num_workers": 8}, ["inference_num_workers is 8", "needs 10 GPUs", "cluster has 8", "to 6"]),
        ({"ray_trainer_cpus_per_worker": 4.5}, ["ray_trainer_cpus_per_worker", "needs 9.2 CPU cores", "has 8"]),
        (
            {"inference_num_workers": 6, "inference_tensor_parallel_size": 6},
            ["inference_tensor_parallel_size is 6", "largest node has 4 GPUs", "Lower"],
        ),
    ],
)
async def test_what_the_cluster_can_never_hold_is_refused_before_ray_is_asked(
    two_nodes: TwoNodes, fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(PlacementError) as refused:
        async with place(config_of(**fields), two_nodes):
            pass
    assert [word for word in words if word not in str(refused.value)] == []


async def test_gpus_that_another_run_holds_are_waited_for_until_the_deadline_and_nothing_stays_reserved(
    two_nodes: TwoNodes,
) -> None:
    second = config_of(inference_num_workers=2, trainer_num_workers=2, ray_placement_timeout_s=1)
    async with place(config_of(inference_num_workers=3, trainer_num_workers=3), two_nodes):
        with pytest.raises(DeadlineExceeded, match=r"trainer workers.* ray_placement_timeout_s = 1 s.* 0 GPUs"):
            async with place(second, two_nodes):
                pass


def test_a_cluster_that_runs_is_joined_by_its_address(two_nodes: TwoNodes) -> None:
    assert not two_nodes.cluster.started_here
    assert {(node.name, node.gpus) for node in two_nodes.cluster.resources.nodes} == {(HEAD, 4), (OTHER, 4)}


def test_workers_have_the_runs_interpreter_directory_variables_and_namespace(
    two_nodes: TwoNodes, capfd: pytest.CaptureFixture[str]
) -> None:
    actor = make_actor(Witness, {"num_cpus": 0.1}).remote()
    seen = ray.get(actor.look.remote(), timeout=120)
    variables = seen["environment"]
    assert seen["namespace"] == "of-the-test"
    assert seen["executable"] == sys.executable
    assert variables["VIRTUAL_ENV"] == sys.prefix
    assert variables["PATH"].startswith(f"{sys.prefix}/bin:")
    assert variables["TELESCOPE_RUN_DIR"] == str(two_nodes.run_dir)
    assert variables["NCCL_DEBUG"] == "WARN"
    assert variables["NCCL_DEBUG_FILE"] == "/from/the/field", "the field wins over the driver's environment"
    assert variables["NCCL_IB_HCA"] == "set by the user", "though the nodes were started without it"
    ray.get(actor.say.remote("words of a worker"), timeout=60)
    wait_for_words(capfd, "words of a worker")
    ray.kill(actor)


def wait_for_words(capfd: pytest.CaptureFixture[str], words: str) -> None:
    """Ray carries what workers print to the driver (`ray_log_to_driver`), in its own time."""
    deadline, printed = time.monotonic() + 30, ""
    while words not in printed:
        assert time.monotonic() < deadline, f"{words!r} did not reach the driver, only: {printed}"
        time.sleep(0.1)
        captured = capfd.readouterr()
        printed += captured.out + captured.err
