"""GSPO: one ratio for the whole answer (arXiv 2507.18071).

As implemented: advantages as GRPO; s = exp(mean over the sample's trained tokens of delta); loss of a sample
-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), divided by samples. The sequence ratio hardly leaves 1: the paper's
bounds are 3e-4 and 4e-4, and the configuration's defaults, meant for token ratios, never bind on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from telescope.algorithms.base import Algorithm, Denominator, TokenBatch, clamped_delta
from telescope.algorithms.grpo import standardize

if TYPE_CHECKING:
    import torch


def sequence_ratio_loss(tokens: TokenBatch, config: Any) -> torch.Tensor:
    """The loss of each sample, in equal parts on its tokens.

    A sample lies whole in one micro-batch, so its mean is complete there. All of its tokens have its advantage.
    """
    delta_N = clamped_delta(tokens)
    zeros_S = delta_N.new_zeros(tokens.num_samples)
    count_S = zeros_S.index_add(0, tokens.sample_N, delta_N.new_ones(delta_N.shape))
    mean_S = zeros_S.index_add(0, tokens.sample_N, delta_N) / count_S.clamp(min=1.0)
    ratio_N = mean_S.exp().index_select(0, tokens.sample_N)
    clipped_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    loss_N = -(ratio_N * tokens.advantage_N).minimum(clipped_N * tokens.advantage_N)
    return loss_N / count_S.index_select(0, tokens.sample_N)


def sample_denominator(config: Any) -> Denominator:
    """Samples of all ranks."""
    return "samples"


ALGORITHM = Algorithm(
    source="GSPO, arXiv 2507.18071",
    baseline=standardize,
    token_loss=sequence_ratio_loss,
    denominator=sample_denominator,
)
