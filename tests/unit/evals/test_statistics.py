"""pass@k and pass^k against brute force, and bootstrap intervals."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.evals.statistics import (
    count_failed_as_wrong,
    estimate_difference,
    estimate_mean,
    metrics_over_items,
    num_completions,
    pass_at_k,
    pass_pow_k,
)

BOTH = (pass_at_k, pass_pow_k)


@st.composite
def counts(draw: st.DrawFn, largest: int = 300) -> tuple[int, int, int]:
    n = draw(st.integers(1, largest))
    return n, draw(st.integers(0, n)), draw(st.integers(1, n))


@pytest.mark.parametrize(("n", "c"), [(n, c) for n in range(1, 8) for c in range(n + 1)])
def test_pass_k_is_the_share_of_all_subsets(n: int, c: int) -> None:
    outcomes = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(outcomes, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)
        assert pass_pow_k(n, c, k) == pytest.approx(sum(map(all, subsets)) / len(subsets), abs=1e-15)


@given(counts())
def test_pass_at_k_equals_the_product_of_the_paper(case: tuple[int, int, int]) -> None:
    n, c, k = case
    failing = 0.0 if n - c < k else math.prod(1 - k / i for i in range(n - c + 1, n + 1))
    assert pass_at_k(n, c, k) == pytest.approx(1 - failing, abs=1e-12)


@given(counts())
def test_pass_k_is_a_probability_that_follows_the_number_of_correct_samples_and_k(case: tuple[int, int, int]) -> None:
    n, c, k = case
    assert pass_at_k(n, c, 1) == pass_pow_k(n, c, 1) == c / n
    assert 0 <= pass_pow_k(*case) <= pass_at_k(*case) <= 1
    if c < n:
        assert all(of(n, c, k) <= of(n, c + 1, k) for of in BOTH)
    if k < n:
        assert pass_at_k(n, c, k) <= pass_at_k(n, c, k + 1)
        assert pass_pow_k(n, c, k) >= pass_pow_k(n, c, k + 1)


def test_extreme_counts_are_exact() -> None:
    assert [of(10_000, 10_000, 5_000) for of in BOTH] == [1.0, 1.0]
    assert [of(10_000, 0, 5_000) for of in BOTH] == [0.0, 0.0]
    assert pass_at_k(100_000, 1, 3) == 3e-5
    assert pass_pow_k(10_000, 9_999, 5_000) == 0.5


def test_metrics_are_means_over_items_however_often_each_was_scored() -> None:
    items = [[{"correct": 1.0, "words": 4.0}] * 3, [{"correct": 0.0}, {"correct": 1.0}]]
    pass_k = {"at_k": {"metrics": ["correct"], "k": [2, 3, 4]}, "pow_k": {"metrics": ["correct"], "k": [2]}}
    assert num_completions(pass_k) == 4
    assert num_completions({}) == 1
    assert metrics_over_items(items, pass_k) == {
        "correct": 0.75, "words": 4.0, "pass@2/correct": 1.0, "pass@3/correct": 1.0, "pass^2/correct": 0.5
    }, "the second item was not scored three times, and none four times"  # fmt: skip


@pytest.mark.parametrize(("samples", "expected"), [
    ([{"correct": 1.0, "words": 4.0}, {}], {"correct": 0.5, "words": 4.0}),
    ([{"correct": 1.0, "reward": -1.0}, {}], {"correct": 0.5, "reward": -1.0}),
    ([{"correct": 1.0}, {"reward": 0.5}], {"correct": 0.5, "reward": 0.25}),
    ([{"reward": -3.0}, {"reward": 1.0}, {}], {"reward": -5 / 3}),
    ([{"reward": 2.0}, {}], {"reward": 1.0}),
    ([{"share": 1.0, "correct": 0.0}, {}], {"correct": 0.0, "share": 0.5}),
])  # fmt: skip
def test_a_score_that_is_missing_counts_as_wrong_and_never_raises_a_mean(samples: Any, expected: Any) -> None:
    pass_k = {"at_k": {"metrics": ["share"], "k": [1]}} if "share" in expected else {}
    means = metrics_over_items(count_failed_as_wrong([samples], pass_k), pass_k)
    assert {name: means[name] for name in expected} == pytest.approx(expected)


@given(st.lists(st.lists(st.sampled_from([None, 0.0, 1.0]), min_size=4, max_size=4), min_size=1))
def test_failed_samples_change_every_number_as_wrong_ones_do(outcomes: list[list[float | None]]) -> None:
    pass_k = {key: {"metrics": ["correct"], "k": [1, 2, 4]} for key in ("at_k", "pow_k")}
    failed = [[{} if value is None else {"correct": value} for value in item] for item in outcomes]
    wrong = [[{"correct": value or 0.0} for value in item] for item in outcomes]
    if any(sample for item in failed for sample in item):
        assert metrics_over_items(count_failed_as_wrong(failed, pass_k), pass_k) == metrics_over_items(wrong, pass_k)


def test_partial_credit_does_not_pass_and_a_full_score_does_however_its_sum_is_rounded() -> None:
    pass_k = {"at_k": {"metrics": ["share"], "k": [1]}}
    rounded = 0.7 + 0.2 + 0.1
    assert rounded < 1
    assert metrics_over_items([[{"share": 0.9}, {"share": rounded}]], pass_k)["pass@1/share"] == 0.5


def test_an_interval_of_a_proportion_has_the_normal_width() -> None:
    estimate = estimate_mean([1.0] * 300 + [0.0] * 700)
    assert (estimate.mean, estimate.num_items) == (0.3, 1000)
    half = 1.96 * math.sqrt(0.3 * 0.7 / 1000)
    assert estimate.low == pytest.approx(0.3 - half, abs=0.004)
    assert estimate.high == pytest.approx(0.3 + half, abs=0.004)


def test_an_interval_covers_the_truth_about_as_often_as_it_claims() -> None:
    rng = np.random.default_rng(7)
    runs = [estimate_mean(rng.normal(2.0, 1.0, size=60)) for _ in range(200)]
    assert 0.9 < np.mean([run.low <= 2.0 <= run.high for run in runs]) < 0.99


def test_an_interval_depends_on_the_values_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).random(50).tolist()
    whole = estimate_mean(values)
    monkeypatch.setattr("telescope.evals.statistics.CHUNK_VALUES", 7 * 50)
    assert estimate_mean(values) == whole, "resampling in chunks draws the same items"


@given(st.floats(-1e6, 1e6), st.integers(1, 20))
def test_equal_items_have_an_interval_without_width(value: float, count: int) -> None:
    estimate = estimate_mean([value] * count)
    assert [estimate.low, estimate.high] == pytest.approx([estimate.mean] * 2)


def test_a_value_that_is_not_finite_has_no_interval() -> None:
    with pytest.raises(ValueError, match="one is nan"):
        estimate_mean([1.0, math.nan])


def test_a_paired_difference_is_narrower_than_two_intervals() -> None:
    rng = np.random.default_rng(3)
    before = {f"item {i}": float(value) for i, value in enumerate(rng.random(200))}
    after = {uid: value + 0.02 for uid, value in before.items()}
    difference = estimate_difference(after, before)
    assert [difference.mean, difference.low, difference.high] == pytest.approx([0.02] * 3)
    assert estimate_mean(list(after.values())).low < estimate_mean(list(before.values())).high


def test_a_difference_pairs_items_by_identity_and_leaves_out_the_others() -> None:
    after = {"c": 1.0, "a": 0.0, "new": 1.0}
    before = {"a": 1.0, "gone": 0.0, "c": 1.0}
    difference = estimate_difference(after, before)
    assert (difference.mean, difference.num_items) == (-0.5, 2)
    assert estimate_difference(dict(reversed(after.items())), before) == difference
