"""Implements context parallelism, in which C ranks share the row of a micro-batch.

Each rank has consecutive tokens of the row, its part. Around attention, tokens are exchanged for heads by an all-to-all
(Ulysses, arXiv 2309.14509), so that each rank attends over the whole row with its share of the heads: every kernel is
exact, and causal work is even, wherever the row is cut. If there are fewer key and value heads than ranks, each head is
sent to all ranks that have queries of its group. After the output layer every rank gets the logprobs of the whole row,
so that a loss does not depend on the cut.

Invariant: every rank of a group makes the same calls in the same order, also in backward passes and recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from telescope.trainer.batch import MicroBatch
from telescope.trainer.packing import SHORTEST_ROW


@dataclass(slots=True, frozen=True)
class ContextGroup:
    """The ranks that share a row, as one of them sees it. `name` is the name of their process group."""

    rank: int
    size: int
    name: str

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> ContextGroup:
        return cls(group.rank(), group.size(), group.group_name)


def _resolve(name: str) -> dist.ProcessGroup:
    # Private in torch 2.11 to 2.13, but torch's own operators use it: an operator takes a name, not a group.
    resolve: Any = distributed_c10d._resolve_process_group
    return resolve(name)


@torch.library.custom_op("telescope::exchange", mutates_args=())
def _exchange(parts: torch.Tensor, group: str) -> torch.Tensor:
    """Sends parts[i] to rank i of the group. Element i of the result comes from rank i. It is its own inverse."""
    # An operator, so that torch.compile neither traces it nor moves it past other collectives.
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=_resolve(group))
    return received


@_exchange.register_fake
def _(parts: torch.Tensor, group: str) -> torch.Tensor:
    return parts.new_empty(parts.shape)


def _keep_group(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


_exchange.register_autograd(lambda ctx, grad: (_exchange(grad, ctx.group), None), setup_context=_keep_group)


def tokens_to_heads(tokens_THD: torch.Tensor, context: ContextGroup) -> torch.Tensor:
    """Exchanges a part's tokens for the row's tokens with fewer heads. [T, H, D] -> [C T, H / C, D].

    If H < C, H must divide C, and each head goes to C / H ranks.
    """
    num_tokens, num_heads, head_dim = tokens_THD.shape
    if num_heads < context.size:
        tokens_THD = tokens_THD.repeat_interleave(context.size // num_heads, dim=1)
    by_rank = tokens_THD.reshape(num_tokens, context.size, -1, head_dim).transpose(0, 1)
    return _exchange(by_rank, context.name).reshape(context.size * num_tokens, -1, head_dim)


def heads_to_tokens(heads_THD: torch.Tensor, context: ContextGroup) -> torch.Tensor:
    """Exchanges heads for tokens. [C T, H / C, D] -> [T, H, D], the inverse of `tokens_to_heads`."""
    by_rank = heads_THD.reshape(context.size, -1, *heads_THD.shape[1:])
    return _exchange(by_rank, context.name).transpose(0, 1).reshape(by_rank.shape[1], -1, heads_THD.shape[2])


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_Kn: torch.Tensor, own: slice, num_tokens: int, group: str) -> torch.Tensor:
        ctx.own = own
        whole_KN = own_Kn.new_zeros(own_Kn.shape[0], num_tokens)
        whole_KN[:, own] = own_Kn
        if num_tokens:
            dist.all_reduce(whole_KN, group=_resolve(group))
        return whole_KN

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Every rank computes the same loss of the whole row, so the sum of their gradients counts each number once.
        return grads[0][:, ctx.own], None, None, None


def whole_row(own_Kn: torch.Tensor, own: slice, num_tokens: int, context: ContextGroup) -> torch.Tensor:
    """Returns K numbers for each of the row's tokens, [K, N]. Columns `own` belong to this part.

    The gradient assumes that every rank computes the same loss.
    """
    return _Whole.apply(own_Kn, own, num_tokens, context.name)


def pad_row(micro_batch: MicroBatch, num_parts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns token ids, position ids and bounds of a row that divides into parts. The padding is a segment."""
    token_ids_T, position_ids_T = micro_batch.token_ids_T, micro_batch.position_ids_T
    cu_seqlens = micro_batch.cu_seqlens
    size = len(token_ids_T)
    added = -(-max(size, SHORTEST_ROW * num_parts) // num_parts) * num_parts - size
    if not added:
        return token_ids_T, position_ids_T, cu_seqlens
    return (
        np.pad(token_ids_T, (0, added)),
        np.concatenate([position_ids_T, np.arange(added, dtype=position_ids_T.dtype)]),
        np.append(cu_seqlens, cu_seqlens[-1] + added).astype(cu_seqlens.dtype),
    )
