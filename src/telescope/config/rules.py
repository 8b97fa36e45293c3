"""Rules between fields, and their application.

A rule with an `adjust` fails when the user set the field that it is about; when only the default breaks it, the field
is adjusted and the run reports that. A rule without `adjust` always fails. All broken rules are reported at once.

Pure functions of the configuration: machine and files are checked in `plan` and `orchestrator.preflight`. Rules of
Megatron and of adapters are in `megatron` and `lora`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from telescope.config.algorithms import ALGORITHM_FACTS, AlgorithmFacts, names_where
from telescope.config.base import Rule, requires, up_to_multiple
from telescope.config.lora import LORA_RULES
from telescope.config.megatron import MEGATRON_RULES
from telescope.config.messages import ENTRY_TYPES, show
from telescope.errors import ConfigError

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig


def apply_rules(config: TelescopeConfig, user_set: frozenset[str]) -> list[str]:
    """Returns a note for each default that breaks a rule and is adjusted. Raises `ConfigError` for the other rules."""
    notes: list[str] = []
    problems: list[str] = []
    for rule in RULES:
        if not rule.broken(config):
            continue
        field = rule.fields[0]
        if rule.adjust is None or field in user_set:
            problems.append(_problem(rule, config))
            continue
        before, after = getattr(config, field), rule.adjust(config)
        config.__dict__[field] = after  # past the freezing of the model; later rules see the new value
        if rule.is_reported:
            reason = f"it {rule.statement}{_because(rule, config)}"
            notes.append(f"{field} adjusted from {show(before)} to {show(after)}: {reason}.")
    # An adjusted value may break a rule that came before.
    problems = problems or [_problem(rule, config) for rule in RULES if rule.broken(config)]
    if problems:
        raise ConfigError("\n".join(problems))
    return notes


def _problem(rule: Rule, config: TelescopeConfig) -> str:
    field = rule.fields[0]
    subject = field if field in ENTRY_TYPES else f"{field} is {show(getattr(config, field))}, but it"
    return f"{subject} {rule.statement}{_because(rule, config)}. {rule.fix(config)}"


def _because(rule: Rule, config: TelescopeConfig) -> str:
    others = ", ".join(f"{name} is {show(getattr(config, name))}" for name in rule.fields[1:])
    return f" ({others})" if others else ""


def _facts(config: TelescopeConfig) -> AlgorithmFacts:
    return ALGORITHM_FACTS[config.algorithm]


def _repeated(entries: list[Any]) -> list[str]:
    seen: list[tuple[str, Any]] = []
    repeated = []
    for entry in entries:
        key = (entry.name, entry.kwargs)
        if key in seen:
            repeated.append(entry.name)
        seen.append(key)
    return repeated


def _evals_over_context(config: TelescopeConfig) -> list[str]:
    return [entry.name for entry in config.evals if (entry.max_tokens or 0) > config.max_model_len]


MOST_OF_SHARED_GPU, SHARE_OF_SHARED_GPU = 0.85, 0.4
"""Largest share of a shared GPU's memory for the server, to which the default is adjusted."""


def _shares_gpus(config: TelescopeConfig) -> bool:
    return config.share_gpus and config.device != "cpu"


WANDB_NAME_LENGTH, WANDB_TAG_LENGTH = 128, 64
"""Longest name of a project or run, and longest tag, in characters: W&B refuses others."""

NOT_IN_WANDB_PROJECT = "/\\#?%:"
"""Characters that W&B refuses in the name of a project."""


def _refused_tags(config: TelescopeConfig) -> list[str]:
    return [tag for tag in config.wandb_tags if not 1 <= len(tag) <= WANDB_TAG_LENGTH]


RULES: tuple[Rule, ...] = (
    Rule(
        ("environments",),
        "must name at least one environment",
        lambda c: not c.environments,
        lambda c: "Add one, for example `environments: [{name: countdown}]`",
    ),
    Rule(
        ("environments",),
        "must not repeat an entry with the same name and kwargs",
        lambda c: bool(_repeated(c.environments)),
        lambda c: f"Merge the entries of {', '.join(_repeated(c.environments))} into one with the sum of their weights",
    ),
    Rule(
        ("inference_num_workers", "inference_tensor_parallel_size"),
        "must be divisible by inference_tensor_parallel_size",
        lambda c: c.inference_num_workers % c.inference_tensor_parallel_size != 0,
        lambda c: (
            "Set inference_num_workers to "
            f"{up_to_multiple(c.inference_num_workers, c.inference_tensor_parallel_size)}, or lower "
            "inference_tensor_parallel_size"
        ),
        lambda c: up_to_multiple(c.inference_num_workers, c.inference_tensor_parallel_size),
    ),
    requires("free_lane_after_generation", "enable_individual_sample_lanes", lambda c: False),
    Rule(
        ("max_tokens", "max_model_len"),
        "must not be above max_model_len, which holds the prompt and the answer",
        lambda c: c.max_tokens > c.max_model_len,
        lambda c: f"Lower max_tokens to at most {c.max_model_len}, or raise max_model_len",
        lambda c: c.max_model_len,
    ),
    Rule(
        ("evals", "max_model_len"),
        "must not have max_tokens above max_model_len in any entry",
        lambda c: bool(_evals_over_context(c)),
        lambda c: f"Lower max_tokens of {', '.join(_evals_over_context(c))}, or raise max_model_len",
    ),
    Rule(
        ("seq_len", "max_tokens", "max_model_len"),
        "must be at least max_tokens, or the longest answers could not be trained on",
        lambda c: c.seq_len < min(c.max_tokens, c.max_model_len) and c.overlong_samples == "error",
        lambda c: f"Set seq_len to {c.max_model_len}, lower max_tokens, or set overlong_samples to 'truncate'",
        lambda c: c.max_model_len,
    ),
    Rule(
        ("pad_to_multiple_of", "seq_len"),
        "must not be above seq_len",
        lambda c: c.pad_to_multiple_of > c.seq_len,
        lambda c: "Lower pad_to_multiple_of, or raise seq_len",
        lambda c: 1,
    ),
    Rule(
        ("number_of_minibatches", "prompts_batch_size_for_trainer"),
        "must not be above prompts_batch_size_for_trainer, because groups stay whole",
        lambda c: c.number_of_minibatches > c.prompts_batch_size_for_trainer,
        lambda c: f"Lower number_of_minibatches to at most {c.prompts_batch_size_for_trainer}",
    ),
    Rule(
        ("warmup_steps", "number_of_steps", "lr_scheduler"),
        'must be below number_of_steps with lr_scheduler "linear" and "cosine", or nothing is left to decay',
        lambda c: c.lr_scheduler in ("linear", "cosine") and c.warmup_steps >= c.number_of_steps,
        lambda c: "Lower warmup_steps, or raise number_of_steps",
    ),
    # Algorithms. An importance ratio is applied once, or not at all.
    Rule(
        ("use_ppo_clip", "algorithm"),
        f"is incompatible with {names_where(lambda facts: facts.holds_ratio)}, whose losses bound the ratio themselves",
        lambda c: c.use_ppo_clip and _facts(c).holds_ratio,
        lambda c: f"Set use_ppo_clip to false, or choose {names_where(lambda facts: not facts.holds_ratio)}",
    ),
    Rule(
        ("use_tis", "algorithm", "use_ppo_clip", "ppo_clip_ref_logprobs"),
        f"cannot be combined with use_ppo_clip, {names_where(lambda facts: facts.holds_ratio)} while "
        'ppo_clip_ref_logprobs is "rollout": the importance ratio would count twice',
        lambda c: c.use_tis and c.ppo_clip_ref_logprobs == "rollout" and (c.use_ppo_clip or _facts(c).holds_ratio),
        lambda c: 'Set ppo_clip_ref_logprobs to "batch", or use_tis to false',
    ),
    Rule(
        ("advantage_norm", "algorithm"),
        f'must be "batch" for {names_where(lambda facts: facts.advantage_norms == ("batch",))}, and "group" for '
        f"{names_where(lambda facts: facts.advantage_norms == ('group',))}",
        lambda c: c.advantage_norm not in _facts(c).advantage_norms,
        lambda c: f'Set advantage_norm to "{_facts(c).advantage_norms[0]}", or choose another algorithm',
        lambda c: _facts(c).advantage_norms[0],
    ),
    Rule(
        ("clip_ratio_c", "use_ppo_clip"),
        f"requires use_ppo_clip; with {names_where(lambda facts: facts.holds_ratio)} it has no effect",
        lambda c: c.clip_ratio_c is not None and not c.use_ppo_clip and not _facts(c).holds_ratio,
        lambda c: "Set use_ppo_clip to true, or leave clip_ratio_c null",
    ),
    Rule(
        ("tis_mode", "use_tis"),
        'requires use_tis for "icepop"',
        lambda c: c.tis_mode == "icepop" and not c.use_tis,
        lambda c: 'Set use_tis to true, or tis_mode to "truncate"',
    ),
    requires("gradient_checkpointing_layers", "gradient_checkpointing"),
    requires("tis_floor", "use_tis"),
    Rule(
        ("tis_floor", "tis_cap"),
        "must be below tis_cap",
        lambda c: c.tis_floor is not None and c.tis_floor >= c.tis_cap,
        lambda c: "Lower tis_floor, or raise tis_cap",
    ),
    Rule(
        ("tis_mode", "tis_cap", "tis_floor"),
        'with "icepop" needs 1 within [tis_floor, tis_cap]: a token that engine and trainer agree on has a ratio of 1',
        lambda c: c.use_tis and c.tis_mode == "icepop" and not (c.tis_floor or 0.0) <= 1.0 <= c.tis_cap,
        lambda c: 'Set tis_floor to at most 1 and tis_cap to at least 1, or tis_mode to "truncate"',
    ),
    Rule(
        ("seq_is_mask_low", "seq_is_mask_high"),
        "must be below 1, and seq_is_mask_high above: an answer that engine and trainer agree on has a ratio of 1",
        lambda c: not c.seq_is_mask_low < 1.0 < c.seq_is_mask_high,
        lambda c: "Lower seq_is_mask_low, or raise seq_is_mask_high",
    ),
    Rule(
        ("overlong_buffer_tokens", "max_tokens", "overlong_penalty_factor"),
        "must not be above max_tokens when overlong_penalty_factor is set",
        lambda c: c.overlong_penalty_factor > 0 and c.overlong_buffer_tokens > c.max_tokens,
        lambda c: "Lower overlong_buffer_tokens, or raise max_tokens",
        lambda c: c.max_tokens,
    ),
    # Trainer parallelism.
    Rule(
        ("trainer_num_workers", "inference_num_workers", "share_gpus"),
        "must equal inference_num_workers with share_gpus, since each rank shares a GPU with a server",
        lambda c: _shares_gpus(c) and c.trainer_num_workers != c.inference_num_workers,
        lambda c: "Set trainer_num_workers and inference_num_workers to one number, or share_gpus to false",
        lambda c: c.inference_num_workers,
    ),
    Rule(
        ("fsdp_context_parallel_size", "trainer_num_workers"),
        "must divide trainer_num_workers",
        lambda c: c.train_backend != "megatron" and c.trainer_num_workers % c.fsdp_context_parallel_size != 0,
        lambda c: "Change fsdp_context_parallel_size or trainer_num_workers",
    ),
    *MEGATRON_RULES,
    # Routes of the engine.
    Rule(
        ("router_replay", "train_backend"),
        'requires train_backend "fsdp" or "megatron"',
        lambda c: c.router_replay and c.train_backend not in ("fsdp", "megatron"),
        lambda c: "Set router_replay to false",
    ),
    # Quantized servers.
    Rule(
        ("inference_quantization", "inference_dtype", "mixed_precision_dtype", "model_dtype"),
        "requires servers that compute in bfloat16 or float16",
        lambda c: c.inference_quantization != "none" and c.engine_dtype == "float32",
        lambda c: 'Set inference_dtype to "bfloat16", or inference_quantization to "none"',
    ),
    Rule(
        ("inference_quantization", "device"),
        "requires GPUs with FP8",
        lambda c: c.inference_quantization != "none" and c.device == "cpu",
        lambda c: 'Set inference_quantization to "none", or use GPUs',
    ),
    *LORA_RULES,
    # How weights reach the servers.
    Rule(
        ("weight_transfer", "inference_quantization"),
        "cannot be background with quantized servers, which quantize each layer as it arrives",
        lambda c: c.weight_transfer == "background" and c.inference_quantization != "none",
        lambda c: "Set weight_transfer to auto, or inference_quantization to none",
    ),
    Rule(
        ("weight_transfer", "inference_tensor_parallel_size"),
        "cannot be background with tensor-parallel servers, whose collectives must not run beside a transfer",
        lambda c: c.weight_transfer == "background" and c.inference_tensor_parallel_size > 1,
        lambda c: "Set weight_transfer to auto, or inference_tensor_parallel_size to 1",
    ),
    Rule(
        ("weight_transfer", "lora_sync"),
        "cannot be background with lora_sync adapter, which sends no weights to a second copy",
        lambda c: c.weight_transfer == "background" and c.lora_sync == "adapter",
        lambda c: 'Set weight_transfer to auto, or lora_sync to "merged"',
    ),
    # One GPU for a server and a rank.
    Rule(
        ("inference_tensor_parallel_size", "share_gpus"),
        "must be 1 with share_gpus: a rank shares one GPU with one server",
        lambda c: _shares_gpus(c) and c.inference_tensor_parallel_size > 1,
        lambda c: "Set inference_tensor_parallel_size to 1, or share_gpus to false",
    ),
    Rule(
        ("weight_broadcast_cpu_staging", "share_gpus"),
        "must be true with share_gpus, because NCCL does not connect two processes on one GPU",
        lambda c: _shares_gpus(c) and not c.weight_broadcast_cpu_staging,
        lambda c: "Set weight_broadcast_cpu_staging to true, or share_gpus to false",
        lambda c: True,
    ),
    Rule(
        ("gpu_memory_utilization", "share_gpus"),
        f"must leave the trainer {1 - MOST_OF_SHARED_GPU:.0%} of the GPU or more with share_gpus",
        lambda c: _shares_gpus(c) and c.gpu_memory_utilization > MOST_OF_SHARED_GPU,
        lambda c: f"Lower gpu_memory_utilization to at most {MOST_OF_SHARED_GPU:g}, or set share_gpus to false",
        lambda c: SHARE_OF_SHARED_GPU,
    ),
    # Trackers.
    Rule(
        ("use_wandb", "trackers"),
        "must be true if trackers lists wandb, and false if it does not",
        lambda c: c.trackers is not None and c.use_wandb != ("wandb" in c.trackers),
        lambda c: "Leave use_wandb out, or change trackers",
        lambda c: "wandb" in c.tracker_names,
        is_reported=False,
    ),
    Rule(
        ("wandb_project",),
        f"must have at most {WANDB_NAME_LENGTH} characters for W&B, and none of {' '.join(NOT_IN_WANDB_PROJECT)}",
        lambda c: (
            "wandb" in c.tracker_names
            and (len(c.wandb_project) > WANDB_NAME_LENGTH or not set(NOT_IN_WANDB_PROJECT).isdisjoint(c.wandb_project))
        ),
        lambda c: "Choose another name; a team (entity) is set with WANDB_ENTITY",
    ),
    Rule(
        ("wandb_run_name",),
        f"must have at most {WANDB_NAME_LENGTH} characters for W&B",
        lambda c: "wandb" in c.tracker_names and len(c.wandb_run_name) > WANDB_NAME_LENGTH,
        lambda c: f"Shorten it by {len(c.wandb_run_name) - WANDB_NAME_LENGTH}, or set use_wandb to false",
    ),
    Rule(
        ("wandb_tags",),
        f"must have tags of 1 to {WANDB_TAG_LENGTH} characters for W&B",
        lambda c: "wandb" in c.tracker_names and bool(_refused_tags(c)),
        lambda c: f"Change {', '.join(f'{show(tag)} ({len(tag)} characters)' for tag in _refused_tags(c))}",
    ),
    # Ports and servers.
    Rule(
        ("inference_base_port", "inference_num_workers"),
        "must leave a port below 65536 for each inference server",
        lambda c: c.inference_base_port + c.num_inference_servers - 1 > 65535,
        lambda c: f"Lower inference_base_port to at most {65536 - c.num_inference_servers}",
    ),
    Rule(
        ("otlp_receiver_port", "inference_base_port", "inference_num_workers"),
        "must lie outside the ports of the inference servers",
        lambda c: c.enable_vllm_tracing and 0 <= c.otlp_receiver_port - c.inference_base_port < c.num_inference_servers,
        lambda c: "Change otlp_receiver_port or inference_base_port",
        lambda c: c.inference_base_port - 1,
    ),
    Rule(
        ("eval_num_servers", "inference_num_workers"),
        "must be below the number of inference servers, because otherwise no server is left for rollouts; 0 means no "
        "evals during training",
        lambda c: c.num_eval_servers >= max(c.num_inference_servers, 1),
        lambda c: f"Lower eval_num_servers to at most {c.num_inference_servers - 1}, or raise inference_num_workers",
        lambda c: max(c.num_inference_servers - 1, 0),
    ),
)
"""Every cross-field rule. The documentation lists them, and a test breaks each of them."""
