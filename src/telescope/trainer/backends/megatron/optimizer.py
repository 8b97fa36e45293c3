"""Builds AdamW over Megatron's gradient buffers, equal to the FSDP backend's."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.uint8}
"""Dtypes by name. Transformer Engine's optimizer uses uint8 for FP8."""


def wrap(stage: GPTModel, config: Any) -> DistributedDataParallel:
    """Adds a gradient buffer to the stage, which is summed over data-parallel ranks."""
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.megatron_grad_reduce_in_fp32,
        overlap_grad_reduce=config.megatron_overlap_grad_reduce,
        use_distributed_optimizer=_is_distributed(config),
    )
    return DistributedDataParallel(stage.config, options, stage)


def build_optimizer(ddp: DistributedDataParallel, config: Any) -> MegatronOptimizer:
    """Returns AdamW as configured. As in the FSDP backend, matrices decay, norms and biases do not."""
    dtype = ddp.module.config.params_dtype
    options: dict[str, Any] = {
        "optimizer": "adam",
        "lr": config.learning_rate,
        "min_lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": 1e-8,
        "clip_grad": 0.0,  # the backend clips
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_distributed_optimizer": _is_distributed(config),
        "use_precision_aware_optimizer": _is_precision_aware(config),
        # The remainders of float32 weights beside bfloat16 weights could not be saved.
        "store_param_remainders": False,
        "main_grads_dtype": DTYPES[config.megatron_main_grads_dtype],
        "main_params_dtype": DTYPES[config.megatron_main_params_dtype],
        "exp_avg_dtype": DTYPES[config.megatron_exp_avg_dtype],
        "exp_avg_sq_dtype": DTYPES[config.megatron_exp_avg_sq_dtype],
        "optimizer_cpu_offload": config.megatron_optimizer_cpu_offload,
        "optimizer_offload_fraction": config.megatron_optimizer_offload_fraction,
        "overlap_cpu_optimizer_d2h_h2d": config.megatron_overlap_cpu_optimizer_d2h_h2d,
    }
    settings = OptimizerConfig(**options)
    optimizer = get_megatron_optimizer(settings, [ddp], config_overrides=get_standard_config_overrides(settings))
    for group in optimizer.param_groups:
        group["weight_decay"] = config.weight_decay * group.get("wd_mult", 1.0)
        for name in ("cpu_optimizer_cls", "gpu_optimizer_cls"):  # with these classes, a checkpoint could not be read
            group.pop(name, None)
    for inner in inner_optimizers(optimizer):
        if type(inner.optimizer) is torch.optim.AdamW and torch.cuda.is_available():
            for group in inner.optimizer.param_groups:
                group["fused"] = True  # otherwise it needs as much memory again as all parameters in float32
    return optimizer


def _is_precision_aware(config: Any) -> bool:
    """Returns whether the optimizer has its own weights. On the CPU it must, or Megatron does not save its state."""
    return bool(config.megatron_use_precision_aware_optimizer or config.megatron_optimizer_cpu_offload)


def _is_distributed(config: Any) -> bool:
    """Returns whether Megatron's distributed optimizer is used.

    On one rank it divides nothing, but supports other dtypes, and its checkpoints load with any division. Offloaded
    states are measured without it on one rank.
    """
    if config.megatron_use_distributed_optimizer or _is_precision_aware(config):
        return True
    shares = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    return not shares and not config.megatron_optimizer_cpu_offload


def inner_optimizers(optimizer: MegatronOptimizer) -> Iterator[Any]:
    """Yields the optimizers of dense parameters and of experts."""
    yield from getattr(optimizer, "chained_optimizers", [optimizer])
