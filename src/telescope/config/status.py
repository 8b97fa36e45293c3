"""Which fields have an effect in this version.

Every field is accepted and validated from the start, so that a file keeps working as features arrive. A field whose
feature is not there yet stands in `FIELD_STATUS`; a run that sets one says so in one line. A choice that would change
what is computed, rather than leave something out, is refused instead (`unavailable_choices`): running another
backend than the one asked for must not be a matter of reading a note.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from telescope.errors import ConfigError

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

CHECKPOINTS = "checkpoints and resuming"
PERIODIC_EVALS = "evals during training"
UPLOADS = "upload of code and logs"
EVENT_UPLOADS = "upload of events and samples"
PARALLELISM = "context parallelism"
MEGATRON = "the Megatron backend"

FIELD_STATUS: dict[str, str] = {
    "checkpoint_every": CHECKPOINTS,
    "checkpoint_save_training_state": CHECKPOINTS,
    "resume_from_checkpoint": CHECKPOINTS,
    "checkpoint_dir": CHECKPOINTS,
    "checkpoint_keep_last": CHECKPOINTS,
    "checkpoint_keep_every": CHECKPOINTS,
    "eval_num_servers": PERIODIC_EVALS,
    "eval_start_end_use_all_servers": PERIODIC_EVALS,
    "evals.eval_every": PERIODIC_EVALS,
    "evals.pass_k": PERIODIC_EVALS,
    "wandb_upload_code": UPLOADS,
    "wandb_upload_logs": UPLOADS,
    "wandb_upload_logs_detailed": UPLOADS,
    "wandb_upload_logs_stdout": UPLOADS,
    "wandb_code_max_file_size_mb": UPLOADS,
    "wandb_code_exclude_patterns": UPLOADS,
    "event_tail_window_seconds": EVENT_UPLOADS,
    "event_block_duration_seconds": EVENT_UPLOADS,
    "event_upload_interval_seconds": EVENT_UPLOADS,
    "rollout_block_size": EVENT_UPLOADS,
    "fsdp_context_parallel_size": PARALLELISM,
    "weight_broadcast_free_grad_buffers": MEGATRON,
    "megatron_tensor_parallel_size": MEGATRON,
    "megatron_pipeline_parallel_size": MEGATRON,
    "megatron_context_parallel_size": MEGATRON,
    "megatron_expert_parallel_size": MEGATRON,
    "megatron_global_batch_size": MEGATRON,
    "megatron_disable_unified_memory_jit": MEGATRON,
    "megatron_optimizer_cpu_offload": MEGATRON,
    "megatron_optimizer_offload_fraction": MEGATRON,
    "megatron_overlap_cpu_optimizer_d2h_h2d": MEGATRON,
    "megatron_use_precision_aware_optimizer": MEGATRON,
    "megatron_main_grads_dtype": MEGATRON,
    "megatron_main_params_dtype": MEGATRON,
    "megatron_exp_avg_dtype": MEGATRON,
    "megatron_exp_avg_sq_dtype": MEGATRON,
    "megatron_grad_reduce_in_fp32": MEGATRON,
    "megatron_gradient_checkpointing": MEGATRON,
    "megatron_sequence_parallel": MEGATRON,
    "megatron_use_distributed_optimizer": MEGATRON,
    "megatron_overlap_grad_reduce": MEGATRON,
    "megatron_use_transformer_engine": MEGATRON,
    "megatron_fp8": MEGATRON,
}
"""Field (or `evals.<field>`) to the feature it waits for. Absent: the field works."""

AVAILABLE_CHOICES: dict[str, tuple[str, ...]] = {"train_backend": ("fsdp",)}
"""Fields of which only these values can be run in this version."""


def has_no_effect(field: str) -> bool:
    """Whether the field is accepted, but its feature is not there yet."""
    return field in FIELD_STATUS


def no_effect_note(config: TelescopeConfig) -> str | None:
    """One line that names the fields which were set and have no effect yet; None when there are none."""
    names = sorted(name for name in config.user_set if has_no_effect(name))
    names += sorted(
        {f"evals.{name}" for entry in config.evals for name in entry.model_fields_set if has_no_effect(f"evals.{name}")}
        if "evals" in config.user_set
        else ()
    )
    return f"No effect in this version: {', '.join(names)}." if names else None


def refuse_unavailable_choices(config: TelescopeConfig) -> None:
    """Raises `ConfigError` for a value that is valid but cannot be run in this version."""
    for field, available in AVAILABLE_CHOICES.items():
        value = getattr(config, field)
        if value not in available and ":" not in value:  # a class path names code that the user brings along
            raise ConfigError(
                f"{field} is {value!r}, which is not available in this version. Use {' or '.join(map(repr, available))}"
            )
