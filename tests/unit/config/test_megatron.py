"""A division of a model that is impossible is refused before anything starts, with the field to change."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.config.test_rules import build
from transformers import AutoConfig

from telescope.config import megatron as rules_of_megatron
from telescope.config.megatron import (
    MODEL_TYPES,
    check_architecture,
    check_division,
    check_gpu_fields,
    check_transformer_engine,
    megatron_memory,
)
from telescope.config.memory import GIB, checkpoint_bytes
from telescope.config.model_shape import ModelShape
from telescope.errors import ConfigError, UserError
from telescope.orchestrator import preflight
from telescope.trainer.backends.megatron.families import LAYERS, mappings_of, refuse_other_names
from telescope.trainer.checkpoint_names import checkpoint_tensors
from telescope.trainer.model import skeleton_of

QWEN3_4B = ModelShape(36, 2560, 9728, 32, 8, 128, 151936, tied_embeddings=True, qk_norm=True)
EXPERTS = ModelShape(
    48, 2048, 6144, 32, 4, 128, 151936, tied_embeddings=False, qk_norm=True, num_experts=128,
    expert_intermediate_size=768, experts_per_token=8,
)  # fmt: skip
TE, FP8, PRECISION_AWARE = (
    "megatron_use_transformer_engine", "megatron_fp8", "megatron_use_precision_aware_optimizer",
)  # fmt: skip
SP = "megatron_sequence_parallel"
TP, PP, CP, EP = (f"megatron_{kind}_parallel_size" for kind in ("tensor", "pipeline", "context", "expert"))


def megatron(**changes):
    options = {"train_backend": "megatron", "trainer_num_workers": 240, SP: False}
    return build(options | changes)


@pytest.mark.parametrize(("shape", "changes", "field", "what"), [
    (QWEN3_4B, {TP: 3}, TP, "32 attention heads"),
    (QWEN3_4B, {TP: 16}, TP, "8 key and value heads"),
    (QWEN3_4B, {PP: 5}, PP, "36 layers"),
    (QWEN3_4B, {EP: 2}, EP, "has no experts"),
    (QWEN3_4B, {TP: 2, CP: 3}, CP, "16 attention heads"),
    (EXPERTS, {EP: 3}, EP, "128 experts"),
    (EXPERTS, {TP: 2, EP: 2}, SP, "has experts"),
])  # fmt: skip
def test_an_impossible_division_names_the_field_and_the_size(shape, changes, field, what):
    with pytest.raises(ConfigError, match=field) as error:
        check_division(megatron(**changes), shape)
    assert what in str(error.value)


def test_possible_divisions_pass():
    check_division(megatron(**{TP: 4, PP: 3, CP: 4}), QWEN3_4B)
    check_division(megatron(**{TP: 2, EP: 8, SP: True}), EXPERTS)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(preflight, "is_installed", lambda name: name != "megatron.core")
    with pytest.raises(ConfigError, match="make setup MEGATRON=1"):
        preflight.check_megatron(megatron())
    preflight.check_megatron(build({}))


@pytest.mark.parametrize("missing", ["transformer-engine", "transformer-engine-torch"])
@pytest.mark.parametrize("changes", [{TE: True}, {TE: True, FP8: True}, {PRECISION_AWARE: True}])
def test_a_missing_transformer_engine_is_named_with_the_field_and_the_fix(monkeypatch, missing, changes):
    monkeypatch.setattr(rules_of_megatron, "installed_version", lambda name: None if name == missing else "2")
    with pytest.raises(ConfigError, match=rf"^{next(iter(changes))} is true, .*Transformer Engine.*docs/gpu.md"):
        check_transformer_engine(megatron(**changes))
    check_transformer_engine(megatron())
    check_transformer_engine(build({"train_backend": "fsdp", **changes}))


@pytest.mark.parametrize("field", [TE, PRECISION_AWARE, "megatron_optimizer_cpu_offload"])
def test_fields_that_need_a_gpu_are_refused_without_one(field):
    with pytest.raises(ConfigError, match=f"^{field} is true, which needs a GPU"):
        check_gpu_fields(megatron(**{field: True}), "cpu")
    check_gpu_fields(megatron(**{field: True}), "cuda")
    check_gpu_fields(build({field: True}), "cpu")


def test_the_estimate_knows_the_dtypes_of_the_precision_aware_optimizer():
    fixed = {"trainer_num_workers": 1}
    whole = megatron_memory(megatron(**fixed), QWEN3_4B, "cuda").optimizer
    moments = {"megatron_exp_avg_dtype": "bfloat16", "megatron_exp_avg_sq_dtype": "fp8"}
    small = megatron_memory(megatron(**fixed, **{PRECISION_AWARE: True}, **moments), QWEN3_4B, "cuda").optimizer
    assert small / whole == pytest.approx((4 + 2 + 1) / 12)


MEASURED = {
    "trainer_num_workers": 1, "seq_len": 16384, "mixed_precision_dtype": "bfloat16",
    "megatron_use_distributed_optimizer": False,
}  # fmt: skip


def test_the_estimate_counts_the_copies_of_weights_in_fp8():
    estimate = megatron_memory(megatron(**MEASURED, **{TE: True, FP8: True}), QWEN3_4B, "cuda")
    assert (estimate.total - estimate.overhead) / GIB == pytest.approx(78.43, rel=0.01)  # benchmarks/results/megatron


@pytest.mark.parametrize(("changes", "copied"), [
    ({"megatron_grad_reduce_in_fp32": False}, 4),
    ({"megatron_grad_reduce_in_fp32": False, PRECISION_AWARE: True, "megatron_main_grads_dtype": "bfloat16"}, 0),
    ({}, 0),
])  # fmt: skip
def test_an_update_copies_half_precision_gradients_to_float32(changes, copied):
    estimate = megatron_memory(megatron(**MEASURED, **changes), QWEN3_4B, "cuda")
    assert estimate.tables == copied * QWEN3_4B.num_parameters
    assert estimate.total >= estimate.states + estimate.tables


@pytest.mark.parametrize(("dtype", "num_bytes"), [("bfloat16", 14), (None, 12)])
def test_a_checkpoint_has_a_master_copy_beside_half_precision_alone(dtype, num_bytes):
    run = megatron(mixed_precision_dtype=dtype, model_dtype="float32")
    assert checkpoint_bytes(run, QWEN3_4B) == num_bytes * QWEN3_4B.num_parameters


@pytest.mark.parametrize("family", sorted(LAYERS))
def test_transformer_engine_has_the_same_tensors_under_other_names(family):
    experts = {"num_experts": 2} if family.endswith("moe") else {}
    config = SimpleNamespace(model_type=family, num_hidden_layers=2, tie_word_embeddings=False, **experts)
    local, fused = mappings_of(config), mappings_of(config, transformer_engine=True)
    assert [mapping.names for mapping in fused] == [mapping.names for mapping in local]
    names = {each.entry.parameter.format(layer=each.layer, expert=each.expert) for each in fused}
    assert len(names) == len(fused)
    layer = "decoder.layers.1."
    assert f"{layer}self_attention.linear_qkv.layer_norm_weight" in names
    assert f"{layer}input_layernorm.weight" not in names
    if experts:
        assert {f"{layer}pre_mlp_layernorm.weight", f"{layer}mlp.experts.linear_fc1.weight1"} <= names
    else:
        assert f"{layer}mlp.linear_fc1.layer_norm_weight" in names


def test_only_families_with_a_table_are_trained():
    assert set(MODEL_TYPES) == set(LAYERS)
    with pytest.raises(ConfigError, match=r"gpt2.*fsdp"):
        check_architecture(megatron(), {"model_type": "gpt2"})
    check_architecture(build({}), {"model_type": "gpt2"})


@pytest.mark.parametrize("written_by", ["hub", "transformers"])
@pytest.mark.parametrize(("family", "changes", "what"), [
    ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
    ("llama", {"attention_bias": True}, "attention_bias true"),
    ("llama", {"mlp_bias": True}, "mlp_bias true"),
    ("qwen3", {"attention_bias": True}, "attention_bias true"),
    ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling of type yarn"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling of type dynamic"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding attention"),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, "sliding attention"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers [0]"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
])  # fmt: skip
def test_what_the_backend_would_compute_otherwise_is_refused_by_config_json(written_by, family, changes, what):
    with pytest.raises(ConfigError) as error:
        check_architecture(megatron(), config_json(family, changes, written_by))
    assert what in str(error.value)
    check_architecture(build({}), config_json(family, changes, written_by))


@pytest.mark.parametrize("written_by", ["hub", "transformers"])
@pytest.mark.parametrize(("family", "changes"), [
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 131072, "max_window_layers": 2}),
    ("qwen3", {"rope_scaling": None}),
    ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 1}),
])  # fmt: skip
def test_common_models_of_the_families_pass(written_by, family, changes):
    check_architecture(megatron(), config_json(family, changes, written_by))


def config_json(family: str, changes: dict[str, Any], written_by: str = "transformers") -> dict[str, Any]:
    """The content of a model's config.json: a few fields as on the hub, or all that transformers saves."""
    fields = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, **changes}
    if written_by == "hub":
        return {"model_type": family, **fields}
    if "rope_scaling" in fields:
        fields["rope_parameters"] = (fields.pop("rope_scaling") or {"rope_type": "default"}) | {"rope_theta": 1e4}
    return AutoConfig.for_model(family, **fields).to_dict()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(LAYERS))
def test_a_table_has_the_tensors_of_its_family(family, tied):
    experts = {"num_experts": 2} if family == "qwen3_moe" else {}
    config = AutoConfig.for_model(family, num_hidden_layers=2, tie_word_embeddings=tied, **experts)
    expected = {name for name, _ in checkpoint_tensors(skeleton_of(config.to_dict()))}
    mappings = mappings_of(config)
    refuse_other_names(mappings, expected)
    with pytest.raises(UserError, match=r"no mapping for model\.layers\.0\.mlp\.gain"):
        refuse_other_names(mappings, expected | {"model.layers.0.mlp.gain"})
    with pytest.raises(UserError, match=r"it lacks model\.norm\.weight"):
        refuse_other_names(mappings, expected - {"model.norm.weight"})


@pytest.mark.parametrize(("capabilities", "is_refused"), [([9.0, 8.9], True), ([9.0, 10.0], False), ([], False)])
def test_fp8_needs_hopper(monkeypatch, capabilities, is_refused):
    monkeypatch.setattr(rules_of_megatron, "installed_version", lambda name: "2")
    monkeypatch.setattr(preflight, "resolve_device", lambda *_: "cuda")
    monkeypatch.setattr(preflight, "visible_gpu_capabilities", lambda: capabilities)
    run = megatron(**{TE: True, FP8: True})
    with pytest.raises(ConfigError, match=r"^megatron_fp8 is true.*has 8\.9") if is_refused else nullcontext():
        preflight.check_gpu_fields(run)


@pytest.mark.parametrize("changes", [{TP: 2}, {PP: 2}, {CP: 2}, {"megatron_optimizer_cpu_offload": True}])
def test_each_division_lowers_the_estimate(changes):
    fixed = {"seq_len": 65536}
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
