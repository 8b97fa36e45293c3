"""Computes logprobs of sampled tokens, and entropies, from hidden states.

Owns the output layer of the policy during training. Invariants: log-softmax is computed in float32 (float64 for float64
models) for every model dtype. The temperature is applied to the logits, so that a logprob has the engine's definition.
The logits, or their gradients, of at most `chunk_size` tokens (or as many numbers) exist at a time, and none after the
call, since backward recomputes them. A rank may call it without tokens, and its gradients are then exactly zero.

The softmax is accumulated over parts of the vocabulary by the online recurrence of Milakov and Gimelshein
(arXiv:1805.02867), with a third sum for the entropy. There are two ways to compute the logits:
- In tiles, for bfloat16 and float16 on a Hopper GPU: the product of a tile of logits continues to its sums or its
  gradient, so that logits never exist in memory. Forward takes a few times `SUMS_BYTES`; backward, the gradient of a
  block of tokens x vocabulary in the model's dtype.
- In blocks of tokens x vocabulary, everywhere else: the logits of a block are written and read again. On a GPU one
  kernel reads a block for all three sums, and one converts it to its gradient.
`logprob_kernels` has the kernels. In both ways the gradients of hidden states and weight are products with the gradient
of a block.

With tensor parallelism each rank has a part of the vocabulary (`logprobs_of_part`). The ranks exchange the three sums
and the target's logit, four numbers per token, and then continue without communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

VOCABULARY_BLOCKS = {"cuda": 8}
"""Blocks of a long vocabulary by device type. A block has proportionally more tokens, so that the gradient of the
weight is a sum of fewer, longer products: at 64k tokens and a vocabulary of 152k, products of 1,024 tokens would read
and write 0.1 TB of sums."""
SUMS_BYTES = 32 * 2**20
"""Memory for the sums of tiles. More would exceed the L2 cache, although the weight would be read less often."""
LOWEST = -1e30
"""Replaces minus infinity in differences."""
COLUMNS_MULTIPLE = 128
"""The columns of a block, except the last, are a multiple of this, so that its rows are aligned."""
TILED_CAPABILITIES = frozenset({(9, 0)})
"""GPUs with tiles of logits. Their size is made for Hopper's memory accelerator and registers."""
DEPTH = 64
"""Elements of a hidden state per step of a tile's product; the hidden size is a multiple."""
ALIGNMENT_BYTES = 16
"""Alignment of an operand's address for the memory accelerator."""


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _matmul(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Computes left @ right with sums and result in `dtype`."""
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds left @ right to `total`, with sums in its dtype."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


@dataclass(slots=True)
class _Softmax:
    """Partial softmax of C tokens after some blocks of the vocabulary.

    The largest logit z (top), the sums of exp(z - top) and exp(z - top) (z - top), and the target's logit if seen.
    """

    top_C: torch.Tensor
    total_C: torch.Tensor
    moment_C: torch.Tensor
    target_logit_C: torch.Tensor

    @classmethod
    def empty(cls, num_tokens: int, dtype: torch.dtype, device: torch.device) -> _Softmax:
        zeros = [torch.zeros(num_tokens, dtype=dtype, device=device) for _ in range(3)]
        return cls(torch.full_like(zeros[0], LOWEST), *zeros)

    def add(self, logits_CB: torch.Tensor, target_C: torch.Tensor, temperature: float) -> None:
        """Adds the logits of a block of B vocabulary entries, and overwrites them. `target_C` counts from its start."""
        if _has_kernel(logits_CB):
            from telescope.trainer.logprob_kernels import add_block

            add_block(
                logits_CB, target_C, self.top_C, self.total_C, self.moment_C, self.target_logit_C, temperature
            )  # fmt: skip
            return
        z_CB = logits_CB.div_(temperature)
        inside_C, column_C1 = _inside(target_C, z_CB)
        self.target_logit_C = torch.where(inside_C, z_CB.gather(1, column_C1).squeeze(1), self.target_logit_C)
        top_C = torch.maximum(self.top_C, z_CB.amax(dim=1))
        shift_C = self.top_C - top_C
        z_CB -= top_C[:, None]
        p_CB = z_CB.exp()
        self.moment_C = shift_C.exp() * (self.moment_C + shift_C * self.total_C)
        self.total_C = shift_C.exp() * self.total_C + p_CB.sum(dim=1)
        self.moment_C += p_CB.mul_(z_CB).sum(dim=1)
        self.top_C = top_C

    def write(self, rows: slice, part: _Softmax) -> None:
        """Sets the values for the tokens in `rows`."""
        self.top_C[rows], self.total_C[rows] = part.top_C, part.total_C
        self.moment_C[rows], self.target_logit_C[rows] = part.moment_C, part.target_logit_C

    def merged_over(self, group: dist.ProcessGroup) -> _Softmax:
        """Combines all ranks' parts of the vocabulary. Collective."""
        own_4C = torch.stack([self.top_C, self.total_C, self.moment_C, self.target_logit_C])
        parts = [torch.empty_like(own_4C) for _ in range(group.size())]
        dist.all_gather(parts, own_4C, group=group)
        all_4SC = torch.stack(parts, dim=1)
        return _Softmax.merged(all_4SC[:3], all_4SC[3].sum(dim=0))  # 0 if a rank does not have the target

    @classmethod
    def merged(cls, sums_3SC: torch.Tensor, target_logit_C: torch.Tensor) -> _Softmax:
        """Combines top, total and moment of S parts of the vocabulary."""
        top_SC, total_SC, moment_SC = sums_3SC
        top_C = top_SC.amax(dim=0)
        shift_SC = top_SC - top_C
        moment_SC = torch.addcmul(moment_SC, shift_SC, total_SC)
        kept_SC = shift_SC.exp_()
        return cls(top_C, (kept_SC * total_SC).sum(dim=0), moment_SC.mul_(kept_SC).sum(dim=0), target_logit_C)

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns each token's logprob of the target, entropy and log-sum-exp, [C]."""
        log_total_C = self.total_C.log()
        logprob_C = (self.target_logit_C - self.top_C) - log_total_C
        return logprob_C, log_total_C - self.moment_C / self.total_C, log_total_C + self.top_C


def _has_kernel(logits: torch.Tensor) -> bool:
    return logits.is_cuda and logits.dtype == torch.float32


def _inside(target_C: torch.Tensor, block_CB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns which targets are in the block, [C], and their columns, [C, 1]."""
    num_columns = block_CB.shape[1]
    return (target_C >= 0) & (target_C < num_columns), target_C.clamp(0, num_columns - 1)[:, None]


def _block_gradient(
    logits_CB: torch.Tensor,
    target_C: torch.Tensor,
    log_total_C: torch.Tensor,
    entropy_C: torch.Tensor,
    grad_logprob_C: torch.Tensor,
    grad_entropy_C: torch.Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Computes the gradient of a block's logits in place, in `dtype`.

    With z = logits / temperature and p = softmax(z): d logprob / dz = onehot - p,
    d entropy / dz = -p (log p + entropy).
    """
    if _has_kernel(logits_CB):
        from telescope.trainer.logprob_kernels import block_gradient

        return block_gradient(
            logits_CB, target_C, log_total_C, entropy_C, grad_logprob_C, grad_entropy_C, temperature, dtype
        )
    inside_C, column_C1 = _inside(target_C, logits_CB)
    z_CB = logits_CB.div_(temperature)
    z_CB -= log_total_C[:, None]
    p_CB = z_CB.exp()
    z_CB += entropy_C[:, None]
    z_CB *= grad_entropy_C[:, None]
    z_CB += grad_logprob_C[:, None]
    p_CB *= z_CB.neg_()
    p_CB.scatter_add_(1, column_C1, (grad_logprob_C * inside_C)[:, None])
    return p_CB.div_(temperature).to(dtype)


class _LogprobEntropy(torch.autograd.Function):
    """Computes logprob [N] and entropy [N] of targets. hidden [N, D], weight [V, D], bias [V] or None, targets [N]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        temperature: float,
        chunk_size: int,
        group: dist.ProcessGroup | None,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, device, num_tokens = _accumulation_dtype(hidden_ND.dtype), hidden_ND.device, hidden_ND.shape[0]
        sums = _Softmax.empty(num_tokens, dtype, device)
        all_rows, blocks = _cut(num_tokens, weight_VD.shape[0], chunk_size, device)
        tiled = _is_tiled(hidden_ND, weight_VD)
        if tiled:
            from telescope.trainer.logprob_kernels import softmax_sums
        for rows in _rows_of_sums(num_tokens, weight_VD.shape[0]) if tiled else all_rows:
            hidden_CD, target_C = hidden_ND[rows], targets_N[rows]
            if tiled:
                softmax = _Softmax.merged(
                    *softmax_sums(hidden_CD, weight_VD, bias_V, target_C, temperature, softcap=softcap)
                )
            else:
                softmax = _Softmax.empty(hidden_CD.shape[0], dtype, device)
                for columns in blocks:
                    logits_CB = _logits(hidden_CD, weight_VD, bias_V, columns, dtype, softcap)
                    softmax.add(logits_CB, target_C - columns.start, temperature)
            sums.write(rows, softmax)
        if group is not None:
            sums = sums.merged_over(group)
        logprob_N, entropy_N, log_total_N = sums.result()
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, log_total_N, entropy_N)
        ctx.temperature, ctx.chunk_size, ctx.softcap = temperature, chunk_size, softcap
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # A gradient that is equal for all tokens has a stride of 0, which the kernels do not support.
        grad_logprob_N, grad_entropy_N = (grad.contiguous() for grad in grads)
        hidden_ND, weight_VD, bias_V, targets_N, log_total_N, entropy_N = ctx.saved_tensors
        dtype, device = _accumulation_dtype(hidden_ND.dtype), hidden_ND.device
        grad_hidden_ND = torch.zeros(hidden_ND.shape, dtype=dtype, device=device)
        # A frozen weight, as with adapters, needs no gradient, which would take a third of this pass.
        grad_weight_VD = torch.zeros_like(weight_VD) if ctx.needs_input_grad[1] else None
        grad_bias_V = None if bias_V is None else torch.zeros(bias_V.shape, dtype=dtype, device=device)
        # The outer loop is over the vocabulary, so that wide sums are needed for one block of the weight at a time. For
        # the whole weight they would take twice its memory.
        all_rows, blocks = _cut(hidden_ND.shape[0], weight_VD.shape[0], ctx.chunk_size, device)
        tiled = _is_tiled(hidden_ND, weight_VD)
        if tiled:
            from telescope.trainer.logprob_kernels import gradient
        for columns in blocks:
            grad_weight_BD = sum_BD = None
            if grad_weight_VD is not None:
                grad_weight_BD = grad_weight_VD[columns]
                sum_BD = grad_weight_BD if weight_VD.dtype == dtype else grad_weight_BD.to(dtype)
            for rows in all_rows:
                hidden_CD = hidden_ND[rows]
                target_C = targets_N[rows] - columns.start
                known = (log_total_N[rows], entropy_N[rows], grad_logprob_N[rows], grad_entropy_N[rows])
                if tiled:
                    bias_B = None if bias_V is None else bias_V[columns]
                    grad_CB = gradient(
                        hidden_CD, weight_VD[columns], bias_B, target_C, *known, ctx.temperature, softcap=ctx.softcap
                    )
                else:
                    logits_CB = _logits(hidden_CD, weight_VD, bias_V, columns, dtype, ctx.softcap)
                    slope_CB = None if ctx.softcap is None else 1 - (logits_CB / ctx.softcap).square_()
                    grad_CB = _block_gradient(logits_CB, target_C, *known, ctx.temperature, hidden_ND.dtype)
                    if slope_CB is not None:
                        grad_CB *= slope_CB
                    del logits_CB, slope_CB  # otherwise they would be in memory beside the products with the gradient
                if grad_bias_V is not None:
                    grad_bias_V[columns] += grad_CB.sum(dim=0, dtype=dtype)
                _add_product(grad_hidden_ND[rows], grad_CB, weight_VD[columns])
                if sum_BD is not None:
                    _add_product(sum_BD, grad_CB.t(), hidden_CD)
                del grad_CB  # otherwise it would be in memory beside the next one
            if grad_weight_BD is not None and sum_BD is not None and sum_BD is not grad_weight_BD:
                grad_weight_BD.copy_(sum_BD)
            del sum_BD
        grad_bias = None if grad_bias_V is None else grad_bias_V.to(weight_VD.dtype)
        return grad_hidden_ND.to(hidden_ND.dtype), grad_weight_VD, grad_bias, None, None, None, None, None


def _logits(
    hidden_CD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    columns: slice,
    dtype: torch.dtype,
    softcap: float | None,
) -> torch.Tensor:
    """Computes logits before the temperature, of some tokens and columns."""
    logits_CB = _matmul(hidden_CD, weight_VD[columns].t(), dtype)
    if bias_V is not None:
        logits_CB += bias_V[columns]
    return logits_CB if softcap is None else logits_CB.div_(softcap).tanh_().mul_(softcap)


def _is_tiled(hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> bool:
    """Returns whether logits are computed in tiles that never reach memory."""
    if not hidden_ND.is_cuda or torch.cuda.get_device_capability(hidden_ND.device) not in TILED_CAPABILITIES:
        return False
    return _can_be_tiled(hidden_ND, weight_VD)


def _can_be_tiled(hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> bool:
    """Returns whether the kernels of `logprob_kernels` support these operands."""
    if hidden_ND.dtype != weight_VD.dtype or hidden_ND.dtype not in (torch.bfloat16, torch.float16):
        return False
    return hidden_ND.shape[1] % DEPTH == 0 and all(
        operand.is_contiguous() and operand.data_ptr() % ALIGNMENT_BYTES == 0 for operand in (hidden_ND, weight_VD)
    )


def _rows_of_sums(num_tokens: int, vocab_size: int) -> list[slice]:
    """Returns slices of tokens whose sums fit `SUMS_BYTES`. Each tile of the vocabulary has sums."""
    from telescope.trainer.logprob_kernels import SUMS, num_spans

    fit = SUMS_BYTES // (3 * 4 * num_spans(vocab_size)) // SUMS.rows * SUMS.rows
    step = max(SUMS.rows, fit)
    return [slice(first, min(first + step, num_tokens)) for first in range(0, num_tokens, step)]


def _cut(num_tokens: int, vocab_size: int, chunk_size: int, device: torch.device) -> tuple[list[slice], list[slice]]:
    """Returns rows and columns of blocks that have about chunk_size x vocab_size numbers."""
    if not vocab_size:  # a rank whose part of the vocabulary is only padding
        return [], []
    num_blocks = max(1, min(VOCABULARY_BLOCKS.get(device.type, 1), -(-num_tokens // chunk_size)))
    per_block = vocab_size
    if num_blocks > 1:
        per_block = -(-vocab_size // (num_blocks * COLUMNS_MULTIPLE)) * COLUMNS_MULTIPLE
    columns = [slice(first, min(first + per_block, vocab_size)) for first in range(0, vocab_size, per_block)]
    step = chunk_size * num_blocks
    return [slice(first, min(first + step, num_tokens)) for first in range(0, num_tokens, step)], columns


def logprobs_of_part(
    hidden_ND: torch.Tensor,
    weight_PD: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float,
    chunk_size: int,
    group: dist.ProcessGroup,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the result of `LogprobHead`, equal on all ranks of the group. Collective in the forward pass.

    `hidden_ND` is equal on all ranks. Its gradient is this rank's share, which the caller must sum. The ranks have
    consecutive parts of equal size of the vocabulary. Rows for ids from `vocab_size` on are padding and not part of the
    softmax.
    """
    first = group.rank() * weight_PD.shape[0]
    num_real = min(max(vocab_size - first, 0), weight_PD.shape[0])
    logprob_N, entropy_N = _LogprobEntropy.apply(
        hidden_ND, weight_PD[:num_real], None, targets_N - first, temperature, chunk_size, group, None
    )
    return logprob_N, entropy_N


class LogprobHead(nn.Module):
    """Replaces a causal model's output layer, with the same parameters and names.

    It is a module so that FSDP2 gathers the weight before forward and again before backward. With tied embeddings
    `weight` is the embedding's parameter. Logits are multiplied by `scale`, then bounded to c tanh(logits / c) with the
    `softcap` c (arXiv 2408.00118), then divided by the temperature.
    """

    def __init__(
        self,
        weight_VD: nn.Parameter,
        bias_V: nn.Parameter | None,
        chunk_size: int,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight_VD
        self.bias = bias_V
        self.chunk_size = chunk_size
        self.scale = scale
        self.softcap = None if softcap is None else softcap / scale

    def forward(
        self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes logprob [N] and entropy [N] of softmax(logits / temperature), in nats, float32 or wider."""
        logprob_N, entropy_N = _LogprobEntropy.apply(
            hidden_ND, self.weight, self.bias, targets_N, temperature / self.scale, self.chunk_size, None, self.softcap
        )
        return logprob_N, entropy_N
