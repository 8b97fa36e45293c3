"""The tensors that a config.json describes are those of transformers' model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from telescope.config.model_contents import CAUSAL_LM_CLASSES, expected_tensors, listed, tensor_problem
from telescope.trainer.checkpoint_names import checkpoint_tensors

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 32, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "mlp_only_layers": [0]}


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3_moe", EXPERTS),
        ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": []}),
    ],
)
def test_the_expected_tensors_are_those_that_transformers_saves(model_type: str, values: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **values)
    with torch.device("meta"):
        model = getattr(transformers, CAUSAL_LM_CLASSES[model_type])(config)
    saved = {name: tuple(tensor.shape) for name, tensor in checkpoint_tensors(model)}
    assert expected_tensors(config.to_dict()) == saved
    assert tensor_problem(saved, saved, tied=False) is None


def test_an_architecture_that_is_not_known_has_no_expectation() -> None:
    assert expected_tensors({**SIZES, "model_type": "gemma3_text"}) is None
    assert expected_tensors({"model_type": "qwen2"}) is None


def test_long_lists_of_tensors_are_cut() -> None:
    assert listed("abcdef") == "a, b, c, d and 2 more"
