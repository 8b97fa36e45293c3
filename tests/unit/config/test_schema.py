"""The schema holds every documented field with its default, and a resolved configuration cannot be changed."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from pydantic import ValidationError

from telescope.config import EnvironmentEntry, EvalEntry, TelescopeConfig
from telescope.config.base import Section, accepts, freeze, thaw
from telescope.config.schema import SECTIONS

COUNTDOWN = [{"name": "countdown"}]

DOCUMENTED_DEFAULTS = {
    "debug": False, "model": "Qwen/Qwen2.5-3B", "model_dtype": "float32", "mixed_precision_dtype": "bfloat16",
    "inference_num_workers": 2, "inference_tensor_parallel_size": 1, "trainer_num_workers": 2,
    "max_concurrent_prompts_per_server": 32, "prompts_batch_size_for_trainer": 16, "number_of_steps": 300,
    "max_async_rollout": 2, "discard_group_zero_advantage": True, "enable_prompt_prefetch": True,
    "prompt_prefetch_buffer_size": 24, "enable_individual_sample_lanes": True, "free_lane_after_generation": True,
    "max_off_policy_steps": 8, "learning_rate": 1e-6, "weight_decay": 0.0, "grad_clip": 1.0,
    "lr_scheduler": "constant", "warmup_steps": 0, "min_lr_ratio": 0.0, "train_backend": "fsdp", "algorithm": "grpo",
    "number_of_minibatches": 1, "advantage_norm": "group", "use_ppo_clip": False, "ppo_clip_ref_logprobs": "rollout",
    "clip_low": 0.4, "clip_high": 0.5, "sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05,
    "dr_grpo_loss_agg_mode": "token_mean", "use_tis": False, "tis_cap": 2.0, "tis_logprob_clamp": 20.0,
    "entropy_chunk_size": 1024, "group_size": 8, "temperature": 1.0, "top_p": None, "max_tokens": 3700,
    "interleaved_rollouts": True, "seq_len": 4096, "pad_to_multiple_of": 64, "inference_host": "0.0.0.0",
    "inference_base_port": 8100, "gpu_memory_utilization": 0.9, "max_model_len": 4096,
    "vllm_scheduling_policy": "priority", "enable_thinking": False, "chat_template": None, "checkpoint_every": False,
    "checkpoint_save_training_state": True, "resume_from_checkpoint": False, "checkpoint_dir": None,
    "checkpoint_keep_last": None, "checkpoint_keep_every": None, "eval_before_training": True,
    "eval_after_training": True, "eval_num_servers": 1, "eval_start_end_use_all_servers": True, "use_wandb": True,
    "wandb_project": "telescope", "wandb_run_name": "telescope_run", "wandb_tags": ["telescope"],
    "wandb_upload_code": True, "wandb_upload_logs": True, "wandb_upload_logs_detailed": False,
    "wandb_upload_logs_stdout": False, "wandb_code_max_file_size_mb": 2.0,
    "system_metrics_collection_interval_seconds": 1.0, "torch_memory_sample_interval_seconds": 0.1,
    "event_tail_window_seconds": 60, "event_block_duration_seconds": 1800, "event_upload_interval_seconds": 5,
    "metrics_logger_interval_seconds": 2.0, "ray_torch_memory_drain_interval_seconds": 0.5, "rollout_block_size": 500,
    "track_gpu_events": True, "ray_address": "auto", "ray_auto_start_local": True, "ray_namespace": "telescope",
    "ray_log_to_driver": True, "ray_runtime_env": None, "ray_disable_runtime_env_hook": True,
    "ray_pin_py_executable": True, "ray_propagate_active_venv": True, "ray_propagate_run_dir": True,
    "ray_broadcast_init_timeout_s": 300, "ray_broadcast_prefer_loopback_if_single_node": True,
    "ray_shutdown_on_exit": False, "ray_inference_cpus_per_worker": 4.0, "ray_trainer_cpus_per_worker": 4.0,
    "ray_inference_placement_strategy": "PACK", "ray_trainer_placement_strategy": "PACK",
    "ray_placement_timeout_s": 900, "weight_broadcast_mode": "flattened_bucket", "weight_broadcast_bucket_mb": 256,
    "weight_broadcast_cpu_staging": False, "weight_broadcast_pin_memory": True,
    "weight_broadcast_free_grad_buffers": True, "megatron_tensor_parallel_size": 1,
    "megatron_pipeline_parallel_size": 1, "megatron_context_parallel_size": 1, "megatron_expert_parallel_size": 1,
    "megatron_global_batch_size": None, "megatron_disable_unified_memory_jit": True,
    "megatron_optimizer_cpu_offload": False, "megatron_optimizer_offload_fraction": 1.0,
    "megatron_overlap_cpu_optimizer_d2h_h2d": True, "megatron_use_precision_aware_optimizer": False,
    "megatron_main_grads_dtype": "float32", "megatron_main_params_dtype": "float32",
    "megatron_exp_avg_dtype": "float32", "megatron_exp_avg_sq_dtype": "float32", "megatron_grad_reduce_in_fp32": True,
    "megatron_gradient_checkpointing": True, "megatron_sequence_parallel": True,
    "megatron_use_distributed_optimizer": True, "megatron_overlap_grad_reduce": False,
    "megatron_use_transformer_engine": False, "megatron_fp8": False, "enable_vllm_tracing": True,
    "otlp_receiver_port": 4318,
    # Fields beyond the reference document, whose names files in use rely on: off or null.
    "tis_floor": None, "clip_ratio_c": None, "kl_penalty_tau": 0.0, "entropy_coef": 0.0, "seq_is_masking": False,
    "seq_is_mask_low": 0.8, "seq_is_mask_high": 1.2, "filter_overlong": False, "overlong_penalty_factor": 0.0,
    "overlong_buffer_tokens": 256, "filter_repetition": False, "repetition_compression_threshold": 10.0,
    "filter_gibberish": False, "gibberish_token_threshold": 100000, "gibberish_logprob_offset": 2.0,
    "fsdp_context_parallel_size": 1, "max_num_seqs": None, "max_num_batched_tokens": None,
    "eager_prepare_resources": False,
    # Ours.
    "seed": 0, "normalize_rewards": False, "inference_dtype": None, "inflight_kv": "keep", "weight_probe_every": 50,
    "record_tokens": 8,
}  # fmt: skip


def config(**values: object) -> TelescopeConfig:
    return TelescopeConfig(**{"environments": COUNTDOWN, **values})


def numeric_fields() -> list[tuple[type[Section], str]]:
    """Every field that takes whole numbers, or seconds."""
    kinds = [*SECTIONS, EnvironmentEntry, EvalEntry]
    return [
        (kind, name)
        for kind in kinds
        for name in kind.model_fields
        if accepts(kind, name, int) or name.endswith(("_seconds", "_s"))
    ]


@pytest.mark.parametrize(("section", "name"), numeric_fields(), ids=lambda value: getattr(value, "TITLE", value))
def test_no_number_is_without_an_upper_bound(section, name):
    values = {"name": "a"} if section in (EnvironmentEntry, EvalEntry) else {}
    with pytest.raises(ValidationError, match=name):
        section(**values, **{name: 10**30})


@pytest.mark.parametrize("name", ["run_dir", "checkpoint_dir", "chat_template", "model", "wandb_run_name"])
def test_no_text_is_blank(name):
    for text in ("", " "):
        with pytest.raises(ValidationError, match=name):
            config(**{name: text})


@pytest.mark.parametrize("address", ["9400", ":9400", "host:", "host:x", "a host:9400", "host:99999", ""])
def test_an_address_for_prometheus_has_a_host_and_a_port(address):
    with pytest.raises(ValidationError, match="it must be HOST:PORT"):
        config(prometheus_address=address)
    assert config(prometheus_address="[::1]:9400").prometheus_address == "[::1]:9400"


def test_every_documented_field_has_its_documented_default():
    values = config().values
    assert {name: values.get(name, "missing") for name in DOCUMENTED_DEFAULTS} == DOCUMENTED_DEFAULTS


def test_sections_hold_every_field_once_and_in_order():
    in_sections = [name for section in SECTIONS for name in section.model_fields]
    assert in_sections == list(TelescopeConfig.model_fields)
    assert len(set(in_sections)) == len(in_sections)


def test_a_field_cannot_be_assigned():
    with pytest.raises(ValidationError):
        config().learning_rate = 1.0


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.wandb_tags.append("x"),
        lambda c: c.wandb_tags.__setitem__(0, "x"),
        lambda c: c.environments.clear(),
        lambda c: c.environments[0].kwargs.update(a=1),
        lambda c: c.environments[0].kwargs["nested"]["deep"].append(1),
        lambda c: c.environments[0].kwargs["nested"].pop("deep"),
        lambda c: c.ray_runtime_env["env_vars"].setdefault("A", "b"),
    ],
)
def test_nothing_inside_a_config_can_be_changed(change):
    frozen = config(
        environments=[{"name": "a", "kwargs": {"nested": {"deep": [1]}}}], ray_runtime_env={"env_vars": {"A": "1"}}
    )
    before = frozen.to_json()
    with pytest.raises(TypeError, match="frozen"):
        change(frozen)
    assert frozen.to_json() == before


def test_two_configs_do_not_share_their_defaults():
    assert config().wandb_tags is not config().wandb_tags


def test_frozen_values_survive_pickling_and_copying_and_stay_frozen():
    value = freeze({"a": [1, {"b": (2, 3)}]})
    for copied in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        assert copied == {"a": [1, {"b": [2, 3]}]}
        with pytest.raises(TypeError):
            copied["a"].append(4)
    plain = thaw(value)
    plain["a"].append(4)
    assert value["a"] == [1, {"b": [2, 3]}]
    assert json.loads(json.dumps(value)) == value


def test_a_pickled_config_is_the_same_config():
    original = config(learning_rate=3e-4)
    restored = pickle.loads(pickle.dumps(original))
    assert restored == original
    assert restored.hash == original.hash
    assert restored.user_set == original.user_set


def test_replace_validates_and_counts_as_chosen():
    changed = config(seed=1).replace(learning_rate=1e-3)
    assert changed.learning_rate == 1e-3
    assert changed.user_set == {"environments", "seed", "learning_rate"}
    with pytest.raises(ValidationError):
        changed.replace(learning_rate=-1)
    with pytest.raises(TypeError, match="replace"):
        changed.model_copy(update={"learning_rate": -1})


def test_user_set_contains_exactly_the_chosen_fields():
    assert config(learning_rate=1e-6).user_set == {"environments", "learning_rate"}


def test_a_boolean_is_not_read_as_a_number():
    for field in ("group_size", "learning_rate", "seed"):
        with pytest.raises(ValidationError, match="boolean"):
            config(**{field: True})
    assert config(checkpoint_every=False).checkpoint_every is False
    assert config(checkpoint_every=50).checkpoint_every == 50
    assert config(resume_from_checkpoint=True).resume_from_checkpoint is True


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1: 2}, {"a": {"b"}}])
def test_what_json_cannot_carry_is_refused_in_free_form_values(value):
    with pytest.raises(ValidationError):
        config(environments=[{"name": "a", "kwargs": {"x": value}}])


def test_derived_numbers():
    eight = config(inference_num_workers=8, inference_tensor_parallel_size=2, max_concurrent_prompts_per_server=4)
    assert eight.num_inference_servers == 4
    assert eight.lanes_per_server == 32
    assert config().engine_dtype == "bfloat16"
    assert config(mixed_precision_dtype=None).engine_dtype == "float32"
    assert config(inference_dtype="float16").engine_dtype == "float16"
