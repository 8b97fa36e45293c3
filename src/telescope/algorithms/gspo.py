"""GSPO: one ratio for the whole completion (arXiv 2507.18071).

As implemented: advantages as GRPO; s = exp(mean over the sample's trained tokens of delta); loss of a sample -min(s A,
clip(s, 1 - clip_low, 1 + clip_high) A), divided by samples. The sequence ratio stays close to 1: the paper's bounds are
3e-4 and 4e-4, and the configuration's defaults, meant for token ratios, never clip it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from telescope.algorithms.base import (
    Algorithm,
    ClipSides,
    TokenBatch,
    clamped_delta,
    clipped_sides,
    clipped_surrogate,
    mean_over_sample,
    sample_sizes,
)
from telescope.algorithms.grpo import standardize

if TYPE_CHECKING:
    import torch


def sequence_ratio(tokens: TokenBatch) -> torch.Tensor:
    """Computes s of each token's sample, [N]."""
    return mean_over_sample(clamped_delta(tokens), tokens).exp()


def sequence_ratio_loss(tokens: TokenBatch, config: Any) -> torch.Tensor:
    """Computes the loss of each sample, divided equally among its tokens."""
    loss_N = clipped_surrogate(sequence_ratio(tokens), tokens.advantage_N, config)
    return loss_N / sample_sizes(tokens).index_select(0, tokens.sample_N)


def clipped_samples(tokens: TokenBatch, config: Any) -> ClipSides:
    """Returns which samples are clipped."""
    return clipped_sides(sequence_ratio(tokens), tokens.advantage_N, config)


ALGORITHM = Algorithm(
    baseline=standardize, token_loss=sequence_ratio_loss, denominator=lambda config: "samples", clipped=clipped_samples
)
