"""CISPO: clips the importance weight instead of the update (MiniMax-M1, arXiv 2506.13585).

As implemented: advantages as GRPO; loss of a token -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A logp with sg = stop
gradient, so that a clipped token still contributes a gradient. The paper has no lower bound; `clip_low: 1` removes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from telescope.algorithms.base import Algorithm, ClipSides, TokenBatch, clamped_delta
from telescope.algorithms.grpo import standardize

if TYPE_CHECKING:
    import torch


def clipped_weight_loss(tokens: TokenBatch, config: Any) -> torch.Tensor:
    """Computes each token's -sg(clip(rho)) A logp."""
    weight_N = clamped_delta(tokens).detach().exp().clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return -weight_N * tokens.advantage_N * tokens.logp_N


def clipped_weights(tokens: TokenBatch, config: Any) -> ClipSides:
    """Returns which weights are clipped. These tokens still contribute a gradient."""
    ratio_N = clamped_delta(tokens).exp()
    return ratio_N < 1.0 - config.clip_low, ratio_N > 1.0 + config.clip_high


ALGORITHM = Algorithm(baseline=standardize, token_loss=clipped_weight_loss, clipped=clipped_weights)
