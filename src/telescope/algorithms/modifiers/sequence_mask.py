"""Masking of whole answers that the trainer no longer believes in (`seq_is_masking`).

As implemented: an answer whose geometric mean of token ratios, exp(mean over its trained tokens of delta), lies outside
[`seq_is_mask_low`, `seq_is_mask_high`] contributes nothing to the step, and the denominator stays what it was. delta is
the trainer's logprob less the engine's, clamped to +-20. Sources: sequence-level masked importance sampling, Liu et
al., "When Speed Kills Stability" (2025), with the length-normalised ratio of GSPO (arXiv 2507.18071); DeepSeek-V3.2
(arXiv 2512.02556) masks answers by the same mean, on one side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from telescope.algorithms.base import DELTA_CLAMP, TokenBatch, mean_over_sample

if TYPE_CHECKING:
    import torch


def masked_answers(trainer_logp_N: torch.Tensor, tokens: TokenBatch, config: Any) -> torch.Tensor:
    """Whether each token's answer is masked, bool [N]."""
    delta_N = (trainer_logp_N.detach() - tokens.engine_logp_N).clamp(-DELTA_CLAMP, DELTA_CLAMP)
    ratio_N = mean_over_sample(delta_N, tokens).exp()
    return (ratio_N < config.seq_is_mask_low) | (ratio_N > config.seq_is_mask_high)
