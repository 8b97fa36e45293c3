"""How the decoder's blocks run: compiled, and which of their activations are recomputed in backward.

Owns what takes the place of each block's `forward`. Does not own the blocks, nor how they are sharded: FSDP's hooks
stay outside of what is compiled and recomputed here, so that weights are gathered before either. Invariant: nothing
here changes what a block computes, only when and in how many kernels.

One compiled function serves all blocks that are recomputed, another all that are not, with sizes that are not fixed: a
micro-batch of another length compiles nothing anew.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from telescope.trainer.model import PolicyModel

ATTENTION_OPERATORS = frozenset(
    {
        "telescope::flash_attention_4",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_varlen_forward",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    }
)
"""What attention comes down to in each kernel. At 64k tokens it is most of a block's work, and what it returns a
tenth of its activations: that is kept, and the rest recomputed."""


def wrap_blocks(policy: PolicyModel, *, num_recomputed: int, recompute_attention: bool, compiled: bool) -> None:
    """Let the first `num_recomputed` blocks keep only their input (and what attention returned); compile all if asked.

    The first, since backward passes begin at the end: when the first is recomputed, what the last kept is gone.
    """
    keep: Callable[..., Any] = _run
    recompute: Callable[..., Any] = functools.partial(_run_and_recompute, keep_attention=not recompute_attention)
    if compiled:
        keep, recompute = _compiled(keep), _compiled(recompute)
    for index, layer in enumerate(policy.layers):
        run = recompute if index < num_recomputed else keep
        # Set on the object: `__call__`, where FSDP and transformers hook in, stays as it is.
        layer.forward = functools.partial(_forward, layer, run)


def _compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for rows of any length, and no more than that: what else were left open, compiling would reason about
    for twice the time."""
    from torch._dynamo import config, mark_static

    # A module's floats (the epsilon of a norm, the scale of attention) are inputs by default. Where a kernel wants a
    # number, that is found out when all is traced, and tracing begins anew.
    config.specialize_float = True
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_news)
    compiled = torch.compile(run, dynamic=True)

    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    # Widths are the model's. As sizes that may vary they would also be taken for the number of tokens
                    # where they happen to equal it, and the next row would be compiled again. Hidden states are views,
                    # which FSDP makes, and what they are views of is looked at as well.
                    for seen in (tensor, tensor._base):
                        if seen is not None and seen.shape[-1:] == tensor.shape[-1:]:
                            mark_static(seen, seen.ndim - 1)
        return compiled(layer, *args, **kwargs)

    return call


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a warning of torch's is for a user. Not that a block which is recomputed in part must not write in place:
    what is kept is what attention returned, and no block writes into that. The router of Qwen3-MoE does write in place,
    into what is recomputed with it; a test compares its gradient."""
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


def _forward(layer: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Without a gradient (the probe of a few tokens) there is nothing to keep, and compiling once more would not pay.
    return run(layer, *args, **kwargs) if torch.is_grad_enabled() else _run(layer, *args, **kwargs)


def _run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def _run_and_recompute(layer: nn.Module, *args: Any, keep_attention: bool, **kwargs: Any) -> Any:
    options: dict[str, Any] = {"use_reentrant": False}
    if keep_attention:
        options["context_fn"] = _keep_attention
    # No random number is drawn in a forward pass here, so none has to be replayed.
    return checkpoint(type(layer).forward, layer, *args, preserve_rng_state=False, **options, **kwargs)


def _choose(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_attention = isinstance(operator, torch._ops.OpOverload) and operator.name().partition(".")[0] in (
        ATTENTION_OPERATORS
    )
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_attention() -> Any:
    return create_selective_checkpoint_contexts(_choose)
