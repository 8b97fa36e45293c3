"""Metrics of a step: their names, their formulas, and the counts of discarded samples."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.orchestrator.fakes import gini, group, sample

from telescope.orchestrator.step_metrics import DiscardCounts, batch_metrics

numbers = st.lists(st.floats(0, 1e6), min_size=1, max_size=12)


@given(numbers)
def test_gini_is_half_the_relative_mean_difference_of_all_pairs(values: list[float]) -> None:
    total = sum(values)
    if total < 1e-100:
        return
    pairs = sum(abs(a - b) for a, b in product(values, values)) / (2 * len(values) * total)
    assert gini(values) == pytest.approx(pairs, abs=1e-9)


def test_gini_shifts_values_so_that_the_smallest_is_zero_only_when_any_is_negative() -> None:
    assert gini([-1.0, 0.0, 1.0]) == pytest.approx(gini([0.0, 1.0, 2.0]))
    assert gini([1.0, 2.0, 3.0]) != pytest.approx(gini([0.0, 1.0, 2.0]))
    assert gini([0.0] * 8) == 0


def test_metrics_of_a_step_are_those_of_its_scored_samples() -> None:
    first, second = group([0.0, 1.0, None]), group([1.0, 0.5], n=6)
    first.samples[1] = sample(1, 1.0, lengths=(9,), version=2, finish_reason="length", correct=1.0)
    second.samples[0] = sample(0, 1.0, group=6, lengths=(2, 4), version=3, correct=0.0)
    metrics = batch_metrics([first, second], [-1.0, 1.0, 0.5, -0.5], version=4)
    rewards, lengths = [0.0, 1.0, 1.0, 0.5], [3, 9, 6, 3]
    assert metrics["reward/total/mean"] == pytest.approx(np.mean(rewards))
    assert metrics["reward/total/std"] == pytest.approx(np.std(rewards, ddof=1))
    assert metrics["rollouts/tokens_completion/mean"] == pytest.approx(np.mean(lengths)), "over all turns"
    assert (metrics["rollouts/tokens_completion/min"], metrics["rollouts/tokens_completion/max"]) == (3, 9)
    assert metrics["rollouts/tokens_prompt/mean"] == 2
    assert metrics["rollouts/tokens_total/max"] == 11
    assert (metrics["staleness/steps/min"], metrics["staleness/steps/max"]) == (1, 4)
    assert metrics["stop_reason_length_pct"] == 25
    assert metrics["reward/gini_mean"] == pytest.approx((gini([0, 1]) + gini([1, 0.5])) / 2)
    assert metrics["group_length_gini_mean"] == pytest.approx((gini([3, 9]) + gini([6, 3])) / 2)
    assert metrics["group_length_max_median_ratio_mean"] == pytest.approx((9 / 6 + 6 / 4.5) / 2)
    assert metrics["advantage/all/max"] == 1.0
    assert metrics["sample_metrics/arithmetic/correct"] == 0.5


def test_rewards_of_several_environments_are_reported_separately() -> None:
    groups = [group([0.0, 1.0]), group([1.0, 2.0], n=6, environment="words")]
    metrics = batch_metrics(groups, [0.0] * 4, version=0)
    assert (metrics["reward/arithmetic/mean"], metrics["reward/words/mean"]) == (0.5, 1.5)
    assert "reward/arithmetic/mean" not in batch_metrics(groups[:1], [0.0] * 2, version=0)


def test_an_answer_without_tokens_has_no_age() -> None:
    metrics = batch_metrics([group([0.0, 1.0], lengths=(0,))], [0.0, 0.0], version=9)
    assert "staleness/steps/mean" not in metrics
    assert metrics["rollouts/tokens_completion/max"] == 0


@pytest.fixture
def counts() -> DiscardCounts:
    return DiscardCounts()


def test_discards_are_counted_in_groups_samples_and_tokens_with_their_lengths(counts) -> None:
    counts.discarded("zero_advantage", "all_zero", [sample(0, 0.0, lengths=(3,)), sample(1, 0.0, lengths=(5,))])
    counts.discarded("zero_advantage", "all_positive", [sample(0, 1.0, lengths=(4,)), sample(1, 1.0, lengths=(8,))])
    metrics = counts.take(num_kept_groups=6)
    expected = {
        "groups": 2, "samples": 4, "tokens": 20, "pct": 25, "tokens_mean": 5, "tokens_min": 3, "tokens_max": 8,
        "reward_mean": 0.5,
    }  # fmt: skip
    assert {name: metrics[f"discarded/zero_advantage/{name}"] for name in expected} == expected
    assert metrics["discarded/zero_advantage_all_zero/groups"] == 1
    assert metrics["discarded/zero_advantage_all_positive/tokens"] == 12
    assert metrics["discarded/max_async/groups"] == 0
    for reason in ("all", "max_async", "zero_advantage", "zero_advantage_all_zero", "zero_advantage_all_positive"):
        assert {f"discarded/{reason}/{name}" for name in ("groups", "samples", "tokens", "pct")} <= set(counts.take(1))


def test_discarded_samples_have_prompt_and_total_lengths(counts) -> None:
    counts.discarded("zero_advantage", None, [sample(0, lengths=(3, 4)), sample(1, lengths=(5,)), sample(2, None)])
    metrics = counts.take(1)
    assert metrics["discarded/zero_advantage/prompt_tokens_mean"] == 2
    assert metrics["discarded/zero_advantage/total_tokens_max"] == 2 + 3 + 1 + 4
    assert metrics["discarded/zero_advantage/total_tokens_min"] == 2 + 5


def test_all_discarded_samples_are_counted_together_once(counts) -> None:
    counts.discarded("zero_advantage", "all_zero", [sample(0, 0.0, lengths=(3,)), sample(1, 0.0, lengths=(5,))])
    counts.discarded("max_async", None, [sample(0, 1.0, lengths=(4,))])
    metrics = counts.take(2)
    assert [metrics[f"discarded/all/{name}"] for name in ("groups", "samples", "pct")] == [2, 3, 50]
    assert (metrics["discarded/all/tokens_mean"], metrics["discarded/all/total_tokens_max"]) == (4, 7)
    assert metrics["discarded/all/reward_mean"] == pytest.approx(1 / 3)


def test_percentages_are_of_all_groups_and_never_pass_a_hundred(counts) -> None:
    for _ in range(3):
        counts.discarded("all_masked", None, [sample(0, None)])
    counts.discarded("zero_advantage", "all_zero", [sample(0, 0.0)])
    metrics = counts.take(num_kept_groups=0)
    assert metrics["discarded/all/pct"] == 100
    assert metrics["discarded/all_masked/pct"] == 75
    assert metrics["discarded/zero_advantage/pct"] == 25
    assert "discarded/all_masked/reward_mean" not in metrics


def test_masked_samples_are_counted_by_the_kind_of_their_failure(counts) -> None:
    dead = sample(1, None, lengths=())
    dead.failure_kind = "infrastructure"
    for masked in (sample(0, None, lengths=(3,)), sample(2, None, lengths=(5,)), dead):
        counts.masked(masked)
    metrics = counts.take(1)
    assert (metrics["masked/environment/samples"], metrics["masked/environment/tokens"]) == (2, 8)
    assert (metrics["masked/infrastructure/samples"], metrics["masked/infrastructure/tokens"]) == (1, 0)


def test_retried_requests_are_counted_beside_their_sample(counts) -> None:
    unlucky = sample(0, 1.0, lengths=(4,))
    unlucky.failed_requests, unlucky.lost_conversations = [7, None, 3], [20]
    for ended in (unlucky, sample(1, 1.0)):
        counts.count_retries(ended)
    metrics = counts.take(1)
    assert (metrics["retried/samples"], metrics["retried/tokens"], metrics["retried/tokens_max"]) == (2, 10, 7)
    assert metrics["retried/unseen"] == 1, "an engine that exits does not report its tokens"
    assert (metrics["lost/samples"], metrics["lost/tokens_mean"]) == (1, 20)


def test_samples_of_requeued_groups_are_counted_also_when_they_end_later(counts) -> None:
    counts.requeued([sample(0, 1.0, lengths=(3,)), sample(1, None, lengths=(5,))])
    counts.cancelled(sample(2, None, lengths=(9,)), requeued=True)
    counts.cancelled(sample(3, None, lengths=(1,)), requeued=False)
    metrics = counts.take(1)
    assert (metrics["returned/groups"], metrics["returned/samples"], metrics["returned/tokens"]) == (1, 3, 17)
    assert metrics["cancelled/tokens"] == 10


def test_counting_starts_anew_with_each_step(counts) -> None:
    counts.count_retries(sample())
    counts.requeued([sample()])
    counts.discarded("zero_advantage", "all_zero", [sample()])
    counts.masked(sample(0, None))
    counts.take(1)
    metrics = counts.take(1)
    assert all(value == 0 for value in metrics.values())
    assert not any(name.startswith("masked") for name in metrics)
