"""The trainer refuses a checkpoint of which transformers would leave a part at random values."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model_folder import MODEL_CONFIG, write_model_folder
from transformers import (
    BertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
)

from telescope.config import TelescopeConfig
from telescope.errors import ConfigError, UserError
from telescope.trainer.model import check_weight_files, load_causal_lm
from telescope.trainer.trial import try_model

LLAMA: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32,
}  # fmt: skip
QUERY = "transformer.h.1.attn.c_attn.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=32, resid_pdrop=0.0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    return tmp_path


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path) -> Any:
    return load_causal_lm(str(folder), torch.float32, with_weights=True)


def check(folder: Path) -> None:
    check_weight_files(str(folder))


READERS = pytest.mark.parametrize("read", [load, check])
"""With the data, and by the headers alone."""


def test_a_complete_checkpoint_loads(folder):
    assert load(folder).get_parameter(QUERY).shape == (16, 48)
    check(folder)


@READERS
def test_a_tied_output_layer_and_rotary_buffers_may_be_stored(tmp_path, read):
    for tied in (True, False):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=tied))
        model.save_pretrained(tmp_path)
        stored = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
        change_tensors(tmp_path, **stored, **{"lm_head.weight": model.lm_head.weight.detach().clone()})
        read(tmp_path)
    change_tensors(tmp_path, **{"lm_head.weight": None})
    with pytest.raises(UserError, match=r"its weight files lack tensors: lm_head\.weight"):
        read(tmp_path)


@READERS
@pytest.mark.parametrize(("change", "problem"), [
    (None, f"its weight files lack tensors: {QUERY}"),
    (torch.zeros(16, 40), rf"{QUERY} with \[16, 40\] instead of \[16, 48\]"),
])  # fmt: skip
def test_a_tensor_that_is_missing_or_of_another_size_is_refused(folder, read, change, problem):
    change_tensors(folder, **{QUERY: change})
    with pytest.raises(UserError, match=problem):
        read(folder)


@READERS
def test_a_tensor_that_the_architecture_does_not_have_is_refused(folder, read):
    change_tensors(folder, **{"transformer.h.2.ln_1.weight": torch.zeros(16)})
    with pytest.raises(
        UserError, match=r"does not have: transformer.h.2.ln_1.weight. Download or save the model again"
    ):
        read(folder)


@pytest.mark.parametrize(("config", "problem"), [
    (T5Config(architectures=["T5ForConditionalGeneration"]), "is of type t5, which is no causal language model"),
    (BertConfig(architectures=["BertForMaskedLM"]), "instead of BertLMHeadModel, so that vLLM does not load it"),
    (Qwen2Config(architectures=None), r"has architectures \[\] in config.json instead of Qwen2ForCausalLM"),
    (
        {"model_type": "unheard_of"},
        "cannot be loaded: ValueError: The checkpoint you are trying to load has model type",
    ),
])  # fmt: skip
def test_an_architecture_that_is_no_language_model_is_refused(tmp_path, config, problem):
    values = config if isinstance(config, dict) else config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=problem):
        load_causal_lm(str(tmp_path), torch.float32, with_weights=False)


@pytest.mark.parametrize(("changes", "problem"), [
    ({"num_attention_heads": 0}, "ZeroDivisionError"),
    ({"hidden_size": "many"}, "hidden_size"),
    ({"num_hidden_layers": -1}, "num_hidden_layers"),
    ({"vocab_size": -3}, "RuntimeError"),
    ({"attn_implementation": "flash_attention_2"}, ""),
    ({"model_type": ["x"]}, "cannot be loaded: TypeError: unhashable type"),
])  # fmt: skip
def test_values_that_no_model_can_have_are_refused_in_one_line(tmp_path, changes, problem):
    write_model_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MODEL_CONFIG | changes))
    if not problem:
        return check(tmp_path)
    with pytest.raises(UserError, match=rf"^model: '.*{problem}.*$"):
        check(tmp_path)


def test_another_output_layer_beside_tied_embeddings_is_refused(tmp_path):
    LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)).save_pretrained(tmp_path)
    change_tensors(tmp_path, **{"lm_head.weight": torch.ones(32, 16)})
    with pytest.raises(UserError, match=r"Set tie_word_embeddings to false in config\.json"):
        load(tmp_path)


@pytest.mark.parametrize("part", [None, torch.zeros(8, 9)])
def test_an_expert_that_is_missing_or_of_another_size_is_refused(tmp_path, part):
    config = Qwen3MoeConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=8, vocab_size=32,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    change_tensors(tmp_path, **{"model.layers.0.mlp.experts.1.up_proj.weight": part})
    with pytest.raises(UserError, match=r"^model: '.*': config\.json and weight files do not fit: .*"):
        check(tmp_path)


def test_the_trial_before_a_start_reports_what_the_trainer_would_refuse(tmp_path):
    write_model_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MODEL_CONFIG | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match=r"^model: '.*' cannot be trained, because its weight files lack tensors"):
        try_model(TelescopeConfig(environments=[{"name": "countdown"}], model=str(tmp_path)))
