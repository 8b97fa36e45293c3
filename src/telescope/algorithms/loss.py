"""The loss of each token, and the modifiers of an algorithm's loss. Every backend uses them.

    policy    the algorithm's loss, or PPO's clipped ratio instead
    x weight  truncated importance sampling
    + penalty KL to the rollout policy, entropy bonus
    x mask    completions whose mean ratio is out of bounds contribute nothing

Invariants: an importance ratio is applied once. If the loss has a ratio to the trainer's logprobs at the start of the
batch, the weight covers the rest, from there to the engine; if it has none, the weight covers everything. The
configuration refuses invalid combinations (`telescope.config.rules`). Nothing here waits for the device.

The modifiers are pure functions of the trained tokens. All are off by default.

- `use_tis`, truncated importance sampling between engine and trainer: the policy loss of a token is multiplied by a
  constant weight exp(delta), delta the trainer's logprob minus the engine's, clamped to +-`tis_logprob_clamp`.
  Ionides, "Truncated Importance Sampling" (2008); between an engine and a trainer, Yao et al., "Your Efficient RL
  Framework Secretly Brings You Off-Policy RL Training" (2025); masking instead of truncation, IcePop in "Every Step
  Evolves" (arXiv 2510.18855).
- KL penalty to the rollout policy and entropy bonus, each a mean over the trained tokens of the optimizer step for
  every denominator. Estimators k2 and k3: Schulman, "Approximating KL Divergence" (2020); entropy bonus: A3C (arXiv
  1602.01783). The engine sampled the tokens, so k3 = exp(delta) - 1 - delta estimates KL(engine || trainer), like the
  metric `kl_divergence_inference`; GRPO's penalty has the inverse ratio and a reference model.
- `use_ppo_clip`, PPO's clipped ratio instead of the plain policy gradient (arXiv 1707.06347): loss of a token
  -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A). Asymmetric bounds: DAPO (arXiv 2503.14476). `clip_ratio_c` = c
  adds the dual clip (arXiv 1912.09729): for A < 0 the loss is at most -c A, which bounds the gradient of a completion
  that has become much more likely.
- `seq_is_masking`: a completion whose geometric mean of token ratios, exp(mean over its trained tokens of delta), is
  outside [`seq_is_mask_low`, `seq_is_mask_high`] contributes nothing; the denominator does not change. delta is the
  trainer's logprob minus the engine's, clamped to +-20. Liu et al., "When Speed Kills Stability" (2025), with the
  length-normalized ratio of GSPO (arXiv 2507.18071); DeepSeek-V3.2 (arXiv 2512.02556) has the upper side alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from telescope.algorithms.base import (
    DELTA_CLAMP,
    Algorithm,
    ClipSides,
    TokenBatch,
    clamped_delta,
    clipped_sides,
    clipped_surrogate,
    mean_over_sample,
)
from telescope.config.algorithms import ALGORITHM_FACTS

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, frozen=True)
class LossTerms:
    """Terms of the loss of N trained tokens, None if not configured. Only `policy_N` and `penalty_N` have gradients."""

    policy_N: torch.Tensor
    """Each token's policy loss, weighted and masked."""
    penalty_N: torch.Tensor | None = None
    """Each token's penalties, masked."""
    weight_N: torch.Tensor | None = None
    """Each token's importance weight."""
    outside_N: torch.Tensor | None = None
    """Whether each token's ratio was truncated, or masked by `tis_mode: icepop`."""
    masked_N: torch.Tensor | None = None
    """Whether each token's whole completion is masked."""
    clipped: ClipSides | None = None
    """Whether the lower and the upper bound of the loss clip each token."""


def needs_batch_reference(config: Any) -> bool:
    """Returns whether the loss has a ratio to the trainer's logprobs from before the batch's first update."""
    holds_ratio = ALGORITHM_FACTS[config.algorithm].holds_ratio or config.use_ppo_clip
    return bool(holds_ratio and config.ppo_clip_ref_logprobs == "batch")


def loss_terms(algorithm: Algorithm, tokens: TokenBatch, config: Any) -> LossTerms:
    """Computes each token's loss and its terms."""
    clipped: ClipSides | None
    if config.use_ppo_clip:
        policy_N, clipped = clipped_ratio_loss(tokens, config), clipped_tokens(_constant(tokens), config)
    else:
        policy_N = algorithm.token_loss(tokens, config)
        clipped = algorithm.clipped(_constant(tokens), config) if algorithm.clipped is not None else None
    trainer_logp_N = tokens.ref_logp_N if needs_batch_reference(config) else tokens.logp_N.detach()
    weight_N = outside_N = masked_N = None
    if config.use_tis:
        weight_N, outside_N = importance_weight(trainer_logp_N, tokens.engine_logp_N, config)
        policy_N = policy_N * weight_N
    penalty_N = penalty(tokens, config)
    if config.seq_is_masking:
        masked_N = masked_answers(trainer_logp_N, tokens, config)
        policy_N = policy_N.masked_fill(masked_N, 0.0)
        penalty_N = None if penalty_N is None else penalty_N.masked_fill(masked_N, 0.0)
    return LossTerms(policy_N, penalty_N, weight_N, outside_N, masked_N, clipped)


def _constant(tokens: TokenBatch) -> TokenBatch:
    """Returns the same tokens without gradients."""
    return replace(tokens, logp_N=tokens.logp_N.detach(), entropy_N=tokens.entropy_N.detach())


def importance_weight(
    trainer_logp_N: torch.Tensor, engine_logp_N: torch.Tensor, config: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes weights without gradient, and which ratios are outside [`tis_floor`, `tis_cap`]. Both are [N].

    `tis_mode: truncate` sets such a ratio to the bound, `icepop` sets the weight to 0.
    """
    delta_N = trainer_logp_N.detach() - engine_logp_N
    floor = 0.0 if config.tis_floor is None else config.tis_floor
    # Compared before the clamp, which would move any ratio back inside.
    outside_N = delta_N > math.log(config.tis_cap)
    if floor > 0.0:
        outside_N = outside_N | (delta_N < math.log(floor))
    ratio_N = delta_N.clamp(-config.tis_logprob_clamp, config.tis_logprob_clamp).exp()
    if config.tis_mode == "icepop":
        return ratio_N.masked_fill(outside_N, 0.0), outside_N
    return ratio_N.clamp(floor, config.tis_cap), outside_N


def kl_to_rollout_policy(tokens: TokenBatch, config: Any) -> torch.Tensor:
    """Computes each token's `kl_estimator`, [N], from delta = logp - engine's logprob, clamped to +-20."""
    delta_N = (tokens.logp_N - tokens.engine_logp_N).clamp(-DELTA_CLAMP, DELTA_CLAMP)
    if config.kl_estimator == "k2":
        return 0.5 * delta_N.square()
    return delta_N.exp() - 1.0 - delta_N


def penalty(tokens: TokenBatch, config: Any) -> torch.Tensor | None:
    """Computes each token's `kl_penalty_tau` KL - `entropy_coef` entropy, [N]. None if both are 0."""
    total_N = None
    if config.kl_penalty_tau:
        total_N = config.kl_penalty_tau * kl_to_rollout_policy(tokens, config)
    if config.entropy_coef:
        bonus_N = config.entropy_coef * tokens.entropy_N
        total_N = -bonus_N if total_N is None else total_N - bonus_N
    return total_N


def clipped_ratio_loss(tokens: TokenBatch, config: Any) -> torch.Tensor:
    """Computes each token's clipped loss, [N]."""
    advantage_N = tokens.advantage_N
    loss_N = clipped_surrogate(clamped_delta(tokens).exp(), advantage_N, config)
    if config.clip_ratio_c is not None:
        bounded_N = loss_N.minimum(-config.clip_ratio_c * advantage_N)
        loss_N = bounded_N.where(advantage_N < 0, loss_N)
    return loss_N


def clipped_tokens(tokens: TokenBatch, config: Any) -> ClipSides:
    """Returns which tokens are clipped: at the lower bound for A < 0, at the upper for A > 0 or by the dual clip."""
    ratio_N = clamped_delta(tokens).exp()
    low_N, high_N = clipped_sides(ratio_N, tokens.advantage_N, config)
    if config.clip_ratio_c is not None:
        high_N = high_N | ((ratio_N > config.clip_ratio_c) & (tokens.advantage_N < 0))
    return low_N, high_N


def masked_answers(trainer_logp_N: torch.Tensor, tokens: TokenBatch, config: Any) -> torch.Tensor:
    """Returns whether each token's completion is masked, bool [N]."""
    delta_N = (trainer_logp_N.detach() - tokens.engine_logp_N).clamp(-DELTA_CLAMP, DELTA_CLAMP)
    ratio_N = mean_over_sample(delta_N, tokens).exp()
    return (ratio_N < config.seq_is_mask_low) | (ratio_N > config.seq_is_mask_high)
