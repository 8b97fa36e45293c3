"""Two things compared by turns, on a machine whose speed drifts: order of the turns, and what their ratio may be.

Neighbouring measurements make a pair, and each pair one ratio, so that what both of a pair meet is not in it. Pairs
begin with the one and the other in turn (A B, B A, A B, ...): a drift that goes on through two pairs raises the ratio
of one and lowers that of the other.

The ratio is the Hodges-Lehmann estimate over the logarithms of the pairs' ratios: the median of the means of all pairs
of pairs. One pair that met something else does not move it far, and it needs fewer pairs than their median. Its
interval is that of Wilcoxon's signed-rank test, which is exact for any number of pairs when their errors (of the
logarithms) are independent and each is as likely as its negative. What drifts for longer than a pair makes neighbours'
errors alike, and the alternating order gives these opposite signs; what comes and goes with the load itself, as a
neighbour that is only there for one of the two, neither cancels nor shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A ratio and the interval that holds it with probability `confidence`; with 5 pairs or fewer less than 95 %."""

    ratio: float
    low: float
    high: float
    confidence: float
    pairs: int

    def says(self, aim: float) -> str:
        """Whether the ratio reaches `aim`: `met` or `missed` when the whole interval does or does not."""
        if self.confidence < CONFIDENCE or self.low < aim <= self.high:
            return "undecided"
        return "met" if self.low >= aim else "missed"

    def __str__(self) -> str:
        return f"{self.ratio:.1%} ({self.low:.1%} to {self.high:.1%})"


def order_of_pair(pair: int, names: tuple[str, str]) -> tuple[str, str]:
    """Who goes first in the pair with this number."""
    return names if pair % 2 == 0 else names[::-1]


def estimate(ratios: Sequence[float]) -> Estimate:
    """The ratio behind those of the pairs."""
    logs = [math.log(ratio) for ratio in ratios]
    means = sorted((a + b) / 2 for i, a in enumerate(logs) for b in logs[i:])
    outside, confidence = _tails(len(logs))
    low, high = means[outside], means[-1 - outside]
    return Estimate(math.exp(median(means)), math.exp(low), math.exp(high), confidence, len(logs))


def _tails(pairs: int) -> tuple[int, float]:
    """How many means lie outside of the interval at either end, and the interval's confidence.

    The means above the true value, were it 0, are as many as the sum of the ranks of positive errors: each of the
    2^pairs choices of ranks is as likely as any other.
    """
    ways = [1] + [0] * (pairs * (pairs + 1) // 2)
    """By sum of ranks, in how many ways it comes about."""
    for rank in range(1, pairs + 1):
        for total in range(len(ways) - 1, rank - 1, -1):
            ways[total] += ways[total - rank]
    outside, below = 0, ways[0]
    while 1 - 2 * (below + ways[outside + 1]) / 2**pairs >= CONFIDENCE:
        outside += 1
        below += ways[outside]
    return outside, 1 - 2 * below / 2**pairs
