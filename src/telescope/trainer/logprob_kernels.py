"""Triton kernels of `logprob`: one pass over a block of float32 logits each. Needs a GPU and triton.

The recurrences and the gradient are those of `logprob._Softmax.add` and `logprob._block_gradient`, which are also what
the tests compare with.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

STATS_COLUMNS = 4096
GRADIENT_COLUMNS = 2048
NUM_WARPS = 8


@triton.jit
def _add_block_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, target_ptr, top_ptr, total_ptr, moment_ptr, target_logit_ptr,
    row_stride, num_columns, inverse_temperature, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    top = tl.load(top_ptr + row)
    total = tl.load(total_ptr + row)
    moment = tl.load(moment_ptr + row)
    for first in range(0, num_columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        z = tl.load(logits_ptr + column, mask=column < num_columns, other=float("-inf")) * inverse_temperature
        new_top = tl.maximum(top, tl.max(z, axis=0))
        shift = top - new_top
        z -= new_top
        p = tl.exp(z)
        moment = tl.exp(shift) * (moment + shift * total) + tl.sum(tl.where(p > 0.0, p * z, 0.0), axis=0)
        total = tl.exp(shift) * total + tl.sum(p, axis=0)
        top = new_top
    tl.store(top_ptr + row, top)
    tl.store(total_ptr + row, total)
    tl.store(moment_ptr + row, moment)
    target = tl.load(target_ptr + row)
    inside = (target >= 0) & (target < num_columns)
    target_logit = tl.load(logits_ptr + target, mask=inside, other=0.0) * inverse_temperature
    tl.store(target_logit_ptr + row, target_logit, mask=inside)


@triton.jit
def _block_gradient_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, gradient_ptr, target_ptr, log_total_ptr, entropy_ptr, grad_logprob_ptr, grad_entropy_ptr,
    row_stride, num_columns, inverse_temperature, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = column < num_columns
    logp = tl.load(logits_ptr + row * row_stride + column, mask=is_real, other=0.0) * inverse_temperature
    logp -= tl.load(log_total_ptr + row)
    grad_logprob = tl.load(grad_logprob_ptr + row)
    weight = grad_logprob + tl.load(grad_entropy_ptr + row) * (logp + tl.load(entropy_ptr + row))
    gradient = tl.where(column == tl.load(target_ptr + row), grad_logprob, 0.0) - tl.exp(logp) * weight
    gradient *= inverse_temperature
    tl.store(gradient_ptr + row * row_stride + column, gradient.to(gradient_ptr.dtype.element_ty), mask=is_real)


def add_block(
    logits_CB: torch.Tensor,
    target_C: torch.Tensor,
    top_C: torch.Tensor,
    total_C: torch.Tensor,
    moment_C: torch.Tensor,
    target_logit_C: torch.Tensor,
    temperature: float,
) -> None:
    """Update the four sums in place with a contiguous block of logits."""
    num_rows, num_columns = logits_CB.shape
    _add_block_kernel[(num_rows,)](
        logits_CB, target_C, top_C, total_C, moment_C, target_logit_C,
        logits_CB.stride(0), num_columns, 1.0 / temperature, BLOCK=STATS_COLUMNS, num_warps=NUM_WARPS,
    )  # fmt: skip


def block_gradient(
    logits_CB: torch.Tensor,
    target_C: torch.Tensor,
    log_total_C: torch.Tensor,
    entropy_C: torch.Tensor,
    grad_logprob_C: torch.Tensor,
    grad_entropy_C: torch.Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The gradient in a contiguous block of logits, in `dtype`."""
    num_rows, num_columns = logits_CB.shape
    gradient_CB = torch.empty(logits_CB.shape, dtype=dtype, device=logits_CB.device)
    _block_gradient_kernel[(num_rows, triton.cdiv(num_columns, GRADIENT_COLUMNS))](
        logits_CB, gradient_CB, target_C, log_total_C, entropy_C, grad_logprob_C, grad_entropy_C,
        logits_CB.stride(0), num_columns, 1.0 / temperature, BLOCK=GRADIENT_COLUMNS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return gradient_CB
