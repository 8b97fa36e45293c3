"""Compares two things measured alternately on a machine whose speed drifts.

Neighboring measurements form a pair, and each pair gives one ratio, so that what affects both cancels. Pairs begin with
one and the other in turn (A B, B A, A B, ...): a drift through two pairs raises the ratio of one and lowers that of the
other.

The ratio is the Hodges-Lehmann estimate over the logarithms of the pairs' ratios: the median of the means of all pairs
of pairs. An outlier among the pairs does not move it far, and it needs fewer pairs than their median. Its interval is
that of Wilcoxon's signed-rank test, which is exact for any number of pairs when their errors (of the logarithms) are
independent and each is as likely as its negative. Drift over more than a pair makes neighboring errors alike, and the
alternating order gives these opposite signs. An effect that coincides with one of the two loads neither cancels nor is
detected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A ratio with its interval at `confidence`; below 95 % with 5 pairs or fewer."""

    ratio: float
    low: float
    high: float
    confidence: float
    pairs: int

    def verdict(self, aim: float) -> str:
        """Returns `met` or `missed` when the whole interval is on one side of `aim`, else `undecided`."""
        if self.confidence < CONFIDENCE or self.low < aim <= self.high:
            return "undecided"
        return "met" if self.low >= aim else "missed"

    def __str__(self) -> str:
        return f"{self.ratio:.1%} ({self.low:.1%} to {self.high:.1%})"


def order_of_pair(pair: int, names: tuple[str, str]) -> tuple[str, str]:
    """Returns the order of the two in the pair with this number."""
    return names if pair % 2 == 0 else names[::-1]


def estimate(ratios: Sequence[float]) -> Estimate:
    """Estimates the ratio from those of the pairs."""
    logs = [math.log(ratio) for ratio in ratios]
    means = sorted((a + b) / 2 for i, a in enumerate(logs) for b in logs[i:])
    outside, confidence = _tails(len(logs))
    low, high = means[outside], means[-1 - outside]
    return Estimate(math.exp(median(means)), math.exp(low), math.exp(high), confidence, len(logs))


def _tails(pairs: int) -> tuple[int, float]:
    """Returns how many means lie outside the interval at either end, and the interval's confidence.

    The number of means above the true value, were it 0, is the sum of the ranks of positive errors: each of the 2^pairs
    choices of ranks is equally likely.
    """
    ways = [1] + [0] * (pairs * (pairs + 1) // 2)
    """Number of choices of ranks by their sum."""
    for rank in range(1, pairs + 1):
        for total in range(len(ways) - 1, rank - 1, -1):
            ways[total] += ways[total - rank]
    outside, below = 0, ways[0]
    while 1 - 2 * (below + ways[outside + 1]) / 2**pairs >= CONFIDENCE:
        outside += 1
        below += ways[outside]
    return outside, 1 - 2 * below / 2**pairs
