"""Log-probability of the sampled token and entropy, straight from hidden states and the output weight.

Owns the output layer of the policy during training. Invariants: log-softmax is computed in float32 (float64 for float64
models) whatever the model's dtype; temperature is applied to the logits inside, so that a logprob means what the engine
means by it; the logits of at most `chunk_size` tokens exist at a time and none survive the call, since backward
computes them again. Every rank may call it with no tokens at all: the gradients are then exactly zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

PRODUCT_ROWS = 32_768
"""Vocabulary rows per product where products of half precision are added to a float32 sum: bounds the temporary."""


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _matmul(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """left @ right with the products summed, and the result kept, in `dtype`."""
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def _add_product(total_VD: torch.Tensor, grad_CV: torch.Tensor, hidden_CD: torch.Tensor) -> None:
    """total += grad^T @ hidden, summed in the dtype of `total`, with little memory besides it."""
    if grad_CV.dtype == total_VD.dtype:
        total_VD.addmm_(grad_CV.t(), hidden_CD)
        return
    for start in range(0, total_VD.shape[0], PRODUCT_ROWS):
        rows = slice(start, start + PRODUCT_ROWS)
        total_VD[rows] += _matmul(grad_CV[:, rows].t(), hidden_CD, total_VD.dtype)


class _LogprobEntropy(torch.autograd.Function):
    """(hidden [N, D], weight [V, D], bias [V] or None, targets [N]) -> (logprob [N], entropy [N])."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        temperature: float,
        chunk_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = _accumulation_dtype(hidden_ND.dtype)
        num_tokens = hidden_ND.shape[0]
        logprob_N = torch.empty(num_tokens, dtype=dtype, device=hidden_ND.device)
        entropy_N = torch.empty_like(logprob_N)
        log_total_N = torch.empty_like(logprob_N)
        for start in range(0, num_tokens, chunk_size):
            rows = slice(start, start + chunk_size)
            z_CV = _scaled_logits(hidden_ND[rows], weight_VD, bias_V, temperature, dtype)
            top_C1 = z_CV.amax(dim=1, keepdim=True)
            z_CV -= top_C1
            p_CV = z_CV.exp()
            total_C = p_CV.sum(dim=1)
            target_C = z_CV.gather(1, targets_N[rows, None]).squeeze(1)
            logprob_N[rows] = target_C - total_C.log()
            entropy_N[rows] = total_C.log() - p_CV.mul_(z_CV).sum(dim=1) / total_C
            log_total_N[rows] = total_C.log() + top_C1.squeeze(1)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, log_total_N, entropy_N)
        ctx.temperature = temperature
        ctx.chunk_size = chunk_size
        ctx.set_materialize_grads(False)
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_logprob_N, grad_entropy_N = grads
        hidden_ND, weight_VD, bias_V, targets_N, log_total_N, entropy_N = ctx.saved_tensors
        if grad_logprob_N is None and grad_entropy_N is None:
            return None, None, None, None, None, None
        dtype = _accumulation_dtype(hidden_ND.dtype)
        if grad_logprob_N is None:
            grad_logprob_N = torch.zeros_like(log_total_N)
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = torch.zeros(weight_VD.shape, dtype=dtype, device=weight_VD.device)
        grad_bias_V = None if bias_V is None else torch.zeros(bias_V.shape, dtype=dtype, device=bias_V.device)
        for start in range(0, hidden_ND.shape[0], ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            z_CV = _scaled_logits(hidden_ND[rows], weight_VD, bias_V, ctx.temperature, dtype)
            z_CV -= log_total_N[rows, None]
            p_CV = z_CV.exp()
            # d logprob / dz = onehot - p;   d entropy / dz = -p (log p + entropy)
            if grad_entropy_N is None:
                p_CV *= -grad_logprob_N[rows, None]
            else:
                z_CV += entropy_N[rows, None]
                z_CV *= grad_entropy_N[rows, None]
                z_CV += grad_logprob_N[rows, None]
                p_CV *= z_CV.neg_()
            p_CV.scatter_add_(1, targets_N[rows, None], grad_logprob_N[rows, None])
            p_CV /= ctx.temperature
            if grad_bias_V is not None:
                grad_bias_V += p_CV.sum(dim=0)
            grad_CV = p_CV.to(hidden_ND.dtype)
            grad_hidden_ND[rows] = _matmul(grad_CV, weight_VD, dtype).to(hidden_ND.dtype)
            _add_product(grad_weight_VD, grad_CV, hidden_ND[rows])
        grad_bias = None if grad_bias_V is None else grad_bias_V.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), grad_bias, None, None, None


def _scaled_logits(
    hidden_CD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    logits_CV = _matmul(hidden_CD, weight_VD.t(), dtype)
    if bias_V is not None:
        logits_CV += bias_V
    if temperature != 1.0:
        logits_CV /= temperature
    return logits_CV


class LogprobHead(nn.Module):
    """Takes the place of a causal model's output layer, with the same parameters under the same names.

    A module rather than a function, so that FSDP2 gathers the weight before forward and again before backward. With
    tied embeddings `weight` is the embedding's own parameter.
    """

    def __init__(self, weight_VD: nn.Parameter, bias_V: nn.Parameter | None, chunk_size: int) -> None:
        super().__init__()
        self.weight = weight_VD
        self.bias = bias_V
        self.chunk_size = chunk_size

    def forward(
        self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprob [N], entropy [N]) in nats, float32 or wider, of softmax(logits / temperature)."""
        logprob_N, entropy_N = _LogprobEntropy.apply(
            hidden_ND, self.weight, self.bias, targets_N, temperature, self.chunk_size
        )
        return logprob_N, entropy_N
