"""The optimizer, its schedule and the training backend."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from telescope.config.base import MAX_STEPS, Section, Workers

BACKENDS = ("fsdp", "megatron")


class TrainerSection(Section):
    TITLE: ClassVar[str] = "Trainer"

    learning_rate: Annotated[float, Field(gt=0, le=100)] = 1.0e-6
    """Learning rate (must be > 0). The peak of the schedule."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay coefficient of AdamW (decoupled: scaled by the learning rate)."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Maximum gradient norm for clipping. The norm is over all parameters and ranks."""
    lr_scheduler: Literal["none", "constant", "linear", "cosine"] = "constant"
    """LR schedule. "none" = fixed LR; "constant" = warmup then constant; "linear" / "cosine" = warmup then decay
    over `number_of_steps`."""
    warmup_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    """Number of linear warmup steps. The first step already has a rate above 0. Ignored by "none"."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Minimum LR as a fraction of learning_rate for linear/cosine decay. Range: [0, 1]."""
    train_backend: str = "fsdp"
    """Training backend: "fsdp", "megatron", or the path of an own subclass, "package.module:Class". FSDP suits
    models up to about 14B parameters."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass (FSDP); what attention returned is kept. Off: faster, and a multiple
    of the activation memory."""
    gradient_checkpointing_layers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """With `gradient_checkpointing`, the blocks that are recomputed, counted from the first (FSDP). null, or as many as
    the model has: all. Lower it as far as memory allows: a block that is not recomputed is up to a quarter faster, and
    keeps all its activations."""
    recompute_attention: bool = False
    """With `gradient_checkpointing`, recompute attention as well (FSDP). Saves about half of what is still kept, and
    costs up to a fifth of the speed at long `seq_len`."""
    compile_blocks: bool = True
    """Compile the model's blocks with torch.compile (FSDP, on GPU in half precision; elsewhere it does nothing). Takes
    about a minute, while the servers start. Turn it off for a model whose code does not compile."""
    fsdp_reshard_after_forward: bool | Literal["auto"] = "auto"
    """Whether a layer's gathered weights are dropped after its forward pass and gathered again for its backward pass
    (FSDP). false: weights are gathered once per optimizer step and kept until the update, which saves half of
    the gathers of one micro-batch and nearly all of many, and costs the memory of the whole model in
    mixed_precision_dtype; no result changes. "auto": true on GPUs, false on the CPU."""
    fsdp_prefetch_layers: Annotated[int, Field(ge=0, le=8)] = 1
    """Layers whose weights are gathered ahead of the one that computes, in both directions (FSDP). Each costs the
    memory of a gathered layer. Raise it when gathers are not hidden behind the computation (short micro-batches,
    several nodes); 0 leaves it to torch."""
    fsdp_context_parallel_size: Workers = 1
    """Ranks that share one sequence (FSDP). Raise it when one sequence does not fit one GPU. Must divide
    trainer_num_workers."""

    @field_validator("train_backend")
    @classmethod
    def _known_or_a_class_path(cls, value: str) -> str:
        if value not in BACKENDS and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
            raise ValueError('must be "fsdp", "megatron" or a class path such as "my_package.my_module:MyBackend"')
        return value
