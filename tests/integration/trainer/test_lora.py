"""Adapters compute what peft computes, on one rank and on two, and are what a run trains, saves and resumes."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.integration.trainer.lora_cases import (
    CASES,
    FIELDS,
    TOKENS,
    adapter_job,
    build,
    follows_full_gradient,
    golden,
)
from tests.integration.trainer.test_gradient_contract import reference_gradient
from tests.integration.trainer.trainer_cases import (
    make_config,
    make_samples,
    near_policy,
    packed_share,
    relative_error,
    run_here,
    run_ranks,
    step_gradient,
    weights,
    write_meta,
)
from torch.distributed.tensor import distribute_tensor

from telescope.errors import UserError
from telescope.orchestrator.conversion import ADAPTER, convert, convert_adapter, is_converted
from telescope.trainer.backends.fsdp.checkpoint import saved_weights
from telescope.trainer.lora import FILE_PREFIX, find_targets, is_adapter
from telescope.trainer.model import PREFIX
from telescope.trainer.packing import lay_out, untrained_sample
from telescope.trainer.worker import Trainer
from telescope.utils.timeline import Timeline
from telescope.weights.model_folder import base_weights, weights_digest

LENGTHS = [5, 31, 12, 7, 2, 28, 19, 3, 16, 9, 24, 11]


def adapters(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The sharded adapters by their names in peft's files."""
    policy: Any = trainer.backend.policy  # type: ignore[attr-defined]
    return {FILE_PREFIX + n.removeprefix(PREFIX): p for n, p in policy.named_parameters() if is_adapter(n)}


def peft_job(trainer: Trainer, case: str, folder: Path) -> dict[str, Any]:
    """What peft's stored numbers are compared with, from peft's adapter."""
    backend: Any = trainer.backend
    base = weights(trainer)
    stored = golden(case, "adapter")
    trained = adapters(trainer)
    assert stored.keys() == trained.keys()
    for name, parameter in trained.items():
        shard = distribute_tensor(stored[name], parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.data.to_local().copy_(shard.to_local())
    found: dict[str, Any] = {"logprobs": torch.tensor(backend.sequence_logprobs(TOKENS), dtype=torch.float64)}
    row = lay_out([untrained_sample("probe", np.array(TOKENS))])
    # Every rank has the row, and gradients are summed over the ranks.
    backend.forward_backward(
        [row], lambda index, logp_N, entropy_N: logp_N.sum() / trainer.world_size, Timeline(backend.device, 0)
    )
    found["gradient"] = {name: parameter.grad.full_tensor() for name, parameter in trained.items()}
    found["frozen_gradients"] = [
        n for n, p in backend.policy.named_parameters() if p.grad is not None and not is_adapter(n)
    ]
    backend.optimizer.zero_grad()
    merged = weights(trainer)
    found["merged"] = {name: tensor for name, tensor in merged.items() if not torch.equal(tensor, base[name])}
    found["names"] = [meta.name for meta in backend.weight_metadata()]
    found["yielded"] = list(merged)
    found["bytes"] = backend.save_adapter(folder / case)
    return found


def train_job(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Four steps, with a checkpoint after the second that the last two are repeated from."""
    backend: Any = trainer.backend
    samples = near_policy(make_samples(LENGTHS), trainer)

    def step() -> None:
        trainer.train_step(packed_share(trainer, samples))

    found: dict[str, Any] = {"start": weights(trainer), "num_trained": len(backend.parameters)}
    step()
    step()
    found["weights_2"] = weights(trainer)
    trainer.save_checkpoint(2, folder / "checkpoint")
    backend.finish_checkpoint()
    backend.save_hf(folder / "hf")
    backend.save_adapter(folder / "adapter")
    step()
    step()
    found["weights_4"] = weights(trainer)
    trainer.restart()
    found["restarted"] = weights(trainer)
    backend.load_checkpoint(2, folder / "checkpoint")
    found["loaded"] = weights(trainer)
    step()
    step()
    found["weights_4_again"] = weights(trainer)
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("lora") / "model")


TRAINED: dict[str, Any] = {**FIELDS, "lora_dropout": 0.2, "weight_decay": 0.1, "gradient_checkpointing": True}


@pytest.fixture(scope="module")
def results(source: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By number of ranks: each case of peft, `trained`, `rows shared`, and the folder."""
    found: dict[str, Any] = {}
    for num_ranks in (1, 2):
        folder = tmp_path_factory.mktemp(f"lora_{num_ranks}")
        jobs: list[Any] = [
            (peft_job, make_config(source, **FIELDS, lora_target_modules=targets), (case, folder))
            for case, targets in CASES.items()
        ]
        jobs.append((train_job, make_config(source, **TRAINED), (folder,)))
        shared = make_config(source, **FIELDS, fsdp_context_parallel_size=num_ranks)
        jobs.append((adapter_job, shared, (make_samples(LENGTHS),)))
        if num_ranks == 1:
            by_job = [run_here(job) for job in jobs]
        else:
            by_job = [ranks[0] for ranks in run_ranks(jobs, num_ranks=2, folder=folder / "ranks")]
        found[num_ranks] = dict(zip([*CASES, "trained", "rows shared"], by_job, strict=True)) | {"folder": folder}
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_logprobs_gradients_and_merged_weights_are_those_of_peft(results, case, num_ranks):
    found = results[num_ranks][case]
    torch.testing.assert_close(found["logprobs"], golden(case, "logprobs")[""], rtol=0, atol=1e-12)
    assert relative_error(found["gradient"], golden(case, "gradient")) < 1e-12
    assert relative_error(found["merged"], golden(case, "merged")) < 1e-14
    assert found["frozen_gradients"] == []
    assert found["names"] == found["yielded"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_that_share_rows_compute_the_gradient_of_adapters(results, source, num_ranks):
    gradient, a = results[num_ranks]["rows shared"]
    follows_full_gradient(gradient, a, reference_gradient(source, make_samples(LENGTHS), 1.0), 1e-12)


@pytest.mark.parametrize("case", CASES)
def test_the_file_of_an_adapter_is_the_one_that_peft_writes(results, case):
    folder = results[2]["folder"] / case
    saved = load_file(folder / "adapter_model.safetensors")
    wanted = golden(case, "adapter")
    assert saved.keys() == wanted.keys()
    assert all(torch.equal(saved[name], wanted[name]) for name in wanted)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 3, 7.5)
    assert results[2][case]["bytes"] == (folder / "adapter_model.safetensors").stat().st_size
    named = {name.removeprefix(FILE_PREFIX).rpartition(".lora_")[0].rpartition(".")[2] for name in wanted}
    assert settings["target_modules"] == (sorted(named) if case == "all" else CASES[case])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_resumed_run_with_dropout_is_bit_equal(results, num_ranks):
    found = results[num_ranks]["trained"]
    start, trained = found["start"], found["weights_2"]
    moved = {name for name in start if not torch.equal(start[name], trained[name])}
    layers = {"q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"}
    assert {name.split(".")[-2] for name in moved} == layers
    assert not any(name.endswith("bias") for name in moved)
    assert found["num_trained"] == 2 * len(moved)
    for one, other in (("restarted", "start"), ("loaded", "weights_2"), ("weights_4_again", "weights_4")):
        assert all(torch.equal(found[one][name], tensor) for name, tensor in found[other].items()), one


def test_recomputed_blocks_drop_the_values_that_the_forward_pass_dropped(models, source, one_rank):
    models["lora"] = source
    found = []
    for recompute in (False, True):
        trainer = one_rank("lora", **FIELDS, lora_dropout=0.3, gradient_checkpointing=recompute)
        found.append(step_gradient(trainer, packed_share(trainer, make_samples(LENGTHS))))
    assert relative_error(*found) < 1e-12


def test_a_checkpoint_holds_the_adapter_alone(results):
    saved = saved_weights(results[2]["folder"] / "checkpoint")
    adapter = load_file(results[2]["folder"] / "adapter" / "adapter_model.safetensors")
    assert {FILE_PREFIX + meta.name.removeprefix(PREFIX) for meta in saved} == adapter.keys()


def test_a_checkpoint_converts_to_the_merged_model_and_to_the_adapter(results, source, tmp_path):
    folder = results[2]["folder"]
    checkpoint = folder / "checkpoint"
    settings = {"model": source, "model_dtype": "float64", "lora_dropout": 0.2, "lora_target_modules": "all-linear"}
    write_meta(checkpoint, source, config={**FIELDS, **settings})
    convert(checkpoint, tmp_path / "merged")
    merged, saved = load_file(tmp_path / "merged" / "model.safetensors"), load_file(folder / "hf" / "model.safetensors")
    trained = results[2]["trained"]["weights_2"]
    assert merged.keys() == saved.keys() == trained.keys()
    assert relative_error(merged, trained) < 1e-15
    assert relative_error(saved, trained) == 0
    convert_adapter(checkpoint, tmp_path / "adapter")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "adapter" / file).read_bytes() == (folder / "adapter" / file).read_bytes()
    assert is_converted(checkpoint, tmp_path / "adapter", ADAPTER)
    with pytest.raises(UserError, match="is not this checkpoint"):
        is_converted(checkpoint, tmp_path / "adapter")
    shutil.copytree(source, checkpoint / "hf_meta", ignore=shutil.ignore_patterns("*.safetensors"))
    gone = str(tmp_path / "gone")
    write_meta(checkpoint, gone, config={**FIELDS, **settings, "model": gone})
    with pytest.raises(UserError, match="convert with --adapter"):
        convert(checkpoint, tmp_path / "again")


def test_an_adapter_converts_in_any_folder_and_over_the_weights_of_its_run_only(results, source, tmp_path, monkeypatch):
    shutil.copytree(source, tmp_path / "models" / "base")
    shutil.copytree(results[2]["folder"] / "checkpoint", checkpoint := tmp_path / "runs" / "first" / "step_2")
    settings = {**FIELDS, "model": "models/base", "model_dtype": "float64", "lora_target_modules": "all-linear"}
    monkeypatch.chdir(tmp_path)
    base = base_weights("models/base")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for number, known in enumerate((None, base)):  # of an earlier version, and of this one
        write_meta(checkpoint, "models/base", config=settings, base=known)
        convert(checkpoint, tmp_path / f"merged {number}")
    convert_adapter(checkpoint, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "models" / "base")
    file = tmp_path / "models" / "base" / "model.safetensors"
    weights = load_file(file)
    parts = dict(list(weights.items())[:3]), dict(list(weights.items())[3:])
    for name, part in zip(("a.safetensors", "b.safetensors"), parts, strict=True):
        save_file(part, file.with_name(name))
    file.unlink()
    convert(checkpoint, tmp_path / "merged of two files")
    weights["model.norm.weight"][0] += 1e-3
    file.with_name("a.safetensors").unlink()
    save_file(weights, file.with_name("b.safetensors"))
    with pytest.raises(UserError, match=r"has adapters for other weights than those in .*models/base: the digest was"):
        convert(checkpoint, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_the_base_of_adapters_is_the_downloaded_model_and_not_a_newer_one_on_the_hub(source, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: pytest.fail("the hub was asked"))
    repository = tmp_path / "models--some--model"
    shutil.copytree(source, repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert base_weights("some/model") == {"model": "some/model", "weights": weights_digest(Path(source))}


@pytest.mark.parametrize(("targets", "message"), [
    ("nothing", "'nothing' matches nothing in the model. Choose from c_fc, c_proj, k_proj, o_proj, q_proj, v_proj"),
    (["q_proj", "q_pro"], "'q_pro' matches nothing"),
    (["norm"], "'norm' matches model.norm, not linear layers"),
    (["lm_head"], "'lm_head' matches lm_head, not linear layers"),
    (r"model\.(norm|layers\.0\.self_attn\.q_proj)", "also matches model.norm"),
])  # fmt: skip
def test_modules_that_can_have_no_adapter_are_refused(source, targets, message):
    from telescope.trainer.model import PolicyModel, load_causal_lm

    policy = PolicyModel(load_causal_lm(source, torch.float64, with_weights=False), 7)
    with pytest.raises(UserError, match=re.escape(message)):
        find_targets(policy.causal_lm, targets)
