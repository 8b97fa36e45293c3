"""Placement groups: one bundle per server and per rank, reserved within a deadline and given back."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from telescope.cluster import placement as placement_module
from telescope.cluster.placement import reserve
from telescope.config import TelescopeConfig
from telescope.config.plan import ClusterResources, NodeResources, Placement, plan_placement
from telescope.errors import DeadlineExceeded


class FakeGroup:
    """A placement group that is ready unless `never` is set."""

    def __init__(self, bundles: list[dict[str, float]], strategy: str, *, never: bool) -> None:
        self.bundle_specs = bundles
        self.strategy = strategy
        self._never = never

    async def ready(self) -> None:
        if self._never:
            await asyncio.Event().wait()


class FakePlacementGroups:
    """Stands in for Ray's placement groups. The groups at the positions in `never` are never ready."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: list[FakeGroup] = []
        self.removed: list[FakeGroup] = []
        self.never: set[int] = set()
        monkeypatch.setattr(placement_module, "placement_group", self.make)
        monkeypatch.setattr(placement_module, "remove_placement_group", self.removed.append)
        monkeypatch.setattr(placement_module, "placement_group_table", self.table)
        ray = SimpleNamespace(available_resources=lambda: {"CPU": 1.0})
        monkeypatch.setattr(placement_module, "ray", ray)

    def table(self, group: FakeGroup) -> dict[str, Any]:
        """Bundle i of the group that was made as the nth is on node "n-i"."""
        number = self.groups.index(group)
        return {"bundles_to_node_id": {i: f"{number}-{i}" for i in reversed(range(len(group.bundle_specs)))}}

    def make(self, bundles: list[dict[str, float]], *, strategy: str) -> FakeGroup:
        self.groups.append(FakeGroup(bundles, strategy, never=len(self.groups) in self.never))
        return self.groups[-1]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakePlacementGroups:
    return FakePlacementGroups(monkeypatch)


def config_of(**fields: Any) -> TelescopeConfig:
    defaults = {
        "model": "m", "environments": [{"name": "countdown"}], "inference_num_workers": 4,
        "inference_tensor_parallel_size": 2, "trainer_num_workers": 3,
        "ray_inference_cpus_per_worker": 1.5, "ray_trainer_cpus_per_worker": 2.0,
    }  # fmt: skip
    return TelescopeConfig.model_validate({**defaults, **fields})


def plan_of(config: TelescopeConfig, *, gpus: int) -> Placement:
    return plan_placement(config, ClusterResources((NodeResources("node", 64.0, gpus),)))


async def test_a_server_is_one_bundle_with_all_its_ranks_and_a_trainer_rank_is_another(fake):
    placement = await reserve(config_of(), plan_of(config_of(), gpus=8))
    inference, trainer = fake.groups
    assert (placement.server_nodes, placement.rank_nodes) == (["0-0", "0-1"], ["1-0", "1-1", "1-2"])
    assert inference.bundle_specs == [{"CPU": 3.0, "GPU": 2}] * 2
    assert trainer.bundle_specs == [{"CPU": 2.0, "GPU": 1}] * 3
    assert (placement.gpus_per_server, placement.gpus_per_rank) == (2, 1)


async def test_the_strategies_are_those_of_the_config_and_on_cpu_no_bundle_asks_for_a_gpu(fake):
    config = config_of(ray_inference_placement_strategy="SPREAD", ray_trainer_placement_strategy="STRICT_PACK")
    placement = await reserve(config, plan_of(config, gpus=0))
    assert [group.strategy for group in fake.groups] == ["STRICT_PACK", "SPREAD"], "what must be together is first"
    assert all("GPU" not in bundle for group in fake.groups for bundle in group.bundle_specs)
    assert placement.options("trainer", 0, 2.0)["num_gpus"] == 0


async def test_an_actor_goes_to_the_bundle_of_its_number(fake):
    placement = await reserve(config_of(), plan_of(config_of(), gpus=8))
    server: Any = placement.options("inference", 1, 3.0)
    rank: Any = placement.options("trainer", 2, 2.0)
    for options, group, bundle, gpus in ((server, fake.groups[0], 1, 2), (rank, fake.groups[1], 2, 1)):
        assert options["scheduling_strategy"].placement_group is group
        assert options["scheduling_strategy"].placement_group_bundle_index == bundle
        assert options["num_gpus"] == gpus
    assert (server["num_cpus"], rank["num_cpus"]) == (3.0, 2.0)


@pytest.mark.parametrize(("position", "name"), [(0, "inference"), (1, "trainer")])
async def test_a_placement_timeout_names_the_request_and_the_fields_to_lower(position, name, fake, monkeypatch):
    fake.never = {position}
    real_timeout = asyncio.timeout
    monkeypatch.setattr(placement_module.asyncio, "timeout", lambda seconds: real_timeout(seconds / 100))
    pattern = (
        rf'placement of {name} .*ray_{name}_placement_strategy "PACK".*1 CPUs, 0 GPUs.*{name}_num_workers or ray_{name}'
    )
    with pytest.raises(DeadlineExceeded, match=pattern):
        await reserve(config_of(ray_placement_timeout_s=1), plan_of(config_of(), gpus=0))
    assert {*map(id, fake.removed)} == {*map(id, fake.groups)}


async def test_a_cancelled_wait_leaves_nothing_reserved(fake):
    fake.never = {0}
    waiting = asyncio.create_task(reserve(config_of(), plan_of(config_of(), gpus=0)))
    await asyncio.sleep(0)
    assert len(fake.groups) == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert fake.removed == fake.groups


async def test_a_server_and_a_rank_that_share_a_gpu_have_one_bundle(fake):
    shared = config_of(
        inference_num_workers=2, trainer_num_workers=2, inference_tensor_parallel_size=1, share_gpus=True
    )
    placement = await reserve(shared, plan_of(shared, gpus=2))
    assert placement.server_nodes == placement.rank_nodes == ["0-0", "0-1"]
    assert [group.bundle_specs for group in fake.groups] == [[{"CPU": 3.5, "GPU": 1}] * 2]
    assert placement.options("inference", 1, 1.5)["num_gpus"] == placement.options("trainer", 1, 2.0)["num_gpus"] == 0.5
    placement.remove()
    assert fake.removed == fake.groups
