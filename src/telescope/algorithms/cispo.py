"""CISPO: the importance weight is clipped, not the update (MiniMax-M1, arXiv 2506.13585).

As implemented: advantages as GRPO; loss of a token -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A logp with sg = stop
gradient, so that a clipped token still teaches. The paper leaves the lower bound open; `clip_low: 1` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from telescope.algorithms.base import Algorithm, ClipSides, TokenBatch, clamped_delta, token_denominator
from telescope.algorithms.grpo import standardize

if TYPE_CHECKING:
    import torch


def clipped_weight_loss(tokens: TokenBatch, config: Any) -> torch.Tensor:
    """-sg(clip(rho)) A logp for each token."""
    weight_N = clamped_delta(tokens).detach().exp().clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return -weight_N * tokens.advantage_N * tokens.logp_N


def clipped_weights(tokens: TokenBatch, config: Any) -> ClipSides:
    """Where the weight is held at a bound. The token still teaches."""
    ratio_N = clamped_delta(tokens).exp()
    return ratio_N < 1.0 - config.clip_low, ratio_N > 1.0 + config.clip_high


ALGORITHM = Algorithm(
    source="MiniMax-M1, arXiv 2506.13585",
    baseline=standardize,
    token_loss=clipped_weight_loss,
    denominator=token_denominator,
    clipped=clipped_weights,
)
