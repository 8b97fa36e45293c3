"""Settings of the Megatron backend."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from telescope.config.base import Count, Section, Workers

OPTIMIZER_DTYPES = ("float32", "float16", "bfloat16", "fp8")


class MegatronSection(Section):
    TITLE: ClassVar[str] = "Megatron"
    INTRO: ClassVar[str] = 'Only relevant when `train_backend: "megatron"`; ignored with "fsdp".'

    megatron_tensor_parallel_size: Workers = 1
    """Tensor parallelism degree."""
    megatron_pipeline_parallel_size: Workers = 1
    """Pipeline parallelism degree."""
    megatron_context_parallel_size: Workers = 1
    """Context parallelism degree."""
    megatron_expert_parallel_size: Workers = 1
    """Expert parallelism degree (MoE models)."""
    megatron_global_batch_size: Count | None = None
    """Global batch size. Defaults to prompts_batch_size_for_trainer."""
    megatron_disable_unified_memory_jit: bool = True
    """Disable unified memory JIT."""
    megatron_optimizer_cpu_offload: bool = False
    """Offload optimizer states to CPU. Frees GPU memory for larger models or batches, at the cost of step time."""
    megatron_optimizer_offload_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of optimizer state to offload. Range: [0, 1]."""
    megatron_overlap_cpu_optimizer_d2h_h2d: bool = True
    """Overlap CPU optimizer D2H/H2D transfers with compute."""
    megatron_use_precision_aware_optimizer: bool = False
    """Use precision-aware optimizer. The four dtypes below apply only with it."""
    megatron_main_grads_dtype: str = "float32"
    """Data type for main gradients."""
    megatron_main_params_dtype: str = "float32"
    """Data type for main parameters."""
    megatron_exp_avg_dtype: str = "float32"
    """Data type for Adam exponential average."""
    megatron_exp_avg_sq_dtype: str = "float32"
    """Data type for Adam exponential average squared."""
    megatron_grad_reduce_in_fp32: bool = True
    """Reduce gradients in FP32. false halves grad buffer memory (~14 GB savings)."""
    megatron_gradient_checkpointing: bool = True
    """Recompute activations in backward pass (~15-20 GB memory savings)."""
    megatron_sequence_parallel: bool = True
    """Shard sequence dimension in LayerNorm/dropout (requires TP > 1)."""
    megatron_use_distributed_optimizer: bool = True
    """Shard optimizer states across DP ranks (requires DP > 1)."""
    megatron_overlap_grad_reduce: bool = False
    """Overlap gradient allreduce with backward compute."""
    megatron_use_transformer_engine: bool = False
    """Use TransformerEngine layer spec (fused attention, FP8-ready)."""
    megatron_fp8: bool = False
    """Enable FP8 compute (requires TransformerEngine + Hopper GPU)."""

    @field_validator(
        "megatron_main_grads_dtype", "megatron_main_params_dtype", "megatron_exp_avg_dtype", "megatron_exp_avg_sq_dtype"
    )
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        if value not in OPTIMIZER_DTYPES:
            raise ValueError(f"must be one of {', '.join(OPTIMIZER_DTYPES)}")
        return value
