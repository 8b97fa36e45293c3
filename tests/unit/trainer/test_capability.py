"""A small copy of a model shows whether the trainer computes it as transformers does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from telescope.errors import UserError
from telescope.trainer import capability
from telescope.trainer.capability import choose_execution, shrink
from telescope.trainer.model import auto_class, load_config


def save(folder: Path, model_type: str, **fields: Any) -> str:
    config = AutoConfig.for_model(model_type, **fields)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(folder)
    return str(folder)


def of_family(folder: Path, name: str, **fields: Any) -> str:
    family = next(family for family in FAMILIES if family.name == name)
    return save(folder, family.model_type, **(family.fields | fields))


def test_logits_that_are_changed_in_an_unknown_way_are_refused(tmp_path, monkeypatch):
    forward = LlamaForCausalLM.forward

    def shifted(self: Any, *args: Any, **options: Any) -> Any:
        found = forward(self, *args, **options)
        found.logits = found.logits * torch.linspace(1, 2, found.logits.shape[-1])
        return found

    monkeypatch.setattr(LlamaForCausalLM, "forward", shifted)
    folder = of_family(tmp_path, "llama")
    with pytest.raises(UserError, match=r"cannot be trained. Packed: logprobs differ by .* nats"):
        choose_execution(folder, 16, plain_too=True)


@pytest.mark.parametrize(("name", "fields", "length", "words"), [
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, 8, "type dynamic"),
    ("cohere2", {"sliding_window": 64}, 65, "Lower max_model_len to 64 or less"),
    (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16,
                "original_max_position_embeddings": 64,
            },
        },
        65,
        "Lower max_model_len to 64 or less",
    ),
])  # fmt: skip
def test_lengths_at_which_trainer_and_engine_differ_are_refused_and_shorter_ones_are_not(
    tmp_path, name, fields, length, words
):
    folder = of_family(tmp_path, name, **fields)
    with pytest.raises(UserError, match=words):
        choose_execution(folder, length)
    if length > 64:
        assert choose_execution(folder, 64).packs


@pytest.mark.parametrize("model_type", ["phimoe", "deepseek_v3", "ernie4_5_moe", "deepseek_v32", "glm_moe_dsa"])
def test_experts_that_the_weight_transfer_does_not_know_are_refused(tmp_path, model_type):
    with pytest.raises(UserError, match=f"experts of type {model_type}. Of models with experts, the weight"):
        choose_execution(save(tmp_path, model_type), 16)


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma3n_text"])
def test_layers_that_share_keys_and_values_are_in_the_small_copy(tmp_path, model_type):
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 2
    fields = {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 10,
        "intermediate_size": 64, "layer_types": kinds, "num_kv_shared_layers": 5, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 300, "vocab_size": 300, "global_head_dim": 16, "laurel_rank": 4,
    }  # fmt: skip
    if model_type == "gemma3n_text":
        fields |= {"intermediate_size": [64] * 10, "activation_sparsity_pattern": [0.5] * 4 + [0.0] * 6}
    assert choose_execution(save(tmp_path, model_type, **fields), 16).packs


def test_a_wrapper_is_loaded_by_the_class_that_its_config_names(tmp_path):
    config = AutoConfig.for_model("qwen3_5")
    for name, auto in (
        ("Qwen3_5ForConditionalGeneration", AutoModelForImageTextToText), ("Qwen3_5ForCausalLM", AutoModelForCausalLM),
    ):  # fmt: skip
        config.architectures = [name]
        config.save_pretrained(tmp_path)
        assert auto_class(load_config(str(tmp_path))) is auto


def test_positions_that_a_model_has_not_learned_are_refused(tmp_path):
    folder = save(tmp_path, "gpt2", n_positions=32, n_embd=32, n_layer=2, n_head=2, vocab_size=99)
    with pytest.raises(
        UserError, match=r"max_model_len is 33, but beyond 32 tokens .* no position embeddings for more"
    ):
        choose_execution(folder, 33)


def test_a_small_copy_has_every_kind_of_layer(tmp_path):
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=24, layer_types=kinds * 4, sliding_window=512)
    small = shrink(config)
    assert small.layer_types == kinds
    assert (small.num_hidden_layers, small.sliding_window) == (6, capability.WINDOW)
    assert config.num_hidden_layers == 24
