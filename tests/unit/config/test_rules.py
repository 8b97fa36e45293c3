"""Rules between fields: a broken user setting is an error, a broken default is adjusted."""

import pytest

from telescope.config import TelescopeConfig
from telescope.config.loader import build_config
from telescope.config.remarks import remarks, remarks_on_place, remarks_on_resuming
from telescope.config.rules import RULES
from telescope.errors import ConfigError

COUNTDOWN = [{"name": "countdown"}]
MEGATRON = {"train_backend": "megatron", "trainer_num_workers": 4}
OFFLOAD = {"megatron_optimizer_cpu_offload": True}
PRECISION_AWARE = "megatron_use_precision_aware_optimizer"

# What breaks each rule when the user sets all of it, and the field that the message must begin with.
BROKEN: list[tuple[str, dict[str, object]]] = [
    ("environments", {"environments": []}), ("environments", {"environments": COUNTDOWN * 2}),
    ("inference_num_workers", {"inference_num_workers": 3, "inference_tensor_parallel_size": 2}),
    ("free_lane_after_generation", {"free_lane_after_generation": True, "enable_individual_sample_lanes": False}),
    ("max_tokens", {"max_tokens": 5000, "max_model_len": 4096}),
    ("max_tokens", {"max_tokens": 4097, "max_model_len": 4096}),
    ("max_tokens", {"max_tokens": 4097, "max_model_len": 64, "seq_len": 64}),
    ("evals", {"evals": [{"name": "math500", "max_tokens": 9000}]}),
    ("evals", {"evals": [{"name": "math500", "max_tokens": 4097}]}),
    ("seq_len", {"seq_len": 512, "max_tokens": 1024}),
    ("pad_to_multiple_of", {"pad_to_multiple_of": 128, "seq_len": 64, "max_tokens": 32}),
    ("number_of_minibatches", {"number_of_minibatches": 17, "prompts_batch_size_for_trainer": 16}),
    ("warmup_steps", {"warmup_steps": 300, "lr_scheduler": "cosine"}),
    ("use_ppo_clip", {"use_ppo_clip": True, "algorithm": "cispo"}),
    ("use_ppo_clip", {"use_ppo_clip": True, "algorithm": "gspo"}),
    ("use_ppo_clip", {"use_ppo_clip": True, "algorithm": "sapo"}),
    ("use_tis", {"use_tis": True, "use_ppo_clip": True, "ppo_clip_ref_logprobs": "rollout"}),
    ("use_tis", {"use_tis": True, "algorithm": "cispo"}), ("use_tis", {"use_tis": True, "algorithm": "gspo"}),
    ("use_tis", {"use_tis": True, "algorithm": "sapo", "ppo_clip_ref_logprobs": "rollout"}),
    ("advantage_norm", {"advantage_norm": "group", "algorithm": "reinforce_pp"}),
    ("advantage_norm", {"advantage_norm": "batch", "algorithm": "rloo"}),
    ("advantage_norm", {"advantage_norm": "batch", "algorithm": "dr_grpo"}),
    ("clip_ratio_c", {"clip_ratio_c": 3.0}), ("tis_mode", {"tis_mode": "icepop"}),
    ("gradient_checkpointing_layers", {"gradient_checkpointing_layers": 2, "gradient_checkpointing": False}),
    ("tis_floor", {"tis_floor": 0.5}), ("tis_floor", {"tis_floor": 2.5, "use_tis": True}),
    ("seq_is_mask_low", {"seq_is_mask_low": 1.3}),
    ("seq_is_mask_low", {"seq_is_mask_low": 0.2, "seq_is_mask_high": 0.5}),
    ("tis_mode", {"use_tis": True, "tis_mode": "icepop", "tis_cap": 0.5}),
    ("tis_mode", {"use_tis": True, "tis_mode": "icepop", "tis_floor": 1.5}),
    ("overlong_buffer_tokens", {"overlong_buffer_tokens": 100, "max_tokens": 50, "overlong_penalty_factor": 1.0}),
    ("fsdp_context_parallel_size", {"fsdp_context_parallel_size": 4, "trainer_num_workers": 6}),
    ("trainer_num_workers", {**MEGATRON, "trainer_num_workers": 3, "megatron_tensor_parallel_size": 2}),
    ("megatron_sequence_parallel", {**MEGATRON, "megatron_sequence_parallel": True}),
    ("megatron_use_distributed_optimizer", {**MEGATRON, "megatron_tensor_parallel_size": 4,
     "megatron_use_distributed_optimizer": True}),
    ("megatron_fp8", {**MEGATRON, "megatron_fp8": True}),
    ("megatron_fp8", {**MEGATRON, "megatron_fp8": True, "megatron_use_transformer_engine": True,
     "mixed_precision_dtype": None}),
    ("megatron_optimizer_cpu_offload", {**MEGATRON, **OFFLOAD, "mixed_precision_dtype": "float32"}),
    ("megatron_optimizer_cpu_offload", {**MEGATRON, **OFFLOAD, "megatron_use_distributed_optimizer": False}),
    (PRECISION_AWARE, {**MEGATRON, PRECISION_AWARE: True, "megatron_use_distributed_optimizer": False}),
    (PRECISION_AWARE, {**MEGATRON, **OFFLOAD, PRECISION_AWARE: True}),
    ("megatron_exp_avg_dtype", {**MEGATRON, "megatron_exp_avg_dtype": "bfloat16"}),
    ("megatron_main_params_dtype", {**MEGATRON, PRECISION_AWARE: True, "megatron_main_params_dtype": "fp8"}),
    ("megatron_main_grads_dtype", {**MEGATRON, PRECISION_AWARE: True, "megatron_main_grads_dtype": "bfloat16"}),
    ("megatron_expert_parallel_size", {**MEGATRON, "megatron_expert_parallel_size": 8}),
    ("megatron_global_batch_size", {**MEGATRON, "megatron_global_batch_size": 7}),
    ("mixed_precision_dtype", {**MEGATRON, "mixed_precision_dtype": "float16"}),
    ("lora_rank", {**MEGATRON, "lora_rank": 8}),
    ("lora_target_modules", {"lora_rank": 8, "lora_target_modules": "q_proj("}),
    ("lora_target_modules", {"lora_rank": 8, "lora_target_modules": "a{99999999999999999999}"}),
    ("lora_target_modules", {"lora_rank": 8, "lora_target_modules": "(" * 3000 + ")" * 3000}),
    ("lora_sync", {"lora_sync": "adapter"}), ("lora_rank", {"lora_rank": 513, "lora_sync": "adapter"}),
    ("model_dtype", {"lora_rank": 8, "lora_sync": "adapter", "model_dtype": "bfloat16", "inference_dtype": "float16"}),
    ("weight_transfer", {"weight_transfer": "background", "lora_rank": 8, "lora_sync": "adapter"}),
    ("inference_quantization", {"inference_quantization": "fp8_per_block", "lora_rank": 8, "lora_sync": "adapter"}),
    ("inference_tensor_parallel_size", {"share_gpus": True, "inference_tensor_parallel_size": 2,
     "inference_num_workers": 2, "trainer_num_workers": 2, "weight_broadcast_cpu_staging": True,
     "gpu_memory_utilization": 0.4}),
    ("router_replay", {"router_replay": True, "train_backend": "package.module:Class"}),
    ("inference_quantization", {"inference_quantization": "fp8_per_block", "inference_dtype": "float32"}),
    ("inference_quantization", {"inference_quantization": "fp8_per_block", "device": "cpu"}),
    ("weight_transfer", {"weight_transfer": "background", "inference_quantization": "fp8_per_block",
     "inference_dtype": "bfloat16"}),
    ("weight_transfer", {"weight_transfer": "background", "inference_tensor_parallel_size": 2,
     "inference_num_workers": 2}),
    ("trainer_num_workers", {"share_gpus": True, "trainer_num_workers": 2, "inference_num_workers": 1}),
    ("weight_broadcast_cpu_staging", {"share_gpus": True, "weight_broadcast_cpu_staging": False}),
    ("gpu_memory_utilization", {"share_gpus": True, "gpu_memory_utilization": 0.95}),
    ("use_wandb", {"use_wandb": True, "trackers": ["tensorboard"]}),
    *(("wandb_project", {"wandb_project": name}) for name in ("me/p", "a\\b", "a#", "?", "50%", "a:b", "p" * 129)),
    ("wandb_run_name", {"wandb_run_name": "r" * 129}),
    *(("wandb_tags", {"wandb_tags": ["fine", tag]}) for tag in ("", "t" * 65)),
    ("inference_base_port", {"inference_base_port": 65535}), ("otlp_receiver_port", {"otlp_receiver_port": 8101}),
    ("eval_num_servers", {"eval_num_servers": 2, "evals": [{"name": "math500"}]}),
]  # fmt: skip

# What breaks a rule although the user did not set its field, and the value that the field is adjusted to.
ADJUSTED: list[tuple[str, object, dict[str, object]]] = [
    ("max_tokens", 1000, {"max_model_len": 1000}), ("otlp_receiver_port", 4316, {"inference_base_port": 4317}),
    ("megatron_main_grads_dtype", "bfloat16", {**MEGATRON, PRECISION_AWARE: True,
     "megatron_grad_reduce_in_fp32": False}),
    ("inference_num_workers", 4, {"inference_tensor_parallel_size": 4}),
    ("free_lane_after_generation", False, {"enable_individual_sample_lanes": False}),
    ("seq_len", 10000, {"max_tokens": 8000, "max_model_len": 10000}),
    ("pad_to_multiple_of", 1, {"seq_len": 32, "max_tokens": 16}),
    ("advantage_norm", "batch", {"algorithm": "reinforce_pp"}),
    ("overlong_buffer_tokens", 50, {"max_tokens": 50, "overlong_penalty_factor": 1.0}),
    ("trainer_num_workers", 4, {"train_backend": "megatron", "megatron_tensor_parallel_size": 4}),
    ("trainer_num_workers", 3, {"share_gpus": True, "inference_num_workers": 3}),
    ("weight_broadcast_cpu_staging", True, {"share_gpus": True}),
    ("gpu_memory_utilization", 0.4, {"share_gpus": True}), ("use_wandb", False, {"trackers": ["tensorboard"]}),
    ("megatron_sequence_parallel", False, {"train_backend": "megatron"}),
    ("megatron_use_distributed_optimizer", False, {"train_backend": "megatron", "megatron_tensor_parallel_size": 2}),
    ("eval_num_servers", 0, {"inference_num_workers": 1, "evals": [{"name": "math500"}]}),
]  # fmt: skip


def build(values: dict[str, object]) -> TelescopeConfig:
    return build_config({"environments": COUNTDOWN, **values})


@pytest.mark.parametrize(("field", "values"), BROKEN, ids=[f"{field}-{n}" for n, (field, _) in enumerate(BROKEN)])
def test_a_broken_rule_names_field_value_and_fix(field, values):
    with pytest.raises(ConfigError) as raised:
        build(values)
    (line,) = str(raised.value).splitlines()
    assert line.startswith(field)
    assert (f"{field} is " in line) == (field not in ("environments", "evals")), "their entries are too long to show"
    statement, _, fix = line.rpartition(". ")
    assert statement
    assert fix, "the message ends with what to type instead"


def test_every_rule_is_broken_by_an_example():
    unbroken = {rule.statement for rule in RULES}
    for _, values in BROKEN:
        try:
            build(values)
        except ConfigError as error:
            unbroken = {statement for statement in unbroken if statement not in str(error)}
    assert not unbroken


@pytest.mark.parametrize(
    ("field", "value", "values"), ADJUSTED, ids=[f"{field}-{n}" for n, (field, *_) in enumerate(ADJUSTED)]
)
def test_a_default_that_breaks_a_rule_is_adjusted(field, value, values):
    config = build(values)
    assert getattr(config, field) == value
    assert field not in config.user_set
    again = TelescopeConfig.from_json(config.to_json())
    assert again == config
    assert again.notes == ()


def test_every_rule_that_adjusts_has_an_example():
    assert {rule.fields[0] for rule in RULES if rule.adjust} == {field for field, *_ in ADJUSTED}


def test_an_adjusted_default_is_reported_in_one_line():
    (note,) = build({"enable_individual_sample_lanes": False}).notes
    assert note.startswith("free_lane_after_generation adjusted from true to false")
    assert "enable_individual_sample_lanes" in note


def test_a_single_server_is_for_rollouts_unless_the_user_wants_it_for_evals():
    one = {"inference_num_workers": 1, "evals": [{"name": "math500"}]}
    (note,) = build(one).notes
    assert note.startswith("eval_num_servers adjusted from 1 to 0")
    assert "no evals during training" in note
    with pytest.raises(ConfigError, match=r"eval_num_servers is 1, .*no server is left for rollouts.*Lower"):
        build({**one, "eval_num_servers": 1})
    assert build({"inference_num_workers": 1}).notes == (), "nothing is reserved without evals"


def test_all_broken_rules_are_reported_at_once():
    with pytest.raises(ConfigError) as raised:
        build({"max_tokens": 5000, "use_tis": True, "use_ppo_clip": True, "number_of_minibatches": 99})
    lines = str(raised.value).splitlines()
    assert [line.split()[0] for line in lines] == ["max_tokens", "number_of_minibatches", "use_tis"]


@pytest.mark.parametrize("values", [
    {"use_tis": True, "use_ppo_clip": True, "ppo_clip_ref_logprobs": "batch"},
    {"megatron_sequence_parallel": True, "megatron_tensor_parallel_size": 1, "trainer_num_workers": 1},
], ids=["the documented way out of the double correction", "a rule of Megatron in a run of FSDP"])  # fmt: skip
def test_what_breaks_no_rule_is_taken_as_it_is(values):
    config = build(values)
    assert {name: getattr(config, name) for name in values} == values
    assert config.notes == ()


@pytest.mark.parametrize("changes", [
    {"train_backend": "megatron", "megatron_tensor_parallel_size": 2, "inference_num_workers": 3},
    {"train_backend": "megatron", "megatron_tensor_parallel_size": 4},
    {"fsdp_context_parallel_size": 2, "inference_num_workers": 3},
])  # fmt: skip
def test_an_adjusted_default_breaks_no_earlier_rule(changes):
    with pytest.raises(ConfigError, match=r"parallel_size|trainer_num_workers"):
        build({"share_gpus": True, **changes})


def test_ranks_follow_the_servers_of_shared_gpus_before_their_division_is_checked():
    config = build({"share_gpus": True, "inference_num_workers": 4, "fsdp_context_parallel_size": 4})
    assert config.trainer_num_workers == 4
    megatron = {"train_backend": "megatron", "megatron_tensor_parallel_size": 2}
    assert build({"share_gpus": True, "inference_num_workers": 4, **megatron}).megatron_use_distributed_optimizer


@pytest.mark.parametrize(("field", "value", "others"), [
    ("megatron_tensor_parallel_size", 2, {}),
    ("lora_alpha", 16, {}),
    ("weight_broadcast_free_grad_buffers", True, {}),
    ("min_lr_ratio", 0.1, {}), ("warmup_steps", 5, {"lr_scheduler": "none"}),
    ("gradient_checkpointing", False, {"train_backend": "megatron"}),
    ("megatron_optimizer_offload_fraction", 0.5, {"train_backend": "megatron"}),
    ("megatron_overlap_cpu_optimizer_d2h_h2d", True, {"train_backend": "megatron"}),
    ("compile_blocks", False, {"train_backend": "megatron"}),
    ("fsdp_prefetch_layers", 2, {"train_backend": "megatron"}),
    ("fsdp_reshard_after_forward", False, {"train_backend": "megatron"}),
    ("gradient_checkpointing_layers", 2, {"train_backend": "megatron"}),
    ("clip_high", 0.28, {}), ("clip_high", 0.28, {"algorithm": "sapo"}), ("ppo_clip_ref_logprobs", "batch", {}),
    ("kl_estimator", "k2", {}), ("overlong_buffer_tokens", 64, {}), ("seq_is_mask_low", 0.5, {}),
    ("repetition_compression_threshold", 4, {}), ("gibberish_logprob_offset", 3, {}),
    ("sapo_tau_neg", 2, {}), ("dr_grpo_loss_agg_mode", "token_sum_norm", {}), ("tis_cap", 3, {}),
    ("prompt_prefetch_buffer_size", 9, {"enable_prompt_prefetch": False}), ("checkpoint_keep_every", 100, {}),
])  # fmt: skip
def test_a_field_that_another_switches_off_is_named(field, value, others):
    (remark,) = [text for text in remarks(build({**others, field: value})) if "no effect" in text]
    assert remark.startswith(f"{field} has no effect, because ")


@pytest.mark.parametrize("values", [
    {"clip_high": 0.28, "use_ppo_clip": True, "ppo_clip_ref_logprobs": "batch", "use_tis": True, "tis_cap": 3},
    {"clip_high": 0.28, "algorithm": "cispo", "ppo_clip_ref_logprobs": "batch"},
    {"algorithm": "sapo", "sapo_tau_neg": 2, "checkpoint_keep_every": 100, "checkpoint_keep_last": 2},
    {"algorithm": "dr_grpo", "dr_grpo_loss_agg_mode": "token_sum_norm", "prompt_prefetch_buffer_size": 9},
])  # fmt: skip
def test_fields_of_what_is_on_have_no_remark(values):
    assert remarks(build(values)) == []


@pytest.mark.parametrize(("values", "words"), [
    ({"warmup_steps": 20, "number_of_steps": 5}, "the learning rate ends at 25% of learning_rate. Lower warmup_steps"),
        ({"prompts_batch_size_for_trainer": 1, "group_size": 2, "trainer_num_workers": 4}, "has 2 samples for 4 ranks"),
])  # fmt: skip
def test_a_warm_up_beyond_the_end_is_named_and_so_is_a_batch_below_the_ranks(values, words):
    (remark,) = remarks(build(values))
    assert words in remark


def test_a_server_reserved_for_an_eval_that_never_runs_is_named_though_the_interval_is_the_default():
    reserved = {"evals": [{"name": "math500"}], "inference_num_workers": 2, "number_of_steps": 5}
    (remark,) = remarks(build(reserved))
    assert "eval_every of 'math500' is 10, and the run has 5 steps" in remark
    assert "eval_num_servers reserves 1 of 2 servers" in remark
    assert remarks(build({**reserved, "eval_num_servers": 0})) == []
    every = {**reserved, "evals": [{"name": "math500", "eval_every": 2}], "eval_num_servers": 0}
    (remark,) = remarks(build(every))
    assert remark.startswith("evals: eval_every of 'math500' has no effect, because eval_num_servers is 0")
    assert remarks(build({**reserved, "number_of_steps": 10})) == []


def test_rules_see_what_earlier_rules_adjusted():
    config = build({"inference_tensor_parallel_size": 4, "evals": [{"name": "math500"}], "inference_base_port": 65535})
    assert config.num_inference_servers == 1
    assert config.eval_num_servers == 0
    with pytest.raises(ConfigError, match="inference_base_port"):
        build({"inference_tensor_parallel_size": 4, "inference_num_workers": 8, "inference_base_port": 65535})


@pytest.mark.parametrize(("every", "count"), [(False, 1), (0, 1), (20, 0)])
def test_a_run_without_checkpoints_is_told_that_it_cannot_be_resumed(every, count):
    found = remarks_on_resuming(build({"checkpoint_every": every}))
    assert ["so a stopped run cannot be resumed. Set checkpoint_every" in text for text in found] == [True] * count


@pytest.mark.parametrize(("flags", "device", "dtype", "is_remarked"), [
    ({"avx2", "avx512f"}, "cpu", "bfloat16", True), ({"avx2", "avx512f"}, "cpu", None, False),
    ({"avx2", "avx512f"}, "cpu", "float32", False), ({"avx2", "avx512f"}, "cuda", "bfloat16", False),
    ({"avx2", "avx512f"}, None, "bfloat16", False), ({"avx2", "avx512_bf16"}, "cpu", "bfloat16", False),
    ({"avx2", "amx_bf16"}, "cpu", "bfloat16", False), (set(), "cpu", "bfloat16", False),
])  # fmt: skip
def test_bfloat16_is_remarked_on_a_cpu_that_emulates_it(monkeypatch, flags, device, dtype, is_remarked):
    monkeypatch.setattr("telescope.config.remarks.cpu_flags", lambda: frozenset(flags))
    found = remarks_on_place(build({"mixed_precision_dtype": dtype}), device, None)
    assert ["Set mixed_precision_dtype to null" in text for text in found] == [True] * is_remarked
