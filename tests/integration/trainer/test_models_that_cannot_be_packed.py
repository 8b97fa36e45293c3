"""A model that would mix packed samples is refused when it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from telescope.errors import UserError
from telescope.trainer.model import load_causal_lm


def load(folder: Path, architecture: str, **fields: object) -> None:
    config = AutoConfig.for_model(architecture, **fields)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(folder)
    load_causal_lm(str(folder), torch.float32, with_weights=False)


@pytest.mark.parametrize("architecture", ["mamba", "falcon_h1", "qwen3_next", "jamba"])
def test_recurrent_layers(tmp_path: Path, architecture: str) -> None:
    with pytest.raises(UserError, match=r"model: .*layers other than attention"):
        load(tmp_path, architecture)


def test_convolutions_between_attention_layers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Lfm2ForCausalLM.*layers other than attention that mix tokens: conv"):
        load(tmp_path, "lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"])


@pytest.mark.parametrize("architecture", ["bloom", "falcon", "mpt"])
def test_an_attention_that_cannot_be_replaced(tmp_path: Path, architecture: str) -> None:
    with pytest.raises(UserError, match="has an attention that cannot be replaced"):
        load(tmp_path, architecture)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "gemma", "phi3", "olmo2"])
def test_models_of_attention_alone_are_loaded(tmp_path: Path, architecture: str) -> None:
    load(tmp_path, architecture, num_hidden_layers=2)
