"""Terms added to the loss, each a mean over the trained tokens of the optimiser step whatever the algorithm's own
denominator: a KL penalty to the rollout policy, and an entropy bonus.

Sources: estimators k2 and k3, Schulman, "Approximating KL Divergence" (2020); entropy bonus, A3C (arXiv 1602.01783).
The tokens were sampled by the engine, so k3 = exp(delta) - 1 - delta estimates KL(engine || trainer), as the metric
`kl_divergence_inference` does; GRPO's penalty has the ratio the other way round, and a reference model in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from telescope.algorithms.base import DELTA_CLAMP, TokenBatch

if TYPE_CHECKING:
    import torch


def kl_to_rollout_policy(tokens: TokenBatch, config: Any) -> torch.Tensor:
    """`kl_estimator` of each token, with gradient, [N]; delta = logp - engine's logprob, clamped to +-20."""
    delta_N = (tokens.logp_N - tokens.engine_logp_N).clamp(-DELTA_CLAMP, DELTA_CLAMP)
    if config.kl_estimator == "k2":
        return 0.5 * delta_N.square()
    return delta_N.exp() - 1.0 - delta_N


def penalty(tokens: TokenBatch, config: Any) -> torch.Tensor | None:
    """`kl_penalty_tau` KL - `entropy_coef` entropy of each token, [N]; None when both are off."""
    total_N = None
    if config.kl_penalty_tau:
        total_N = config.kl_penalty_tau * kl_to_rollout_policy(tokens, config)
    if config.entropy_coef:
        bonus_N = config.entropy_coef * tokens.entropy_N
        total_N = -bonus_N if total_N is None else total_N - bonus_N
    return total_N
