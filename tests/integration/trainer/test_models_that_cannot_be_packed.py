"""A model that would mix packed samples is computed side by side, or refused."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from telescope.errors import UserError
from telescope.trainer.capability import choose_execution
from telescope.trainer.model import Execution

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}


def choose(folder: Path, architecture: str, **fields: Any) -> Execution:
    config = AutoConfig.for_model(architecture, **fields)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(folder)
    return choose_execution(str(folder), 16, plain_too=True)


def packs(folder: Path, architecture: str, **fields: Any) -> bool:
    return choose(folder, architecture, **fields).packs


@pytest.mark.parametrize("architecture", ["mamba", "jamba"])
def test_layers_of_which_the_engine_keeps_a_function_are_refused(tmp_path, architecture):
    with pytest.raises(UserError, match=r"has Mamba layers, .* cannot be checked"):
        packs(tmp_path, architecture, **({} if architecture == "mamba" else SMALL))


@pytest.mark.parametrize(("architecture", "fields"), [
    ("lfm2", {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2}),
    ("bloom", {"n_head": 4, "n_layer": 2}), ("falcon", {}), ("nemotron", {"num_key_value_heads": 2}),
])  # fmt: skip
def test_convolutions_and_attention_that_cannot_be_replaced_keep_samples_apart(tmp_path, architecture, fields):
    assert not packs(tmp_path, architecture, **(SMALL | fields))


@pytest.mark.parametrize("architecture", [
    "qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "gemma", "gemma2", "phi3", "olmo2", "mixtral", "granite",
])  # fmt: skip
def test_models_of_attention_alone_are_packed(tmp_path, architecture):
    assert packs(tmp_path, architecture, **SMALL, num_key_value_heads=2, pad_token_id=0)


MOST_OF_A_DEFAULT = 2048
"""A layer of the usual default, 4,096, takes gigabytes in some families; `SMALL` replaces it."""
SIZES: dict[str, dict[str, Any]] = {
    "mamba2": {"hidden_size": 64, "num_heads": 2, "head_dim": 64, "n_groups": 1},
    **{name: {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4} for name in ("zamba", "zamba2")},
}
"""Of types whose sizes depend on each other."""
NOT_OF_TEXT = {"musicgen", "musicgen_melody"}
"""Types whose configs are made of those of other models."""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - NOT_OF_TEXT))
def test_every_architecture_is_computed_right_or_refused_in_words(tmp_path, architecture):
    """Only what equals transformers' own numbers is accepted, so that nothing wrong is."""
    fields = SIZES.get(architecture)
    if fields is None:
        text = AutoConfig.for_model(architecture).get_text_config()
        is_large = (getattr(text, "hidden_size", 0) or 0) > MOST_OF_A_DEFAULT
        fields = SMALL | {"num_key_value_heads": 4} if is_large else {}
    found: Execution | str
    try:
        found = choose(tmp_path, architecture, **fields)
    except UserError as error:
        found = str(error)
    assert isinstance(found, Execution) or found.startswith("model: ")
