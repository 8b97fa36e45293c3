"""A dry run for another machine: GPUs that are assumed, their memory, and what of this machine is only a remark."""

import re
from pathlib import Path

import pytest
from tests.model_folder import write_model_folder
from tests.unit.cli.conftest import FITTED, HERE, set_machine

from telescope.cli.dry_run import MOST_WORKERS_SHOWN
from telescope.config.model_files import inspect_model
from telescope.config.plan import NodeResources
from telescope.errors import UnreachableError

pytestmark = pytest.mark.usefixtures("small_machine")


EXAMPLE = Path(__file__).parents[3] / "configs" / "examples" / "example_countdown.yaml"
FOUR_B = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
          "num_key_value_heads": 8, "vocab_size": 151936}  # fmt: skip
ONE_GPU = {"inference_num_workers": 1, "trainer_num_workers": 1, "share_gpus": "true"}
DOES_NOT_FIT = "A trainer worker needs about"
UNKNOWN = "GPU memory is not known here: --gpu-memory-gib 80 checks the plan for such GPUs."


def test_a_model_too_large_for_the_memory_here_is_planned_for_a_machine_with_gpus(dry_run, tmp_path):
    printed, error = dry_run(ray_address="local", model=write_model_folder(tmp_path / "4b", **FOUR_B))
    assert error is None
    assert "No GPU was found on this machine, and its CPU cores or memory do not hold the run" in printed
    assert "the plan is for a machine with 4 GPUs" in printed
    assert FITTED not in printed
    assert "assumed node 1" in printed


@pytest.mark.parametrize("settings", [{}, {"inference_quantization": "fp8_per_block"}, {"share_gpus": "true"}])
def test_gpus_that_are_asked_for_and_not_here_are_an_error(dry_run, settings):
    _, error = dry_run(device="cuda", ray_address="local", **settings)
    assert 'device is "cuda", but no GPU was found' in error
    assert "--gpu-memory-gib 80 plans for a machine with such GPUs" in error
    assert dry_run(device="cuda", ray_address="local", gpu=80, **settings)[1] is None


def test_a_problem_of_this_machine_is_a_remark_on_a_run_for_another(dry_run):
    for values in ({"device": "cuda", "gpu": 80}, {"ray_address": "10.0.0.1:6379"}, {"config": EXAMPLE, "gpu": 80}):
        printed, error = dry_run(**values, run_dir="/proc/telescope")
        assert error is None
        assert "On this machine, a run would be refused: run_dir is '/proc/telescope'" in printed


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 64}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_that_are_always_updated_in_place_are_a_remark(dry_run, tmp_path, device):
    values = HERE | ({"device": device, "gpu": 80} if device == "cuda" else {})
    assert "in place" not in dry_run(**values)[0]
    two, error = dry_run(**values, inference_tensor_parallel_size=2, inference_num_workers=2)
    assert error is None
    assert "Weights reach the servers in place, inside a pause of each: collectives of a tensor-parallel" in two
    experts, error = dry_run(**values, model=write_model_folder(tmp_path / "experts", **EXPERTS))
    assert error is None
    assert "Weights reach the servers in place, inside a pause of each: the model has experts." in experts


def test_thousands_of_workers_are_planned_and_the_first_are_shown(dry_run):
    printed, error = dry_run(device="cuda", gpu=80, trainer_num_workers=1000, inference_num_workers=1000)
    assert error is None
    assert printed.count("inference server ") == MOST_WORKERS_SHOWN
    assert "and 1936 more, on 250 nodes in all" in printed


def memory_of(printed: str) -> list[str]:
    rows = printed.partition("Memory (estimate")[2].splitlines()[1:]
    return [row for row in rows if row and row != "Remarks" and "assumed" not in row]


def test_a_dataset_that_cannot_be_reached_is_refused_for_this_machine_and_a_remark_for_another(dry_run):
    missing = UnreachableError("hendrycks_math: the dataset cannot be loaded from the hub")
    assert dry_run(**HERE, broken=missing)[1] == str(missing)
    printed, error = dry_run(config=EXAMPLE, gpu=80, broken=missing)
    assert error is None
    assert f"· Not checked on this machine: {missing}" in printed
    assert "no column" in dry_run(config=EXAMPLE, gpu=80, broken="the dataset has no column problem")[1]


def test_a_plan_that_fits_the_assumed_gpus_is_printed_in_full(dry_run):
    printed, error = dry_run(config=EXAMPLE, gpu=80)
    assert error is None
    assert "GPUs of 80 GiB are assumed (--gpu-memory-gib): the plan is for a machine with 4 of them" in printed
    assert "Memory (estimate, for GPUs of 80 GiB as assumed)" in printed
    assert re.search(r"second copy for weight syncs +\d", printed)
    assert re.search(r"KV cache holds [\d,]+ tokens", printed)
    assert re.search(r"total +72\.00 GiB", printed)
    for words in (UNKNOWN, "what is left", DOES_NOT_FIT, "would be refused"):
        assert words not in printed


def test_the_memory_estimate_is_never_cut_off(dry_run):
    shared = {"share_gpus": True, "inference_num_workers": 1, "trainer_num_workers": 1}
    printed, _ = dry_run(config=EXAMPLE, gpu=80, width=80, **shared)
    assert "…" not in "".join(memory_of(printed))


def test_without_an_assumption_the_option_is_named_and_known_sizes_are_listed(dry_run, tmp_path):
    printed, error = dry_run(config=EXAMPLE, model=write_model_folder(tmp_path / "4b", **FOUR_B))
    assert error is None
    assert UNKNOWN in printed
    assert "assumed)" not in printed
    assert "second copy for weight syncs" not in printed
    insists, _ = dry_run(config=EXAMPLE, model=tmp_path / "4b", weight_transfer="background")
    assert re.search(r"second copy for weight syncs +\d", insists)
    assert UNKNOWN not in dry_run(**HERE)[0]


@pytest.mark.parametrize(("gpu", "settings", "shown", "refused"), [
    (80, {}, "KV cache holds", False),
    (24, {}, DOES_NOT_FIT, False),
    (19, {"max_model_len": 8192, "max_tokens": 4096, "weight_transfer": "background"}, "saves", False),
    (141, ONE_GPU, "second copy for weight syncs", False),
    (80, ONE_GPU, "share_gpus leaves it 47.0 of a GPU's 80.0 GiB", True),
])  # fmt: skip
def test_the_verdict_applies_to_a_machine_with_the_assumed_gpus(
    dry_run, monkeypatch, tmp_path, gpu, settings, shown, refused
):
    values = {"ray_address": "local", "model": write_model_folder(tmp_path / "4b", **FOUR_B)} | settings
    printed, error = dry_run(config=EXAMPLE, gpu=gpu, **values)
    assert shown in printed
    assert (error is not None) == refused
    assert shown in (error or shown)

    node = NodeResources("gpus", cpus=64.0, gpus=4, memory_bytes=1 << 40, gpu_memory_bytes=gpu << 30)
    set_machine(monkeypatch, node)
    there, error_there = dry_run(config=EXAMPLE, **values)
    assert memory_of(printed) == memory_of(there)
    assert error == error_there


def test_assumed_gpus_replace_those_of_this_machine(dry_run, monkeypatch, tmp_path):
    node = NodeResources("gpus", cpus=64.0, gpus=1, memory_bytes=1 << 40, gpu_memory_bytes=24 << 30)
    set_machine(monkeypatch, node)
    values = {"ray_address": "local", "model": write_model_folder(tmp_path / "4b", **FOUR_B)} | ONE_GPU
    assert "a GPU's 24.0 GiB" in dry_run(**values)[1]
    assert dry_run(**values, gpu=141)[1] is None
    assert "a machine with 4 of them" in dry_run(config=EXAMPLE, ray_address="local", gpu=141)[0]


def test_experts_on_two_ranks_do_not_fit(dry_run, tmp_path):
    experts = {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
               "num_experts": 128, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
               "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}  # fmt: skip
    model = write_model_folder(tmp_path / "experts", **experts)
    assert DOES_NOT_FIT not in dry_run(config=EXAMPLE, model=model)[0]
    printed, _ = dry_run(config=EXAMPLE, model=model, gpu=80)
    assert re.search(
        r"A trainer worker needs about \d+\.\d GiB .*, and a GPU has 80\.0 GiB: raise trainer_num_w", printed
    )


def test_a_sync_of_adapters_is_described_as_one(dry_run):
    adapters = {"lora_rank": 8, "lora_sync": "adapter", "model_dtype": "bfloat16"}
    printed, _ = dry_run(config=EXAMPLE, gpu=80, **adapters)
    assert "A sync loads the adapter alone into each server" in printed
    assert "Weights reach the servers in place" not in printed


def test_an_unreachable_hub_is_an_error_only_if_nothing_can_be_checked(dry_run, tried, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "telescope.orchestrator.preflight.inspect_model", lambda config: inspect_model(config, ask_hub=False)
    )
    printed, error = dry_run(config=EXAMPLE, gpu=80, model="Qwen/Qwen2.5-3B")
    assert error is None
    assert "On this machine, a run would be refused: model is 'Qwen/Qwen2.5-3B'" in printed
    printed, error = dry_run(config=EXAMPLE, gpu=80, model="acme/secret-1B")
    assert "model is 'acme/secret-1B'" in error
    assert "no estimate" in printed
    _, error = dry_run(**HERE, model="acme/secret-1B")
    assert error.count("acme/secret-1B") == 2
    assert not tried[-1]  # loading the model would fail for the same reason


NO_GPU = 'device is "cpu", so that the run takes no GPU. Leave --gpu-memory-gib out'


@pytest.mark.parametrize(("settings", "words"), [
    ({"device": "cuda", "environments": "[{name: countdwn}]", "model": "/nowhere"},
     ["Did you mean 'countdown'?", "does not exist"]),
    ({"config": EXAMPLE, "router_replay": True}, ["router_replay is true, but "]), (HERE, [NO_GPU]),
])  # fmt: skip
def test_a_problem_on_any_machine_is_an_error_for_assumed_gpus_too(dry_run, settings, words):
    _, error = dry_run(gpu=80, **settings)
    assert [word for word in words if word not in error] == []
