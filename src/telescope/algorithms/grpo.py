"""GRPO: advantages relative to the group, divided by its standard deviation (DeepSeekMath, arXiv 2402.03300).

As implemented: A = (r - mean) / (std + 1e-4) with ddof = 1, loss of a token -A logp, divided by the trained tokens of
the whole optimizer step. Without clipping there is no ratio: at the first update of a batch -A logp has the gradient of
the paper's ratio form. The paper averages within each completion first and adds a KL to a reference model; neither is
done here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from telescope.algorithms.base import STD_EPSILON, Algorithm, TokenBatch

if TYPE_CHECKING:
    import torch


def standardize(rewards_n: np.ndarray) -> np.ndarray:
    """Whitens over a group: (r - mean) / (std + 1e-4), std with ddof = 1."""
    return (rewards_n - rewards_n.mean()) / (rewards_n.std(ddof=1) + STD_EPSILON)


def policy_gradient_loss(tokens: TokenBatch, config: Any) -> torch.Tensor:
    """Computes each token's -A logp."""
    return -tokens.advantage_N * tokens.logp_N


ALGORITHM = Algorithm(baseline=standardize, token_loss=policy_gradient_loss)
