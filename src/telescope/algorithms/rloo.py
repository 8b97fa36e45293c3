"""RLOO: each completion against the mean of the others ("Back to Basics", arXiv 2402.14740).

As implemented: A = (r - mean) n / (n - 1), which is r minus the mean of the other n - 1 rewards; loss of a token -A
logp. The paper treats a completion as one action and sums its logprobs, which equals the sum over tokens.
"""

import numpy as np

from telescope.algorithms.base import Algorithm
from telescope.algorithms.grpo import policy_gradient_loss


def leave_one_out(rewards_n: np.ndarray) -> np.ndarray:
    """Computes r minus the mean of the other rewards of the group."""
    n = rewards_n.size
    return (rewards_n - rewards_n.mean()) * (n / (n - 1))


ALGORITHM = Algorithm(baseline=leave_one_out, token_loss=policy_gradient_loss)
