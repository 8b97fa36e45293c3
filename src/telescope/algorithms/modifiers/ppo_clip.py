"""PPO's clipped ratio, in place of the plain policy gradient (`use_ppo_clip`; PPO, arXiv 1707.06347).

As implemented: loss of a token -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A). Different bounds on the two sides
are DAPO's (arXiv 2503.14476). `clip_ratio_c` = c adds the dual clip (arXiv 1912.09729): where A < 0 the loss is at most
-c A, so that an answer which has become far likelier cannot push without bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from telescope.algorithms.base import ClipSides, TokenBatch, clamped_delta

if TYPE_CHECKING:
    import torch


def clipped_ratio_loss(tokens: TokenBatch, config: Any) -> torch.Tensor:
    """The clipped loss of each token, [N]."""
    advantage_N = tokens.advantage_N
    ratio_N = clamped_delta(tokens).exp()
    clipped_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    loss_N = -(ratio_N * advantage_N).minimum(clipped_N * advantage_N)
    if config.clip_ratio_c is not None:
        bounded_N = loss_N.minimum(-config.clip_ratio_c * advantage_N)
        loss_N = bounded_N.where(advantage_N < 0, loss_N)
    return loss_N


def clipped_sides(tokens: TokenBatch, config: Any) -> ClipSides:
    """Where a bound takes the token's gradient: below for A < 0, above for A > 0. The dual clip counts as above."""
    ratio_N = clamped_delta(tokens).exp()
    low_N = (ratio_N < 1.0 - config.clip_low) & (tokens.advantage_N < 0)
    high_N = (ratio_N > 1.0 + config.clip_high) & (tokens.advantage_N > 0)
    if config.clip_ratio_c is not None:
        high_N = high_N | ((ratio_N > config.clip_ratio_c) & (tokens.advantage_N < 0))
    return low_N, high_N
