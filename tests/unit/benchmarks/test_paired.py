"""Ratios from pairs of measurements under drift and outliers, and the coverage of their interval."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest


@pytest.fixture
def paired() -> Any:
    import paired

    return paired


def test_the_order_alternates_between_pairs(paired: Any) -> None:
    order = [name for pair in range(4) for name in paired.order_of_pair(pair, ("a", "b"))]
    assert "".join(order) == "abbaabba"


def test_steady_drift_does_not_move_the_ratio(paired: Any) -> None:
    speeds = (100 * 0.98**turn for turn in itertools.count())
    ratios = []
    for pair in range(8):
        measured = {
            name: next(speeds) * (0.9 if name == "a" else 1.0) for name in paired.order_of_pair(pair, ("a", "b"))
        }
        ratios.append(measured["a"] / measured["b"])
    found = paired.estimate(ratios)
    assert found.ratio == pytest.approx(0.9)
    assert found.low <= 0.9 <= found.high


def test_an_outlier_does_not_move_the_ratio_far(paired: Any) -> None:
    found = paired.estimate([0.99, 1.0, 1.01, 0.995, 1.005, 1.0, 0.998, 0.3])
    assert found.ratio == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(("pairs", "confidence"), [(1, 0.0), (2, 0.5), (5, 0.9375), (6, 0.96875), (8, 1 - 10 / 256)])
def test_the_confidence_is_that_of_the_signed_rank_test(paired: Any, pairs: int, confidence: float) -> None:
    assert paired.estimate([1.0] * pairs).confidence == pytest.approx(confidence)


@pytest.mark.parametrize("pairs", [3, 6, 7, 9])
def test_the_interval_has_its_stated_coverage(paired: Any, pairs: int) -> None:
    """With errors of given sizes every choice of signs is as likely as any other: all of them are tried."""
    draw = random.Random(pairs)
    sizes = [draw.uniform(0.01, 0.2) for _ in range(pairs)]
    covered, confidence = 0, 0.0
    for signs in itertools.product((-1, 1), repeat=pairs):
        found = paired.estimate([math.exp(sign * size) for sign, size in zip(signs, sizes, strict=True)])
        covered += found.low <= 1.0 <= found.high
        confidence = found.confidence
    assert covered / 2**pairs == pytest.approx(confidence)


def test_an_aim_is_met_or_missed_only_by_the_whole_interval(paired: Any) -> None:
    def verdict(*ratios: float) -> str:
        result: str = paired.estimate(ratios).verdict(0.97)
        return result

    assert verdict(0.98, 0.99, 1.0, 1.01, 0.99, 1.0) == "met"
    assert verdict(0.9, 0.92, 0.91, 0.93, 0.9, 0.92) == "missed"
    assert verdict(0.9, 0.92, 0.91, 1.0, 1.01, 1.02) == "undecided"
    assert verdict(0.99, 1.0, 1.01) == "undecided", "three pairs are not enough"
