"""SAPO: a soft gate instead of the clip (arXiv 2511.20347).

As implemented: advantages as GRPO; loss of a token -(4 / tau) sigmoid(tau (rho - 1)) A with tau = `sapo_tau_pos` for
A > 0 and `sapo_tau_neg` otherwise. At rho = 1 the gradient is that of -rho A; it decreases smoothly away from 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from telescope.algorithms.base import Algorithm, TokenBatch, clamped_delta
from telescope.algorithms.grpo import standardize

if TYPE_CHECKING:
    import torch


def soft_gate_loss(tokens: TokenBatch, config: Any) -> torch.Tensor:
    """Computes each token's -(4 / tau) sigmoid(tau (rho - 1)) A."""
    advantage_N = tokens.advantage_N
    tau_N = advantage_N.new_full(advantage_N.shape, config.sapo_tau_neg).masked_fill(
        advantage_N > 0, config.sapo_tau_pos
    )
    gate_N = (tau_N * (clamped_delta(tokens).exp() - 1.0)).sigmoid()
    return -(4.0 / tau_N) * gate_N * advantage_N


ALGORITHM = Algorithm(baseline=standardize, token_loss=soft_gate_loss)
