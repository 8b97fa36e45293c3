"""REINFORCE++ with a baseline (arXiv 2501.03262): rewards are centered in the group and whitened over the batch.

As implemented: A = r - mean, then (A - batch mean) / (batch std + 1e-4), which is `advantage_norm: batch`; loss of a
token -A logp. The paper's KL term is not part of the reward here.
"""

import numpy as np

from telescope.algorithms.base import Algorithm
from telescope.algorithms.grpo import policy_gradient_loss


def center(rewards_n: np.ndarray) -> np.ndarray:
    """Computes r - mean over the group."""
    return rewards_n - rewards_n.mean()


ALGORITHM = Algorithm(baseline=center, token_loss=policy_gradient_loss)
