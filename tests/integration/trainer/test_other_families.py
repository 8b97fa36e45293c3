"""Families with heads, attention, experts or wrappings of their own have the gradient of their samples."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.families import FAMILIES
from tests.integration.trainer.test_gradient_contract import LENGTHS, accumulated, reference_gradient
from tests.integration.trainer.trainer_cases import VOCAB, make_samples, packed_share, relative_error, write_meta
from transformers import AutoConfig

from telescope.errors import UserError
from telescope.orchestrator.conversion import convert
from telescope.trainer.checkpoint_names import checkpoint_tensors
from telescope.trainer.lora import is_adapter
from telescope.trainer.model import auto_class
from telescope.weights.plan import make_update

BOUND = 1e-6
"""Norms and rotary positions are float32 in most families, whatever the dtype."""


def save(folder: Path, name: str) -> str:
    """A tiny random model of a family, with the vocabulary of these tests' samples."""
    family = next(family for family in FAMILIES if family.name == name)
    fields = family.fields
    (fields if family.around is None else fields["text_config"])["vocab_size"] = VOCAB
    config = AutoConfig.for_model(family.model_type, **fields)
    torch.manual_seed(0)
    model = auto_class(config).from_config(config)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", ["granite", "phi3", "glm4", "qwen2_moe", "nemotron"])
def test_gradient_and_weights_are_those_of_transformers(models, one_rank, tmp_path, name):
    models[name] = save(tmp_path, name)
    trainer = one_rank(name)
    assert trainer.backend.layout.packs is (name != "nemotron")
    samples = make_samples(LENGTHS)
    found, _ = accumulated(trainer, samples, pad_to_multiple_of=8)
    assert relative_error(found, reference_gradient(models[name], samples, 1.0)) < BOUND
    loaded = auto_class(AutoConfig.from_pretrained(tmp_path)).from_pretrained(tmp_path, dtype=torch.float64)
    wanted, sent = dict(checkpoint_tensors(loaded)), dict(trainer.backend.named_weights())
    assert sent.keys() == wanted.keys()
    assert all(torch.equal(sent[part], wanted[part]) for part in wanted)


def test_the_towers_of_a_wrapper_are_frozen_and_saved(models, one_rank, tmp_path):
    models["gemma3"] = save(tmp_path, "gemma3")
    trainer = one_rank("gemma3")
    trained = {name for name, parameter in trainer.backend.policy.named_parameters() if parameter.requires_grad}
    assert trained
    assert not [name for name in trained if "vision" in name or "projector" in name]
    found, _ = accumulated(trainer, make_samples(LENGTHS))
    assert relative_error(found, {n: g for n, g in found.items() if g is not None}) == 0
    assert any("vision_tower" in name for name, _ in trainer.backend.named_weights())


def test_a_checkpoint_of_a_wrapper_is_converted_with_its_towers(models, one_rank, tmp_path):
    models["gemma3"] = save(tmp_path / "model", "gemma3")
    trainer = one_rank("gemma3", model_dtype="float32")
    trainer.train_step(packed_share(trainer, make_samples(LENGTHS)))
    trainer.save_checkpoint(1, tmp_path / "step_1")
    trainer.backend.finish_checkpoint()
    write_meta(tmp_path / "step_1", models["gemma3"], step=1)
    convert(tmp_path / "step_1", tmp_path / "hf")
    found, wanted = load_file(tmp_path / "hf" / "model.safetensors"), dict(trainer.named_weights())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    trainer.backend.load_checkpoint(1, tmp_path / "step_1")


def test_adapters_of_a_wrapper_are_in_its_decoder_and_merged_into_its_weights(models, one_rank, tmp_path):
    models["gemma3"] = save(tmp_path / "model", "gemma3")
    lora: dict[str, Any] = {"lora_rank": 2, "lora_alpha": 4, "lora_target_modules": ["q_proj", "v_proj"]}
    trainer = one_rank("gemma3", model_dtype="float32", **lora)
    names = {name for name, _ in trainer.backend.policy.named_parameters() if is_adapter(name)}
    assert names
    assert all("language_model" in name for name in names)
    for step in (0, 1):
        trainer.train_step(packed_share(trainer, make_samples(LENGTHS), step=step, version=step))
    trainer.save_checkpoint(2, tmp_path / "step_2")
    trainer.backend.finish_checkpoint()
    write_meta(
        tmp_path / "step_2", models["gemma3"], config={"model": models["gemma3"], "model_dtype": "float32", **lora}
    )
    convert(tmp_path / "step_2", tmp_path / "hf")
    found, wanted = load_file(tmp_path / "hf" / "model.safetensors"), dict(trainer.named_weights())
    assert found.keys() == wanted.keys()
    assert relative_error(found, wanted) < 1e-7
    base = load_file(tmp_path / "model" / "model.safetensors")
    assert {name.rpartition(".")[0][-6:] for name in found if not torch.equal(found[name], base[name])} == {
        "q_proj",
        "v_proj",
    }


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 2, "lora_alpha": 4, "lora_target_modules": ["q_proj"]}])
def test_a_buffer_that_engines_keep_in_float32_is_neither_sent_nor_saved_in_fewer_bits(
    models, one_rank, tmp_path, lora
):
    models["glm4_moe"] = save(tmp_path / "model", "glm4_moe")
    file = tmp_path / "model" / "model.safetensors"
    stored = load_file(file)
    (name,) = (name for name in stored if name.endswith("e_score_correction_bias"))
    stored[name] = torch.randn(stored[name].shape, generator=torch.Generator().manual_seed(0))
    save_file(stored, file, metadata={"format": "pt"})
    trainer = one_rank("glm4_moe", model_dtype="bfloat16", **lora)
    sent = dict(trainer.named_weights(torch.bfloat16))
    assert torch.equal(sent[name], stored[name])
    assert {tensor.dtype for other, tensor in sent.items() if other != name} == {torch.bfloat16}
    update = make_update(trainer.backend.weight_metadata(), version=1, dtype="bfloat16")
    assert update.wide == [name]
    trainer.backend.save_hf(tmp_path / "hf")
    trainer.save_checkpoint(2, tmp_path / "step_2")
    trainer.backend.finish_checkpoint()
    settings = {"model": models["glm4_moe"], "model_dtype": "bfloat16", **lora}
    write_meta(tmp_path / "step_2", models["glm4_moe"], config=settings)
    convert(tmp_path / "step_2", tmp_path / "converted", dtype="bfloat16")
    for folder in ("hf", "converted"):
        saved = load_file(tmp_path / folder / "model.safetensors")
        assert torch.equal(saved[name], stored[name])
        assert {tensor.dtype for other, tensor in saved.items() if other != name} == {torch.bfloat16}


def test_what_needs_a_shared_row_is_refused_where_there_is_none(models, one_rank, tmp_path):
    models["nemotron"] = save(tmp_path, "nemotron")
    with pytest.raises(UserError, match=r"router_replay is set, but samples of .* cannot share a row"):
        one_rank("nemotron", router_replay=True)
