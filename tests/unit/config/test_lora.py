"""Which layers get an adapter is decided before anything starts, as the trainer decides it."""

import pytest
import torch
from tests.unit.config.test_rules import build
from transformers import AutoConfig, AutoModelForCausalLM

from telescope.config.lora import adapter_parameters, linear_layers
from telescope.config.megatron import MODEL_TYPES
from telescope.config.model_checks import check_shape
from telescope.config.model_files import ModelReport
from telescope.config.model_shape import ModelShape, known_shape
from telescope.errors import ConfigError
from telescope.trainer.lora import find_targets

REPORT = ModelReport("a table", known_shape("Qwen/Qwen3-4B"), "its files are not here")


def test_adapters_have_the_parameters_of_their_layers():
    shape = known_shape("Qwen/Qwen3-14B")
    # Of a block: q and o 5120 x 5120, k and v 5120 x 1024, three matrices of 5120 x 17408.
    everything = 40 * 16 * (2 * 10_240 + 2 * 6144 + 3 * 22_528)
    assert adapter_parameters(shape, 16, "all-linear") == everything == 64_225_280
    assert adapter_parameters(shape, 16, ["q_proj", "self_attn.v_proj"]) == 40 * 16 * (10_240 + 6144)
    assert adapter_parameters(shape, 8, r".*layers\.0\.mlp\..*") == 8 * 3 * 22_528
    experts = known_shape("Qwen/Qwen3-30B-A3B")
    assert adapter_parameters(experts, 4, "all-linear") == 48 * 4 * (2 * (2048 + 4096) + 2 * (2048 + 512))


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_a_shape_names_the_modules_of_transformers(family):
    experts = {"num_experts": 2} if family == "qwen3_moe" else {}
    config = AutoConfig.for_model(family, num_hidden_layers=2, **experts)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_config(config.to_dict())
    assert [name for name, _, _ in linear_layers(shape)] == find_targets(model, "all-linear")


@pytest.mark.parametrize(("targets", "words"), [
    ("q_proj", "'q_proj' matches nothing in the model"),
    ("nonsense", "'nonsense' matches nothing in the model"),
    (["q_proj", "nonsense"], "'nonsense' matches nothing in the model"),
    (["lm_head"], "'lm_head' matches nothing in the model"),
])  # fmt: skip
def test_adapters_on_what_has_none_are_refused(targets, words):
    with pytest.raises(ConfigError, match=r"^lora_target_modules: .* Choose from down_proj, gate_proj, ") as error:
        check_shape(build({"lora_rank": 8, "lora_target_modules": targets}), REPORT)
    assert words in str(error.value)


@pytest.mark.parametrize("targets", ["all-linear", ".*q_proj", ["q_proj", "mlp.up_proj"]])
def test_adapters_on_linear_layers_pass(targets):
    check_shape(build({"lora_rank": 8, "lora_target_modules": targets}), REPORT)


@pytest.mark.parametrize("targets", [5, [], ["q_proj", 5], {"q_proj": 8}, " "])
def test_a_wrong_type_is_told_what_the_field_takes(targets):
    with pytest.raises(ConfigError, match=r"^lora_target_modules is .*, a regular expression, or a list of names"):
        build({"lora_rank": 8, "lora_target_modules": targets})
