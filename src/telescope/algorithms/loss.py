"""The loss of each token, for every algorithm and backend.

    policy    the algorithm's loss, or PPO's clipped ratio instead
    x weight  truncated importance sampling
    + penalty KL to the rollout policy, entropy bonus
    x mask    answers whose mean ratio is out of bounds contribute nothing

Invariants: an importance ratio is applied once. If the loss has a ratio to the trainer's logprobs at the start of the
batch, the weight covers the rest, from there to the engine; if it has none, the weight covers everything. The
configuration refuses invalid combinations (`telescope.config.rules`). Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from telescope.algorithms.base import Algorithm, ClipSides, TokenBatch
from telescope.algorithms.modifiers import clipped_ratio_loss, clipped_sides, importance_weight, masked_answers, penalty
from telescope.config.algorithms import ALGORITHM_FACTS

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, frozen=True)
class LossTerms:
    """Terms of the loss of N trained tokens. Only `policy_N` and `penalty_N` have gradients.

    A term that the configuration does not ask for is None.
    """

    policy_N: torch.Tensor
    """Policy loss of each token, weighted and masked."""
    penalty_N: torch.Tensor | None = None
    """Penalties of each token, masked."""
    weight_N: torch.Tensor | None = None
    """Importance weight of each token."""
    outside_N: torch.Tensor | None = None
    """Whether the ratio of each token was truncated, or masked by `tis_mode: icepop`."""
    masked_N: torch.Tensor | None = None
    """Whether the whole answer of each token is masked."""
    clipped: ClipSides | None = None
    """Whether the lower and the upper bound of the loss clip each token."""


def needs_batch_reference(config: Any) -> bool:
    """Returns whether the loss has a ratio to the trainer's logprobs from before the batch's first update."""
    holds_ratio = ALGORITHM_FACTS[config.algorithm].holds_ratio or config.use_ppo_clip
    return bool(holds_ratio and config.ppo_clip_ref_logprobs == "batch")


def loss_terms(algorithm: Algorithm, tokens: TokenBatch, config: Any) -> LossTerms:
    """Computes the loss of each token and its terms."""
    clipped: ClipSides | None
    if config.use_ppo_clip:
        policy_N, clipped = clipped_ratio_loss(tokens, config), clipped_sides(_constant(tokens), config)
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
