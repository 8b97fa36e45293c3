"""Computes advantages from the rewards of a whole training batch.

Owns group statistics and whitening over the batch. Runs in the driver, in numpy, over the samples of all ranks, because
statistics of one rank's share would differ from the batch's.

Invariants: a masked sample (no trained token, or a reward that is not a finite number) enters no statistic and gets 0.
A group whose rewards are all equal gets exactly 0. A group of one keeps its reward, because it has no baseline.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from telescope.algorithms.base import Algorithm, get_algorithm
from telescope.algorithms.grpo import standardize
from telescope.algorithms.reinforce_pp import center
from telescope.config.algorithms import ALGORITHM_FACTS, AdvantageNorm


class ScoredSample(Protocol):
    """The fields of a sample that this package reads and writes. `trainer.batch.TrainSample` is one."""

    group_id: int
    reward: float
    advantage: float

    @property
    def num_trained(self) -> int:
        """Returns the number of the sample's tokens that enter the loss."""
        ...


def group_advantages(rewards_n: np.ndarray, algorithm: Algorithm, advantage_norm: AdvantageNorm) -> np.ndarray:
    """Computes the advantages of one group's unmasked rewards, [n] -> [n], in float64 and not yet whitened."""
    if rewards_n.size == 1:
        return rewards_n.copy()
    if rewards_n.min() == rewards_n.max():
        return np.zeros_like(rewards_n)
    return algorithm.baseline(rewards_n) if advantage_norm == "group" else center(rewards_n)


def whiten(advantages_M: np.ndarray) -> np.ndarray:
    """Whitens over the batch: (A - mean) / (std + 1e-4), std with ddof = 1. Equal values give 0."""
    if advantages_M.size < 2 or advantages_M.min() == advantages_M.max():
        return np.zeros_like(advantages_M)
    return standardize(advantages_M)


def compute_advantages(
    samples: Sequence[ScoredSample], algorithm: str = "grpo", advantage_norm: AdvantageNorm = "group"
) -> np.ndarray:
    """Sets `advantage` of every sample and returns the same numbers, float64 [len(samples)].

    `samples` is one whole training batch in any order; `group_id` identifies the groups. Raises `ValueError` for an
    unknown algorithm. The algorithm must allow `advantage_norm` (`config.rules`).
    """
    chosen = get_algorithm(algorithm)
    assert advantage_norm in ALGORITHM_FACTS[algorithm].advantage_norms
    advantages = np.zeros(len(samples), dtype=np.float64)
    members: dict[int, list[int]] = {}
    for position, sample in enumerate(samples):
        if sample.num_trained and math.isfinite(sample.reward):
            members.setdefault(sample.group_id, []).append(position)
    for positions in members.values():
        rewards_n = np.array([samples[p].reward for p in positions], dtype=np.float64)
        advantages[positions] = group_advantages(rewards_n, chosen, advantage_norm)
    if advantage_norm == "batch" and members:
        unmasked = np.sort(np.concatenate([np.array(p) for p in members.values()]))
        advantages[unmasked] = whiten(advantages[unmasked])
        for positions in members.values():
            # Groups of one are not centered and move the batch's mean, but equal rewards must stay at 0.
            if len(positions) > 1 and len({samples[p].reward for p in positions}) == 1:
                advantages[positions] = 0.0
    for sample, advantage in zip(samples, advantages, strict=True):
        sample.advantage = float(advantage)
    return advantages
