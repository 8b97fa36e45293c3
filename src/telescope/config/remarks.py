"""Remarks on surprising settings."""

from __future__ import annotations

import math
from collections.abc import Set
from typing import TYPE_CHECKING, Literal

from telescope.config.algorithms import ALGORITHM_FACTS
from telescope.config.machine import cpu_flags
from telescope.config.model_source import why_no_router_replay
from telescope.utils.text import pluralize

if TYPE_CHECKING:
    from telescope.config.model_shape import ModelShape
    from telescope.config.schema import TelescopeConfig

GSPO_BOUND_THAT_BINDS = 0.01
"""A sequence ratio is the exponential of a mean over hundreds of tokens: it does not leave 1 by a hundredth."""


GPU_FIELDS = frozenset({"gpu_memory_utilization", "weight_broadcast_cpu_staging", "weight_broadcast_pin_memory"})
"""Fields without effect on the CPU, which a user may expect to have one there."""

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})  # of CPUs that multiply in bfloat16; others emulate it


def remarks(config: TelescopeConfig) -> list[str]:
    """Returns remarks that depend on the configuration alone."""
    found = []
    if config.group_size == 1:
        found.append(
            "group_size is 1: a sample has nothing to be compared with, so its advantage is its reward"
            + (", whitened over the batch." if config.advantage_norm == "batch" else ".")
        )
    if 0 <= config.max_off_policy_steps < config.max_async_rollout:
        bound, ahead = config.max_off_policy_steps, config.max_async_rollout
        found.append(
            f"max_off_policy_steps is {bound}, below max_async_rollout, which is {ahead}: answers are generated up to "
            f"{pluralize(ahead, 'step')} ahead of the step that trains them, and whatever grows older than {bound} is "
            "discarded and generated again, up to half of everything. Set max_off_policy_steps to at least "
            f"{ahead}, or max_async_rollout to {bound}."
        )
    found += _age_and_waste(config)
    if config.algorithm == "gspo":
        idle = [name for name in ("clip_low", "clip_high") if getattr(config, name) > GSPO_BOUND_THAT_BINDS]
        if idle:
            values = " and ".join(f"{name} {getattr(config, name):g}" for name in idle)
            found.append(
                f"gspo clips the ratio of a whole answer, which hardly leaves 1, so {values} will not bind. "
                "The paper's values are clip_low 3e-4 and clip_high 4e-4."
            )
    if config.max_tokens == config.max_model_len:
        found.append(
            f"max_tokens equals max_model_len ({config.max_model_len}): each answer is shorter by its prompt's length."
        )
    if config.lr_scheduler == "constant" and config.warmup_steps > config.number_of_steps:
        found.append(
            f"warmup_steps is {config.warmup_steps}, and the run has {pluralize(config.number_of_steps, 'step')}: the "
            f"learning rate ends at {config.number_of_steps / config.warmup_steps:.0%} of learning_rate. Lower "
            "warmup_steps, or raise number_of_steps."
        )
    samples = config.prompts_batch_size_for_trainer * config.group_size // config.number_of_minibatches
    ranks = config.trainer_num_workers // config.fsdp_context_parallel_size
    if config.train_backend == "fsdp" and samples < ranks:
        found.append(
            f"An optimizer step has {pluralize(samples, 'sample')} for {ranks} ranks, some of which compute nothing. "
            "Raise prompts_batch_size_for_trainer or group_size, or lower number_of_minibatches or trainer_num_workers."
        )
    if config.model_dtype == "float16" and config.train_backend != "megatron" and not config.lora_rank:
        # Measured with random gradients of 1e-3 and 1e-4: steps are 140 times those of float32 after 1,500 updates.
        found.append(
            "model_dtype is float16, in which the squares of small gradients are 0: AdamW forgets them, and its steps "
            "become up to 100 times too large. Set model_dtype to bfloat16 or float32; mixed_precision_dtype may be "
            "float16."
        )
    for entry in config.evals:
        if config.num_eval_servers and entry.eval_every > config.number_of_steps:
            found.append(
                f"evals: eval_every of {entry.name!r} is {entry.eval_every}, and the run has {config.number_of_steps} "
                f"steps: it never runs during training, but eval_num_servers reserves {config.num_eval_servers} of "
                f"{config.num_inference_servers} servers. Lower eval_every, or set eval_num_servers to 0."
            )
        chosen = "eval_num_servers" in config.user_set and "eval_every" in entry.model_fields_set
        if chosen and not config.num_eval_servers:
            found.append(
                f"evals: eval_every of {entry.name!r} has no effect, because eval_num_servers is 0, so that evals run "
                "before and after training only. Raise eval_num_servers, or remove eval_every."
            )
        if entry.pass_k and (config.temperature if entry.temperature is None else entry.temperature) == 0:
            found.append(
                f"evals: {entry.name!r} has pass_k and temperature 0: all samples of an item are the same greedy "
                "answer, so pass@k is the accuracy. Set its temperature above 0, or remove pass_k."
            )
    if config.inference_quantization != "none" and not (config.use_tis or config.seq_is_masking):
        found.append(_quantization(config))
    found += _idle_fields(config)
    if config.top_p is not None and config.top_p < 1:
        found.append(_top_p(config, config.top_p))
    return found


def remarks_on_resuming(config: TelescopeConfig) -> list[str]:
    """Returns a remark on a run that cannot continue after its end."""
    remark = "No checkpoints are written, so a stopped run cannot be resumed. Set checkpoint_every, for example to 20."
    return [] if config.checkpoint_every else [remark]


def remarks_on_place(
    config: TelescopeConfig, device: Literal["cpu", "cuda"] | None, shape: ModelShape | None
) -> list[str]:
    """Returns remarks that depend on the placement and the model. None: not known."""
    why = 'device is "cpu"' if config.device == "cpu" else "no GPU was found, so that everything runs on CPU cores"
    found = _no_effect(config, GPU_FIELDS, why) if device == "cpu" else []
    if config.share_gpus and device == "cpu":
        found.append(f"share_gpus is true and has no effect, because {why}. Set share_gpus to false, or use GPUs.")
    flags = cpu_flags() if device == "cpu" and config.mixed_precision_dtype == "bfloat16" else frozenset()
    if flags and not flags & BFLOAT16_FLAGS:
        found.append(
            "mixed_precision_dtype is bfloat16, and this CPU has no instructions for it (avx512_bf16, amx_bf16): it is "
            "several times slower than float32. Set mixed_precision_dtype to null."
        )
    num_layers = shape.num_layers if shape is not None else None
    can_replay = shape is not None and why_no_router_replay(config, shape) is None
    if can_replay and not config.router_replay and device == "cuda":
        found.append(
            f"{config.model} is a mixture of experts: trainer and servers choose different experts where router "
            "logits nearly tie, so that logprobs differ (kl_divergence_inference). Set router_replay to true to "
            "train with the servers' choices."
        )
    if shape is not None and shape.num_experts and shape.router_loss:
        found.append(
            f"The config.json of {config.model} switches a load-balancing loss of its router on (output_router_logits, "
            f"router_aux_loss_coef {shape.router_loss:g}). It is left out: the loss is that of the algorithm alone."
        )
    one_by_one = config.train_backend == "megatron" and not config.megatron_use_transformer_engine
    if shape is not None and shape.num_experts and one_by_one and device == "cuda":
        found.append(
            f"{config.model} is a mixture of experts, and without megatron_use_transformer_engine train_backend "
            "megatron computes the experts of a rank one after another. Set megatron_use_transformer_engine to true "
            '(docs/gpu.md), or train_backend to "fsdp" if the model fits your GPUs that way: on one H200 a step was '
            "four times as fast (docs/large-models.md)."
        )
    layers = config.gradient_checkpointing_layers
    if layers is not None and num_layers is not None and layers > num_layers:
        found.append(
            f"gradient_checkpointing_layers is {layers}, and {config.model} has {num_layers} layers: all of them are "
            "recomputed, as without it. Set it to less than "
            f"{num_layers} so that some are not, or leave it null."
        )
    return found


def _idle_fields(config: TelescopeConfig) -> list[str]:
    """Returns remarks on fields that another field switches off."""
    is_megatron, is_fsdp = config.train_backend == "megatron", config.train_backend == "fsdp"
    algorithm, holds_ratio = config.algorithm, ALGORITHM_FACTS[config.algorithm].holds_ratio
    of_megatron = {name for name in config.user_set if name.startswith("megatron_")}
    causes: list[tuple[bool, set[str], str]] = [
        (
            not config.lora_rank,
            {"lora_alpha", "lora_dropout", "lora_target_modules"},
            "lora_rank is 0 and all weights are trained. Set lora_rank to train adapters",
        ),
        (config.lr_scheduler == "none", {"warmup_steps"}, 'lr_scheduler is "none". Set it to "constant"'),
        (
            config.lr_scheduler in ("none", "constant"),
            {"min_lr_ratio"},
            f'lr_scheduler is "{config.lr_scheduler}". Set it to "linear" or "cosine"',
        ),
        (
            holds_ratio,
            {"clip_ratio_c"} if config.clip_ratio_c is not None else set(),
            f"{algorithm} bounds the ratio itself. Leave it null",
        ),
        (algorithm == "sapo", {"clip_low", "clip_high"}, "sapo bounds the ratio by sapo_tau_pos and sapo_tau_neg"),
        (
            not config.use_ppo_clip and not holds_ratio,
            {"clip_low", "clip_high", "ppo_clip_ref_logprobs"},
            "use_ppo_clip is false. Set it to true",
        ),
        (algorithm != "sapo", {"sapo_tau_pos", "sapo_tau_neg"}, f'algorithm is "{algorithm}". Set it to "sapo"'),
        (algorithm != "dr_grpo", {"dr_grpo_loss_agg_mode"}, f'algorithm is "{algorithm}". Set it to "dr_grpo"'),
        (not config.kl_penalty_tau, {"kl_estimator"}, "kl_penalty_tau is 0. Raise it"),
        (not config.overlong_penalty_factor, {"overlong_buffer_tokens"}, "overlong_penalty_factor is 0. Raise it"),
        *(
            (not getattr(config, switch), names, f"{switch} is false. Set it to true")
            for switch, names in (
                ("use_tis", {"tis_cap", "tis_logprob_clamp"}),
                ("enable_prompt_prefetch", {"prompt_prefetch_buffer_size"}),
                ("seq_is_masking", {"seq_is_mask_low", "seq_is_mask_high"}),
                ("filter_repetition", {"repetition_compression_threshold"}),
                ("filter_gibberish", {"gibberish_token_threshold", "gibberish_logprob_offset"}),
            )
        ),
        (
            config.checkpoint_keep_last is None,
            {"checkpoint_keep_every"},
            "checkpoint_keep_last is null, so that all checkpoints are kept. Set it",
        ),
        (
            is_fsdp,
            of_megatron | {"weight_broadcast_free_grad_buffers"},
            'train_backend is "fsdp". Set train_backend to "megatron"',
        ),
        (
            is_megatron,
            {
                "fsdp_context_parallel_size", "fsdp_reshard_after_forward", "fsdp_prefetch_layers", "compile_blocks",
                "gradient_checkpointing", "gradient_checkpointing_layers", "recompute_attention",
            },
            'train_backend is "megatron", which has fields of its own: megatron_context_parallel_size, '
            "megatron_gradient_checkpointing",
        ),
        (
            is_megatron and not config.megatron_optimizer_cpu_offload,
            {"megatron_optimizer_offload_fraction", "megatron_overlap_cpu_optimizer_d2h_h2d"},
            "megatron_optimizer_cpu_offload is false. Set it to true to offload the optimizer",
        ),
    ]  # fmt: skip
    return [remark for is_off, names, why in causes if is_off for remark in _no_effect(config, names, why)]


def _no_effect(config: TelescopeConfig, names: Set[str], why: str) -> list[str]:
    idle = sorted(names & config.user_set)
    return [f"{' and '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect, because {why}."] if idle else []


def _age_and_waste(config: TelescopeConfig) -> list[str]:
    """Explains what raising one of the two bounds of asynchrony alone does."""
    ahead, bound = config.max_async_rollout, config.max_off_policy_steps
    fields = type(config).model_fields
    usual_ahead, usual_bound = fields["max_async_rollout"].default, fields["max_off_policy_steps"].default
    if ahead > usual_ahead and ahead <= bound <= 2 * ahead:
        return [
            f"max_async_rollout is {ahead}, and max_off_policy_steps is only {bound}: long answers grow older than "
            "that and are discarded. Measured on two H100 with log-normal lengths: 4 with a bound of 8 discards 10 % "
            "of the tokens and makes fewer steps per hour than 3, which discards none. Set max_off_policy_steps to "
            f"about {3 * ahead}, or to -1."
        ]
    if bound > usual_bound and ahead <= usual_ahead:
        return [
            f"max_off_policy_steps is {bound}, and max_async_rollout stays {ahead}: generation runs no further ahead, "
            "so that steps are not faster, and at most 1 % more answers are kept, the longest. For more steps per "
            "hour, raise max_async_rollout too."
        ]
    return []


def _quantization(config: TelescopeConfig) -> str:
    """Explains what samples of quantized servers mean for the loss."""
    remark = (
        f"inference_quantization is {config.inference_quantization}: answers are sampled by quantized weights, which "
        "differ from the trainer's at every update (kl_divergence_inference)"
    )
    if config.ppo_clip_ref_logprobs == "rollout" and (
        config.use_ppo_clip or ALGORITHM_FACTS[config.algorithm].holds_ratio
    ):
        return f"{remark}. The ratio of the loss includes that."
    return f"{remark}. Set use_tis to true to correct for it."


def _top_p(config: TelescopeConfig, top_p: float) -> str:
    """Explains the effect of top_p on comparisons of engine and trainer logprobs."""
    remark = (
        f"top_p is {top_p:g}: the engine's logprobs are those of the kept tokens, renormalized, and so up to "
        f"{-math.log(top_p):.2g} nats above the trainer's. kl_divergence_inference includes that"
    )
    clips = config.use_ppo_clip or ALGORITHM_FACTS[config.algorithm].holds_ratio
    if clips and config.ppo_clip_ref_logprobs == "rollout":
        too_narrow = config.algorithm == "gspo" and config.clip_low <= GSPO_BOUND_THAT_BINDS
        return (
            f"{remark}, and so does the ratio that {config.algorithm} bounds"
            + ("; gspo would learn nothing from answers worse than their group" if too_narrow else "")
            + '. Set ppo_clip_ref_logprobs to "batch", or top_p to 1.'
        )
    if config.use_tis or config.seq_is_masking or config.kl_penalty_tau > 0:
        return f"{remark}, and so do importance weights against the engine. top_p 1 avoids it."
    return f"{remark}; the loss does not."
