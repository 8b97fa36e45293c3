"""Rewards to advantages, for a whole training batch at once.

Owns group statistics and whitening over the batch. It runs in the driver, on numpy arrays, over the samples of all
ranks, so that no rank ever sees only its share (batch statistics of one rank's share differ from those of the batch).
Invariants: a masked sample (no trained token, or a reward that is not a number) is in no statistic and gets 0; a group
whose rewards are all equal gets exactly 0, not noise divided by an epsilon; a group of one keeps its reward, because
it has nothing to be compared with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from telescope.algorithms.base import STD_EPSILON, Algorithm, get_algorithm
from telescope.algorithms.reinforce_pp import centre
from telescope.config.algorithms import ALGORITHM_FACTS, AdvantageNorm


class ScoredSample(Protocol):
    """What of a sample this room reads and writes; `trainer.batch.TrainSample` is one."""

    group_id: int
    reward: float
    advantage: float

    @property
    def num_trained(self) -> int:
        """Number of tokens of the sample that take part in the loss."""
        ...


def is_masked(sample: ScoredSample) -> bool:
    """Whether a sample takes no part in learning: no trained token, or a reward that is not a finite number."""
    return sample.num_trained == 0 or not math.isfinite(sample.reward)


def group_advantages(rewards_n: np.ndarray, algorithm: Algorithm, advantage_norm: AdvantageNorm) -> np.ndarray:
    """Advantages of one group's unmasked rewards, float64 [n] -> [n], before any whitening over the batch."""
    if rewards_n.size == 1:
        return rewards_n.copy()
    if rewards_n.min() == rewards_n.max():
        return np.zeros_like(rewards_n)
    return algorithm.baseline(rewards_n) if advantage_norm == "group" else centre(rewards_n)


def whiten(advantages_M: np.ndarray) -> np.ndarray:
    """(A - mean) / (std + 1e-4) over all samples of the batch, std with ddof = 1. All equal gives 0."""
    if advantages_M.size < 2 or advantages_M.min() == advantages_M.max():
        return np.zeros_like(advantages_M)
    return (advantages_M - advantages_M.mean()) / (advantages_M.std(ddof=1) + STD_EPSILON)


def compute_advantages(
    samples: Sequence[ScoredSample], algorithm: str = "grpo", advantage_norm: AdvantageNorm = "group"
) -> np.ndarray:
    """Fill in `advantage` of every sample and return the same numbers, float64 [len(samples)].

    `samples` is one whole training batch; groups are told apart by `group_id`, and their order does not matter.
    Raises `ValueError` for an unknown algorithm or one that does not allow `advantage_norm`.
    """
    chosen = get_algorithm(algorithm)
    norms = ALGORITHM_FACTS[algorithm].advantage_norms
    if advantage_norm not in norms:
        allowed = " or ".join(repr(norm) for norm in norms)
        raise ValueError(f"algorithm {algorithm!r} does not allow advantage_norm {advantage_norm!r}: use {allowed}")
    advantages = np.zeros(len(samples), dtype=np.float64)
    members: dict[int, list[int]] = {}
    for position, sample in enumerate(samples):
        if not is_masked(sample):
            members.setdefault(sample.group_id, []).append(position)
    for positions in members.values():
        rewards_n = np.array([samples[p].reward for p in positions], dtype=np.float64)
        advantages[positions] = group_advantages(rewards_n, chosen, advantage_norm)
    if advantage_norm == "batch" and members:
        unmasked = np.sort(np.concatenate([np.array(p) for p in members.values()]))
        advantages[unmasked] = whiten(advantages[unmasked])
        for positions in members.values():
            # Groups of one, which are not centred, move the mean of the batch; that says nothing about equal rewards.
            if len(positions) > 1 and len({samples[p].reward for p in positions}) == 1:
                advantages[positions] = 0.0
    for sample, advantage in zip(samples, advantages, strict=True):
        sample.advantage = float(advantage)
    return advantages
