"""Compiles the decoder's blocks, and recomputes activations in backward passes.

Owns the replacement of each block's `forward`. Does not own the blocks or their sharding: FSDP's hooks stay outside of
the compiled and recomputed function, so that weights are gathered first. Invariant: only the time and the kernels of a
block's computation change, not its result.

One compiled function serves all recomputed blocks, another all others, with dynamic sizes: a micro-batch of another
length does not compile anything.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from telescope.trainer.model import PolicyModel

ATTENTION_OPERATORS = (
    "telescope::flash_attention_4", "torch_attn::_varlen_attn", "flash_attn::_flash_attn_varlen_forward",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
)  # fmt: skip
"""The attention operators of all kernels. At 64k tokens, attention is most of a block's work and its output a tenth of
the activations, so the output is kept and the rest is recomputed."""


def wrap_blocks(
    policy: PolicyModel, *, num_recomputed: int, recompute_attention: bool, compiled: bool, has_dropout: bool = False
) -> None:
    """Makes the first `num_recomputed` blocks keep only their input and attention's output. May compile all blocks.

    The first blocks are recomputed because backward passes begin at the end: the activations of the last blocks are
    already freed then. With `has_dropout` (of adapters), recomputation draws the random numbers of the forward pass.
    """
    keep: Callable[..., Any] = _run
    recompute: Callable[..., Any] = functools.partial(
        _run_and_recompute, keep_attention=not recompute_attention, has_dropout=has_dropout
    )
    if compiled:
        keep, recompute = _compiled(keep), _compiled(recompute)
    for index, layer in enumerate(policy.layers):
        run = recompute if index < num_recomputed else keep
        # Set on the object, so that `__call__` with the hooks of FSDP and transformers does not change.
        layer.forward = functools.partial(_forward, layer, run)


def _compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles `run` with a dynamic row length. Other sizes are static, which halves the compile time."""
    from torch._dynamo import config, mark_static

    # By default a module's floats (the epsilon of a norm, the scale of attention) are inputs. A kernel that needs a
    # constant would restart tracing at its end.
    config.specialize_float = True
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_news)
    compiled = torch.compile(run, dynamic=True)

    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    # Widths are static. As dynamic sizes they would be identified with an equal number of tokens, and
                    # the next row would be compiled again. Hidden states are views that FSDP makes; their base is
                    # inspected as well.
                    for seen in (tensor, tensor._base):
                        if seen is not None and seen.shape[-1:] == tensor.shape[-1:]:
                            mark_static(seen, seen.ndim - 1)
        return compiled(layer, *args, **kwargs)

    return call


def _is_news(record: logging.LogRecord) -> bool:
    """Returns whether a warning of torch is relevant to a user.

    The warning that a partly recomputed block must not write in place is irrelevant: no block writes into attention's
    output. The router of Qwen3-MoE writes into recomputed values; a test compares its gradient.
    """
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


def _forward(layer: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Without gradients (the probe of a few tokens) nothing is kept, and another compilation does not pay off.
    return run(layer, *args, **kwargs) if torch.is_grad_enabled() else _run(layer, *args, **kwargs)


def _run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def _run_and_recompute(layer: nn.Module, *args: Any, keep_attention: bool, has_dropout: bool, **kwargs: Any) -> Any:
    options: dict[str, Any] = {"use_reentrant": False}
    if keep_attention:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _choose)
    return checkpoint(type(layer).forward, layer, *args, preserve_rng_state=has_dropout, **options, **kwargs)


def _choose(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_attention = isinstance(operator, torch._ops.OpOverload) and operator.name().partition(".")[0] in (
        ATTENTION_OPERATORS
    )
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE
