"""A model that would mix packed samples is computed side by side, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from telescope.errors import UserError
from telescope.trainer.capability import choose_execution

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}


def packs(folder: Path, architecture: str, **fields: object) -> bool:
    config = AutoConfig.for_model(architecture, **fields)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(folder)
    return choose_execution(str(folder), 16).packs


@pytest.mark.parametrize("architecture", ["mamba", "jamba"])
def test_layers_of_which_the_engine_keeps_a_function_are_refused(tmp_path: Path, architecture: str) -> None:
    with pytest.raises(UserError, match=r"has Mamba layers, .* cannot be checked"):
        packs(tmp_path, architecture, **({} if architecture == "mamba" else SMALL))


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2}),
        ("bloom", {"n_head": 4, "n_layer": 2}),
        ("falcon", {}),
    ],
)
def test_convolutions_and_attention_that_cannot_be_replaced_keep_samples_apart(
    tmp_path: Path, architecture: str, fields: dict[str, object]
) -> None:
    assert not packs(tmp_path, architecture, **(SMALL | fields))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "gemma", "phi3", "olmo2"])
def test_models_of_attention_alone_are_packed(tmp_path: Path, architecture: str) -> None:
    assert packs(tmp_path, architecture, **SMALL, num_key_value_heads=2, pad_token_id=0)
