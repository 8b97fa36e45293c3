"""A division of a model that is impossible is refused before anything starts, with the field to change."""

from __future__ import annotations

import pytest
from tests.unit.config.test_rules import build

from telescope.config import preflight
from telescope.config.megatron import MODEL_TYPES, check_division, check_model_type, megatron_memory
from telescope.config.model_shape import ModelShape
from telescope.errors import ConfigError
from telescope.trainer.backends.megatron.families import LAYERS

QWEN3_4B = ModelShape(36, 2560, 9728, 32, 8, 128, 151936, tied_embeddings=True, qk_norm=True)
EXPERTS = ModelShape(
    48, 2048, 6144, 32, 4, 128, 151936, tied_embeddings=False, qk_norm=True, num_experts=128,
    expert_intermediate_size=768, experts_per_token=8,
)  # fmt: skip
TP, PP, CP, EP = (f"megatron_{kind}_parallel_size" for kind in ("tensor", "pipeline", "context", "expert"))


def megatron(**changes):
    options = {"train_backend": "megatron", "trainer_num_workers": 240, "megatron_sequence_parallel": False}
    return build(options | changes)


@pytest.mark.parametrize(
    ("shape", "changes", "field", "what"),
    [
        (QWEN3_4B, {TP: 3}, TP, "32 attention heads"),
        (QWEN3_4B, {TP: 16}, TP, "8 key and value heads"),
        (QWEN3_4B, {PP: 5}, PP, "36 layers"),
        (QWEN3_4B, {EP: 2}, EP, "has no experts"),
        (QWEN3_4B, {TP: 2, CP: 3}, CP, "16 attention heads"),
        (EXPERTS, {EP: 3}, EP, "128 experts"),
        (EXPERTS, {TP: 2, EP: 2}, "megatron_sequence_parallel", "has experts"),
    ],
)
def test_an_impossible_division_names_the_field_and_the_size(shape, changes, field, what):
    with pytest.raises(ConfigError, match=field) as error:
        check_division(megatron(**changes), shape)
    assert what in str(error.value)


def test_possible_divisions_pass():
    check_division(megatron(**{TP: 4, PP: 3, CP: 4}), QWEN3_4B)
    check_division(megatron(**{TP: 2, EP: 8, "megatron_sequence_parallel": True}), EXPERTS)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(preflight, "is_installed", lambda name: name != "megatron.core")
    with pytest.raises(ConfigError, match="make setup MEGATRON=1"):
        preflight.check_megatron(megatron())
    preflight.check_megatron(build({}))


def test_the_families_that_are_checked_have_tables():
    assert set(MODEL_TYPES) == set(LAYERS)
    with pytest.raises(ConfigError, match=r"gpt2.*fsdp"):
        check_model_type(megatron(), "gpt2")
    check_model_type(build({}), "gpt2")


@pytest.mark.parametrize("changes", [{TP: 2}, {PP: 2}, {CP: 2}, {"megatron_optimizer_cpu_offload": True}])
def test_each_division_lowers_the_estimate(changes):
    fixed = {"seq_len": 65536, "megatron_use_distributed_optimizer": False}
    whole = megatron_memory(megatron(**fixed), QWEN3_4B, "cuda").total
    assert megatron_memory(megatron(**fixed, **changes), QWEN3_4B, "cuda").total < whole


def test_experts_are_divided_by_expert_parallelism():
    parts = [megatron_memory(megatron(**{EP: size}), EXPERTS, "cuda").parameters for size in (1, 8)]
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    assert parts[0] - parts[1] == pytest.approx(experts * 7 / 8)


def test_the_optimizer_of_experts_is_divided_over_the_ranks_that_have_the_same_experts():
    options = {EP: 8, "trainer_num_workers": 8, "megatron_use_distributed_optimizer": True}
    eight = megatron_memory(megatron(**options), EXPERTS, "cuda").optimizer
    sixteen = megatron_memory(megatron(**options | {"trainer_num_workers": 16}), EXPERTS, "cuda").optimizer
    experts = 48 * 16 * 3 * 2048 * 768 * 12  # of one rank of eight: float32 weights and both moments
    assert eight > experts
    assert sixteen == pytest.approx(eight / 2)
