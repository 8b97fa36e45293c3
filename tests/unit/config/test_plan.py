"""Placement of workers: bundles never exceed a node, and errors name the field to lower."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope.config import TelescopeConfig
from telescope.config.plan import (
    ClusterResources,
    NodeResources,
    Placement,
    PlacementError,
    assumed_cluster,
    fitting_values,
    gpus_needed,
    plan_placement,
)

STRATEGIES = ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


def config(**values: object) -> TelescopeConfig:
    return TelescopeConfig(**{"environments": [{"name": "a"}], **values})


def cluster(*nodes: tuple[float, int]) -> ClusterResources:
    return ClusterResources(tuple(NodeResources(f"node{i}", cpus, gpus) for i, (cpus, gpus) in enumerate(nodes)))


def nodes_of(placement, role: str) -> list[str]:
    return [placed.node.name for placed in placement.bundles if placed.bundle.role == role]


def plan_or_refusal(config: TelescopeConfig, resources: ClusterResources) -> tuple[Placement | None, str]:
    try:
        return plan_placement(config, resources), ""
    except PlacementError as error:
        return None, str(error)


configs = st.builds(
    lambda servers, size, **values: config(
        inference_num_workers=servers * size, inference_tensor_parallel_size=size, **values
    ),
    servers=st.integers(1, 4),
    size=st.sampled_from([1, 2, 4]),
    trainer_num_workers=st.integers(1, 6),
    ray_inference_cpus_per_worker=st.sampled_from([0.1, 0.5, 1.0, 4.0]),
    ray_trainer_cpus_per_worker=st.sampled_from([0.2, 1.0, 3.0]),
    rollout_cpus_per_worker=st.sampled_from([0.0, 0.0, 1.5]),
    ray_inference_placement_strategy=st.sampled_from(STRATEGIES),
    ray_trainer_placement_strategy=st.sampled_from(STRATEGIES),
    device=st.sampled_from(["auto", "cpu", "cuda"]),
)
clusters = st.lists(
    st.tuples(st.sampled_from([2.0, 16.0, 64.0]), st.sampled_from([0, 1, 4, 8])), min_size=1, max_size=4
)


@settings(deadline=None)
@given(configs, clusters)
def test_a_plan_respects_every_node_and_strategy_or_names_a_field(config, nodes):
    resources = cluster(*nodes)
    placement, refusal = plan_or_refusal(config, resources)
    if placement is None:
        assert any(field in refusal for field in TelescopeConfig.model_fields)
        assert "ower" in refusal or "set device" in refusal.lower()
        return
    assert len(placement.bundles) == config.num_inference_servers + config.trainer_num_workers
    for node in resources.nodes:
        here = [placed for placed in placement.bundles if placed.node == node]
        assert sum(placed.bundle.cpus for placed in here) <= node.cpus + 1e-6
        gpus = [index for placed in here for index in placed.gpu_indices]
        assert len(gpus) == len(set(gpus))
        assert all(0 <= index < node.gpus for index in gpus)
    for placed in placement.bundles:
        expected = 0 if placement.device == "cpu" else placed.bundle.gpus
        assert len(placed.gpu_indices) == expected
    for role, strategy in (
        ("inference", config.ray_inference_placement_strategy),
        ("trainer", config.ray_trainer_placement_strategy),
    ):
        count = Counter(nodes_of(placement, role))
        if strategy == "STRICT_PACK":
            assert len(count) == 1
        if strategy == "STRICT_SPREAD":
            assert set(count.values()) == {1}


@settings(deadline=None)
@given(configs)
def test_a_run_fits_its_assumed_cluster(config):
    assert plan_placement(config, assumed_cluster(config)).bundles


def test_the_default_run_fits_one_node_of_four_gpus():
    placement = plan_placement(config(), cluster((16, 4)))
    assert placement.device == "cuda"
    assert len(placement.nodes) == 1
    assert [placed.gpu_indices for placed in placement.bundles] == [(0,), (1,), (2,), (3,)]


def test_pack_keeps_each_side_on_one_node_and_spread_uses_every_node():
    nodes = cluster((64, 8), (64, 8))
    packed = plan_placement(config(inference_num_workers=8, trainer_num_workers=8), nodes)
    assert len(set(nodes_of(packed, "trainer"))) == len(set(nodes_of(packed, "inference"))) == 1
    spread = plan_placement(config(ray_trainer_placement_strategy="SPREAD", trainer_num_workers=4), nodes)
    assert Counter(nodes_of(spread, "trainer")) == {"node0": 2, "node1": 2}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_assumed_cluster_has_as_few_nodes_as_its_strategy_allows(strategy):
    values = {"ray_trainer_placement_strategy": strategy, "trainer_num_workers": 30, "inference_num_workers": 2}
    nodes = assumed_cluster(config(**values)).nodes
    assert len(nodes) == {"PACK": 4, "SPREAD": 4, "STRICT_PACK": 2, "STRICT_SPREAD": 30}[strategy]


def test_without_gpus_auto_runs_on_the_cpu():
    run = config(ray_inference_cpus_per_worker=0.5, ray_trainer_cpus_per_worker=0.5)
    placement = plan_placement(run, cluster((2, 0)))
    assert placement.device == "cpu"
    assert all(placed.gpu_indices == () for placed in placement.bundles)


def test_fractions_of_cores_may_fill_a_node_exactly():
    shares = {"ray_inference_cpus_per_worker": 0.2, "ray_trainer_cpus_per_worker": 0.2}
    assert plan_placement(config(trainer_num_workers=3, **shares), cluster((1, 0)))


SHARES = "ray_inference_cpus_per_worker and ray_trainer_cpus_per_worker to 0.5"
CORES = {"ray_trainer_cpus_per_worker": 12, "device": "cpu", "ray_inference_cpus_per_worker": 1}


@pytest.mark.parametrize(("values", "nodes", "words"), [
    ({"inference_num_workers": 64}, [(64, 8)], ["inference_num_workers is 64", "66 GPUs", "has 8", "to 6"]),
    ({}, [(16, 1)], ["4 GPUs", "need 2 GPUs", 'Set device to "cpu"']),
    ({}, [(2, 0)], ["No GPU was found", "16 CPU cores", "has 2", "machine with GPUs", SHARES]),
    ({"device": "cuda"}, [(64, 0)], ['device is "cuda"', "no GPU was found", '"cpu"']),
    ({"inference_tensor_parallel_size": 8, "inference_num_workers": 8, "trainer_num_workers": 1}, [(64, 4), (64, 4),
     (64, 4)], ["of 8 GPUs", "nodes of 64 cores and 4 GPUs", "lower inference_tensor_parallel_size, which is 8"]),
    (CORES, [(8, 0), (8, 0), (16, 0)], ["The nodes do not hold 2 ",
     "lower inference_num_workers or trainer_num_workers"]),
    (CORES, [(8, 0), (8, 0), (8, 0), (8, 0)], ["12 cores on one node",
     "lower ray_trainer_cpus_per_worker"]),
    ({"ray_inference_placement_strategy": "STRICT_SPREAD"}, [(64, 8)], ["STRICT_SPREAD",
     "lower inference_num_workers", 'to "SPREAD"']),
    ({"ray_trainer_placement_strategy": "STRICT_PACK", "trainer_num_workers": 6}, [(64, 4), (64, 4)],
     ["STRICT_PACK", "or trainer_num_workers", 'to "PACK"']),
])  # fmt: skip
def test_a_run_that_does_not_fit_names_the_field_to_lower(values, nodes, words):
    with pytest.raises(PlacementError) as raised:
        plan_placement(config(**values), cluster(*nodes))
    for word in words:
        assert word in str(raised.value)


def test_a_share_of_cores_is_suggested_only_if_it_fits():
    values = {"inference_num_workers": 1, "trainer_num_workers": 2}
    assert "to 0.5" in plan_or_refusal(config(**values), cluster((2, 0)))[1]
    shares = {"ray_inference_cpus_per_worker": 0.5, "ray_trainer_cpus_per_worker": 0.5}
    assert plan_placement(config(**values, **shares), cluster((2, 0)))
    refusal = plan_or_refusal(config(trainer_num_workers=1000), cluster((2, 0)))[1]
    assert refusal.endswith("lower inference_num_workers or trainer_num_workers")
    assert "per_worker to" not in refusal


def test_with_share_gpus_each_rank_is_on_the_gpu_of_its_server():
    shared = config(inference_num_workers=2, trainer_num_workers=2, share_gpus=True)
    plan = plan_placement(shared, cluster((16, 1), (16, 1)))
    places = {(p.bundle.role, p.bundle.index): (p.node.name, p.gpu_indices) for p in plan.bundles}
    assert places["inference", 0] == places["trainer", 0]
    assert places["inference", 1] == places["trainer", 1]
    assert len(set(places.values())) == 2
    assert gpus_needed(shared) == 2
    assert assumed_cluster(shared).gpus == 2


def test_every_node_of_an_assumed_cluster_has_the_gpus_that_are_assumed():
    many = config(device="cuda", trainer_num_workers=20, inference_num_workers=2)
    nodes = assumed_cluster(many, gpu_memory_bytes=80 << 30).nodes
    assert len(nodes) == 3
    assert {node.gpu_memory_bytes for node in nodes} == {80 << 30}
    assert {node.gpu_memory_bytes for node in assumed_cluster(many).nodes} == {None}


def test_a_run_fits_a_single_gpu_only_if_it_is_shared():
    one = {"inference_num_workers": 1, "trainer_num_workers": 1}
    plan, refusal = plan_or_refusal(config(**one), cluster((16, 1)))
    assert plan is None
    assert "share_gpus: true" in refusal
    plan = plan_placement(config(**one, share_gpus=True), cluster((16, 1)))
    assert [placed.gpu_indices for placed in plan.bundles] == [(0,), (0,)]


def test_servers_alone_need_no_space_for_a_trainer():
    node = ClusterResources((NodeResources("a", 16, 2),))
    wanted = config(inference_num_workers=2, trainer_num_workers=2)
    with pytest.raises(PlacementError, match="trainer_num_workers"):
        plan_placement(wanted, node)
    placement = plan_placement(wanted, node, with_trainer=False)
    assert {placed.bundle.role for placed in placement.bundles} == {"inference"}
    assert placement.order == ("inference",)
    with pytest.raises(
        PlacementError, match=r"^inference_num_workers is 4, which needs 4 GPUs.*Lower inference_num_workers"
    ):
        plan_placement(config(inference_num_workers=4), node, with_trainer=False)


def test_on_cpus_share_gpus_has_no_effect():
    plan = plan_placement(config(share_gpus=True, device="cpu"), cluster((32, 0)))
    assert plan == plan_placement(config(device="cpu"), cluster((32, 0)))


STRICT_SPREAD = 'ray_inference_placement_strategy "STRICT_SPREAD"'


@pytest.mark.parametrize(("values", "nodes", "words"), [
    ({}, [(64, 1)], ["Lower both to 1"]),
    ({}, [(6, 2), (6, 0)], ["2 pairs of a server and a trainer worker, each of 1 GPU and 6 cores"]),
    ({"ray_inference_placement_strategy": "STRICT_SPREAD"}, [(64, 8)],
     [STRICT_SPREAD, 'set ray_inference_placement_strategy to "SPREAD"']),
])  # fmt: skip
def test_pairs_that_do_not_fit_name_what_to_change(values, nodes, words):
    pairs = {"inference_num_workers": 2, "trainer_num_workers": 2, "share_gpus": True, "ray_trainer_cpus_per_worker": 2}
    plan, refusal = plan_or_refusal(config(**pairs, **values), cluster(*nodes))
    assert plan is None
    assert [word for word in words if word not in refusal] == []


@pytest.mark.parametrize("together", ["inference", "trainer"])
def test_what_must_be_on_one_node_is_placed_first(together):
    apart = {"inference": "trainer", "trainer": "inference"}[together]
    strategies = {
        f"ray_{together}_placement_strategy": "STRICT_PACK", f"ray_{apart}_placement_strategy": "SPREAD",
        "inference_num_workers": 4, "trainer_num_workers": 4,
    }  # fmt: skip
    placement = plan_placement(config(**strategies), cluster((64, 4), (64, 4)))
    assert placement.order == (together, apart)
    assert len(set(nodes_of(placement, together))) == 1


@pytest.mark.parametrize(("gpus", "values"), [
    (1, {"inference_tensor_parallel_size": 2}),
    (2, {"train_backend": "megatron", "megatron_expert_parallel_size": 2}),
    (4, {"train_backend": "megatron", "megatron_tensor_parallel_size": 4}),
    (2, {"fsdp_context_parallel_size": 2}),
])  # fmt: skip
def test_defaults_stay_where_fewer_workers_contradict_another_field(gpus, values):
    """The error is then that of the placement, which names fields with their values."""
    machine = cluster((64, gpus))
    assert fitting_values(config(**values), machine) == {}
    assert f"GPUs, but the cluster has {gpus} (1 node" in plan_or_refusal(config(**values), machine)[1]


def test_cores_of_rollout_workers_are_no_cores_of_servers_or_ranks():
    reserving = config(rollout_cpus_per_worker=1, rollout_num_workers=5)
    assert plan_placement(reserving, cluster((21, 4)))
    plan, refusal = plan_or_refusal(reserving, cluster((20, 4)))
    assert plan is None
    assert "5 rollout workers with rollout_cpus_per_worker 1 leave of 20: lower it" in refusal
    fitting = fitting_values(reserving, cluster((20, 4)))
    assert fitting == {"ray_inference_cpus_per_worker": 3.0, "ray_trainer_cpus_per_worker": 3.0}
    assert plan_placement(reserving.adjusted(**fitting), cluster((20, 4)))
    # One after the other on two nodes: three and two.
    two = config(rollout_cpus_per_worker=1, rollout_num_workers=5, ray_trainer_placement_strategy="STRICT_PACK")
    assert plan_placement(two, cluster((11, 2), (10, 2)))
    assert plan_or_refusal(two, cluster((10, 2), (10, 2)))[0] is None
