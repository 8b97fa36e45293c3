"""Contains the Triton kernels of `logprob`. They need a GPU; the matrix products need a Hopper GPU.

`add_block` and `block_gradient` read a block of float32 logits once each. `softmax_sums` and `gradient` are matrix
products of hidden states and output weight with the softmax in their epilogue, whose float32 logits stay in registers:
`softmax_sums` returns three sums per token and span of the vocabulary, `gradient` the gradient of the logits in the
dtype of the hidden states. The recurrences and gradients equal `logprob._Softmax.add` and `logprob._block_gradient`,
with which tests compare them. Inside the products the base of the exponent is 2, as in the hardware.

Invariants of the products: tensors are on the current device. Operands are bfloat16 or float16, and products are summed
in float32. Rows and columns beyond the operands do not count. The hidden size is a multiple of `DEPTH`.

A program iterates over a span of tiles of the vocabulary for one tile of tokens. Programs that run at the same time
share a few spans of the vocabulary and cover all tokens in turn, so that the weight, which is larger than the L2 cache,
is read from memory once.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from telescope.trainer import logprob
from telescope.trainer.logprob import DEPTH

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
    """Updates the four sums in place with a contiguous block of logits."""
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
    """Computes the gradient of a contiguous block of logits, in `dtype`."""
    num_rows, num_columns = logits_CB.shape
    gradient_CB = torch.empty(logits_CB.shape, dtype=dtype, device=logits_CB.device)
    _block_gradient_kernel[(num_rows, triton.cdiv(num_columns, GRADIENT_COLUMNS))](
        logits_CB, gradient_CB, target_C, log_total_C, entropy_C, grad_logprob_C, grad_entropy_C,
        logits_CB.stride(0), num_columns, 1.0 / temperature, BLOCK=GRADIENT_COLUMNS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return gradient_CB


LOG2_E = math.log2(math.e)
LN_2 = tl.constexpr(math.log(2.0))
LOWEST = tl.constexpr(logprob.LOWEST)
STRIDE_MULTIPLE = 64
"""The stride of a gradient's rows is a multiple of this, so that rows are aligned. The gap after a row is undefined."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiling of a product: `rows` (tokens) x `columns` (vocabulary entries), summed in steps of `depth`."""

    rows: int = 128
    columns: int = 256
    depth: int = DEPTH
    span: int = 4
    """Tiles of the vocabulary per program."""
    group: int = 8
    """Spans of the vocabulary that run at the same time."""
    warps: int = 8
    stages: int = 3
    """Number of parts of both operands that are loaded ahead."""
    max_registers: int | None = None
    """Registers per thread. If two programs fit a multiprocessor, one multiplies during the other's epilogue."""


SUMS = Tiles()
GRADIENT = Tiles(columns=128, group=1, max_registers=128)
"""The fastest measured on an H200 at a hidden size of 2,560, and within 1.5 % of the fastest at 1,024
(docs/performance.md; `benchmarks/logprob_tiles.py`)."""


@triton.jit
def _place(num_row_tiles, num_spans, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns (tile of rows, span of the vocabulary) of this program."""
    program = tl.program_id(0)
    per_group = num_row_tiles * GROUP
    first = program // per_group * GROUP
    size = tl.minimum(num_spans - first, GROUP)
    within = program % per_group
    return within // size, first + within % size


@triton.jit
def _logits(  # type: ignore[no-untyped-def]
    hidden, weight, bias_ptr, row, columns, column, num_columns, width, softcap,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Computes the logits of a tile, before the temperature. Values beyond the operands are undefined."""
    logits = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(0, width, DEPTH):
        logits = tl.dot(hidden.load([row, k]), weight.load([column, k]).T, logits)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)[None, :]
    if softcap is not None:  # tanh by the exponential, which is 0 or infinite for large logits
        logits = softcap - 2.0 * softcap / (tl.exp(2.0 / softcap * logits) + 1.0)
    return logits


# Sizes and the alignment of vectors must not recompile a kernel, because the number of rows differs in every step.
@triton.jit(
    do_not_specialize=["num_rows", "num_columns"],
    do_not_specialize_on_alignment=["bias_ptr", "target_ptr", "target_logit_ptr"],
)
def _softmax_sums_kernel(  # type: ignore[no-untyped-def]
    hidden, weight, bias_ptr, target_ptr, sums_ptr, target_logit_ptr, num_rows, num_columns, width, scale, softcap,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(num_columns, COLUMNS)
    num_spans = tl.cdiv(num_tiles, SPAN)
    row_tile, span = _place(tl.cdiv(num_rows, ROWS), num_spans, GROUP)
    row = row_tile * ROWS
    rows = row + tl.arange(0, ROWS)
    is_row = rows < num_rows
    target = tl.load(target_ptr + rows, mask=is_row, other=-1).to(tl.int32)
    top = tl.full((ROWS,), LOWEST, dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    moment = tl.zeros((ROWS,), dtype=tl.float32)
    for tile in range(span * SPAN, tl.minimum(span * SPAN + SPAN, num_tiles)):
        column = tile * COLUMNS
        columns = column + tl.arange(0, COLUMNS)
        logits = _logits(
            hidden, weight, bias_ptr, row, columns, column, num_columns, width, softcap, ROWS, COLUMNS, DEPTH
        )
        # Conditional, as few tiles need it: with a small hidden size the epilogue takes a relevant share of the time.
        if column + COLUMNS > num_columns:
            logits = tl.where(columns[None, :] < num_columns, logits, LOWEST)
        inside = (target >= column) & (target < tl.minimum(column + COLUMNS, num_columns))
        if tl.max(inside.to(tl.int32), axis=0) > 0:
            target_logit = tl.sum(tl.where(columns[None, :] == target[:, None], logits, 0.0), axis=1)
            tl.store(target_logit_ptr + rows, target_logit * scale * LN_2, mask=inside)
        new_top = tl.maximum(top, tl.max(logits, axis=1) * scale)
        z = logits * scale - new_top[:, None]
        p = tl.exp2(z)
        shift = top - new_top
        kept = tl.exp2(shift)
        moment = kept * (moment + shift * total) + tl.sum(p * z, axis=1)
        total = kept * total + tl.sum(p, axis=1)
        top = new_top
    sums_ptr += span * num_rows + rows
    tl.store(sums_ptr, top * LN_2, mask=is_row)
    tl.store(sums_ptr + num_spans * num_rows, total, mask=is_row)
    tl.store(sums_ptr + 2 * num_spans * num_rows, moment * LN_2, mask=is_row)


@triton.jit(
    do_not_specialize=["num_rows", "num_columns"],
    do_not_specialize_on_alignment=[
        "bias_ptr", "target_ptr", "log_total_ptr", "entropy_ptr", "grad_logprob_ptr", "grad_entropy_ptr"
    ],
)  # fmt: skip
def _gradient_kernel(  # type: ignore[no-untyped-def]
    hidden, weight, bias_ptr, target_ptr, log_total_ptr, entropy_ptr, grad_logprob_ptr, grad_entropy_ptr, gradient_ptr,
    num_rows, num_columns, width, gradient_stride, scale, inverse_temperature, softcap,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(num_columns, COLUMNS)
    row_tile, span = _place(tl.cdiv(num_rows, ROWS), tl.cdiv(num_tiles, SPAN), GROUP)
    row = row_tile * ROWS
    rows = row + tl.arange(0, ROWS)
    is_row = rows < num_rows
    target = tl.load(target_ptr + rows, mask=is_row, other=-1).to(tl.int32)
    log_total = tl.load(log_total_ptr + rows, mask=is_row, other=0.0) / LN_2
    entropy = tl.load(entropy_ptr + rows, mask=is_row, other=0.0)
    grad_logprob = tl.load(grad_logprob_ptr + rows, mask=is_row, other=0.0) * inverse_temperature
    grad_entropy = tl.load(grad_entropy_ptr + rows, mask=is_row, other=0.0) * inverse_temperature
    constant = grad_logprob + grad_entropy * entropy
    slope = grad_entropy * LN_2
    for tile in range(span * SPAN, tl.minimum(span * SPAN + SPAN, num_tiles)):
        column = tile * COLUMNS
        columns = column + tl.arange(0, COLUMNS)
        logits = _logits(
            hidden, weight, bias_ptr, row, columns, column, num_columns, width, softcap, ROWS, COLUMNS, DEPTH
        )
        logp = logits * scale - log_total[:, None]
        result = -tl.exp2(logp) * (logp * slope[:, None] + constant[:, None])
        inside = (target >= column) & (target < column + COLUMNS)
        if tl.max(inside.to(tl.int32), axis=0) > 0:
            result += tl.where(columns[None, :] == target[:, None], grad_logprob[:, None], 0.0)
        if softcap is not None:
            result *= 1.0 - (logits / softcap) * (logits / softcap)
        # Writes up to the stride, not to the last column: if the bound is a multiple of 16, whole vectors are written.
        written = is_row[:, None] & (columns < gradient_stride)[None, :]
        gradient_ptrs = gradient_ptr + rows.to(tl.int64)[:, None] * gradient_stride + columns[None, :]
        tl.store(gradient_ptrs, result.to(gradient_ptr.dtype.element_ty), mask=written)


def num_spans(num_columns: int, tiles: Tiles | None = None) -> int:
    """Returns how many sums of each kind a token has after `softmax_sums` over `num_columns`."""
    tiles = tiles or SUMS
    return triton.cdiv(triton.cdiv(num_columns, tiles.columns), tiles.span)


def softmax_sums(
    hidden_CD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    target_C: torch.Tensor,
    temperature: float,
    tiles: Tiles | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the softmax's sums by span of the vocabulary.

    [3, S, C]: top logit z, sum of exp(z - top), sum of exp(z - top) (z - top); and the target's logit [C], 0 if the
    target is no column.
    """
    tiles = tiles or SUMS
    num_rows, width = hidden_CD.shape
    num_columns = weight_VD.shape[0]
    spans = num_spans(num_columns, tiles)
    sums_3SC = torch.empty((3, spans, num_rows), dtype=torch.float32, device=hidden_CD.device)
    target_logit_C = torch.zeros(num_rows, dtype=torch.float32, device=hidden_CD.device)
    _softmax_sums_kernel[(triton.cdiv(num_rows, tiles.rows) * spans,)](
        _operand(hidden_CD, tiles, tiles.rows), _operand(weight_VD, tiles, tiles.columns), bias_V, target_C,
        sums_3SC, target_logit_C, num_rows, num_columns, width, LOG2_E / temperature, softcap, **_options(tiles),
    )  # fmt: skip
    return sums_3SC, target_logit_C


def gradient(
    hidden_CD: torch.Tensor,
    weight_BD: torch.Tensor,
    bias_B: torch.Tensor | None,
    target_C: torch.Tensor,
    log_total_C: torch.Tensor,
    entropy_C: torch.Tensor,
    grad_logprob_C: torch.Tensor,
    grad_entropy_C: torch.Tensor,
    temperature: float,
    tiles: Tiles | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Returns the gradient of a block's B logits, [C, B]. `target_C` counts from the first logit.

    Rows have gaps between them if B is no multiple of `STRIDE_MULTIPLE`.
    """
    tiles = tiles or GRADIENT
    num_rows, width = hidden_CD.shape
    num_columns = weight_BD.shape[0]
    stride = triton.cdiv(num_columns, STRIDE_MULTIPLE) * STRIDE_MULTIPLE
    gradient_CB = torch.empty((num_rows, stride), dtype=hidden_CD.dtype, device=hidden_CD.device)[:, :num_columns]
    _gradient_kernel[(triton.cdiv(num_rows, tiles.rows) * num_spans(num_columns, tiles),)](
        _operand(hidden_CD, tiles, tiles.rows), _operand(weight_BD, tiles, tiles.columns), bias_B, target_C,
        log_total_C, entropy_C, grad_logprob_C, grad_entropy_C, gradient_CB,
        num_rows, num_columns, width, stride, LOG2_E / temperature, 1.0 / temperature, softcap, **_options(tiles),
    )  # fmt: skip
    return gradient_CB


def _operand(tensor: torch.Tensor, tiles: Tiles, length: int) -> TensorDescriptor:
    """Describes a matrix for Hopper's memory accelerator, `length` rows at a time."""
    return TensorDescriptor.from_tensor(tensor, [length, tiles.depth])


def _options(tiles: Tiles) -> dict[str, Any]:
    return {
        "ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth, "SPAN": tiles.span, "GROUP": tiles.group,
        "num_warps": tiles.warps, "num_stages": tiles.stages, "maxnreg": tiles.max_registers,
    }  # fmt: skip
