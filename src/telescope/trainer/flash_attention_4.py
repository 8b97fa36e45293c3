"""Wraps FlashAttention 4 over packed segments as a torch operator with a gradient.

Owns the operator `telescope::flash_attention_4`, which `torch.compile` keeps whole and selective checkpointing can
recognize. The kernels come from the `flash-attn-4` package (`flash_attn/cute` in github.com/Dao-AILab/flash-attention),
called through the two functions that torch's `activate_flash_attention_impl("FA4")` calls.

Invariants: a token attends to earlier tokens of its own segment only; outputs and gradients are contiguous.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from telescope.utils.packages import is_installed

MIN_COMPUTE_CAPABILITY = 9
"""Hopper. On older GPUs the package is not faster than torch."""

HEAD_DIMS = (32, 64, 96, 128, 256)
"""Head sizes that `tests/gpu` compares with exact attention; others use torch's own kernel. With heads of 8, version
4.0.0b36 returned wrong gradients (relative error 0.9) without an error; with heads of 192 that share keys and values,
4.0.0b19 fails to compile the gradient."""

NO_WINDOW = -1


def can_run(device: torch.device, head_dim: int) -> bool:
    """Returns whether the package has kernels for this GPU and head size."""
    if head_dim not in HEAD_DIMS or not is_installed("flash_attn.cute"):
        return False
    return torch.cuda.get_device_capability(device)[0] >= MIN_COMPUTE_CAPABILITY


def flash_attention_4(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Computes causal attention within segments, [T, H, D]. `window` includes the token itself; K divides H."""
    behind = NO_WINDOW if window is None else window - 1
    return _forward_operator(q_THD, k_TKD, v_TKD, cu_seqlens, max_seqlen, scale, behind)[0]


def _segments(cu_seqlens: torch.Tensor, max_seqlen: int, scale: float, behind: int) -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": None if behind == NO_WINDOW else behind,
        "window_size_right": None if behind == NO_WINDOW else 0,
    }


@functools.cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the package's forward and backward functions.

    The first returns the output [T, H, D] and the log-sum-exp of the scores [H, T]. The second returns the gradients of
    query, key and value.
    """
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    # A warning about an unused argument, for every kernel on every rank (version 4.0.0b36). Process-wide, because
    # `catch_warnings` around each call would race with autograd's threads and repeat all other warnings.
    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted", category=UserWarning)
    return _flash_attn_fwd, _flash_attn_bwd


@torch.library.custom_op("telescope::flash_attention_4", mutates_args=())
def _forward_operator(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    behind: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = (q_THD.contiguous(), k_TKD.contiguous(), v_TKD.contiguous())
    options = _segments(cu_seqlens, max_seqlen, scale, behind)
    out_THD, lse_HT, *_ = _kernels()[0](*tensors, return_lse=True, **options)
    return out_THD.contiguous(), lse_HT.contiguous()


@_forward_operator.register_fake
def _(q_THD: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads = q_THD.shape[:2]
    return q_THD.new_empty(q_THD.shape), q_THD.new_empty((num_heads, num_tokens), dtype=torch.float32)


@torch.library.custom_op("telescope::flash_attention_4_backward", mutates_args=())
def _backward_operator(
    grad_THD: torch.Tensor,
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    behind: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = (q_THD.contiguous(), k_TKD.contiguous(), v_TKD.contiguous(), out_THD, grad_THD.contiguous(), lse_HT)
    grad_q, grad_k, grad_v, *_ = _kernels()[1](*tensors, **_segments(cu_seqlens, max_seqlen, scale, behind))
    return grad_q.contiguous(), grad_k.contiguous(), grad_v.contiguous()


@_backward_operator.register_fake
def _(
    grad_THD: torch.Tensor, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q_THD.new_empty(q_THD.shape), k_TKD.new_empty(k_TKD.shape), v_TKD.new_empty(v_TKD.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q_THD, k_TKD, v_TKD, cu_seqlens, *ctx.options = inputs
    ctx.save_for_backward(q_THD, k_TKD, v_TKD, *output, cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_THD: torch.Tensor | None, grad_lse_HT: torch.Tensor | None) -> tuple[Any, ...]:
    assert grad_lse_HT is None, "the log-sum-exp is not an output of the module"
    if grad_THD is None:
        return (None,) * 7
    return (*_backward_operator(grad_THD, *ctx.saved_tensors, *ctx.options), None, None, None, None)


_forward_operator.register_autograd(_backward, setup_context=_keep_for_backward)
