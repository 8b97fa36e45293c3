"""Distributions of the numbers of a step's samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.orchestrator.fakes import gini, group

from telescope.orchestrator.step_stats import NUM_BINS, discarded_numbers, distribution, mean_gini, step_stats_rows
from telescope.record.tables import COLUMN_NAMES

values = st.lists(st.floats(-1e6, 1e6).map(lambda x: round(x, 3)), min_size=1, max_size=40)


@given(values)
def test_a_distribution_has_the_statistics_of_its_values(x: list[float]) -> None:
    found = distribution(np.array(x))
    ordered = sorted(x)
    for q in (5, 25, 50, 75, 95):
        place = (len(x) - 1) * q / 100
        low = int(place)
        high = min(low + 1, len(x) - 1)
        assert found[f"p{q}"] == pytest.approx(ordered[low] + (place - low) * (ordered[high] - ordered[low]), abs=1e-6)
    mean = sum(x) / len(x)
    variance = sum((value - mean) ** 2 for value in x) / (len(x) - 1) if len(x) > 1 else 0.0
    assert (found["n"], found["min"], found["max"]) == (len(x), ordered[0], ordered[-1])
    assert found["mean"] == pytest.approx(mean, abs=1e-6)
    assert found["std"] == pytest.approx(variance**0.5, rel=1e-6, abs=1e-6)


@given(values)
def test_every_value_is_in_one_bin_of_the_histogram(x: list[float]) -> None:
    found = distribution(np.array(x))
    edges = found["bin_edges"]
    assert (len(found["histogram"]), len(edges), sum(found["histogram"])) == (NUM_BINS, NUM_BINS + 1, len(x))
    assert edges == sorted(edges)
    assert edges[0] <= min(x) <= max(x) <= edges[-1]
    assert found["histogram"] == np.histogram(x, edges)[0].tolist()


@pytest.mark.parametrize("x", [[0.1 + 0.2, 0.3], [1e12, 1e12 + 1e-3], [-1e308, 1e308], [5e-324, 0.0], [7.0]])
def test_values_of_any_size_and_difference_have_a_histogram(x: list[float]) -> None:
    with np.errstate(all="ignore"):
        found = distribution(np.array(x), np.zeros(len(x)))
    assert sum(found["histogram"]) == len(x)
    assert np.all(np.diff(found["bin_edges"]) > 0)


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), min_size=1, max_size=6))
def test_the_gini_coefficient_of_groups_is_the_mean_of_each_group_by_itself(groups: list[list[float]]) -> None:
    x = np.array([value for row in groups for value in row])
    of_group = np.repeat(np.arange(len(groups)), [len(row) for row in groups])
    order = np.random.default_rng(0).permutation(len(x))
    expected = np.mean([gini(row) for row in groups])
    assert mean_gini(x[order], of_group[order]) == pytest.approx(expected, abs=1e-9)


def test_values_that_are_not_finite_are_left_out() -> None:
    found = distribution(np.array([1.0, np.nan, 3.0, np.inf]), np.array([0, 0, 0, 0]))
    assert (found["n"], found["mean"], found["max"]) == (2, 2.0, 3.0)
    assert distribution(np.array([np.nan])) == {}


def test_a_step_has_rows_of_all_samples_and_of_each_environment() -> None:
    groups = [group([0.0, 1.0], correct=1.0), group([1.0, 1.0, None], n=6, environment="logic", words=3.0)]
    discarded = [("logic", discarded_numbers(one)) for one in group([0.5, 0.5], lengths=(4,)).samples]
    rows = [row for part in step_stats_rows(groups, [-1.0, 1.0, 0.0, 0.0], discarded, step=2) for row in part]
    assert all(set(row) <= COLUMN_NAMES["step_stats"] for row in rows)
    found = {(row["environment"], row["metric"]): row for row in rows}
    assert {environment for environment, _ in found} == {"", "arithmetic", "logic"}
    assert {metric for environment, metric in found if environment == "arithmetic"} == {
        "reward", "advantage", "prompt_tokens", "completion_tokens", "environment_tokens", "total_tokens", "num_turns",
        "age", "sample_metrics/correct",
    }  # fmt: skip
    assert (found["", "reward"]["n"], found["logic", "reward"]["n"]) == (4, 2), "masked samples do not count"
    assert found["", "reward"]["mean"] == 0.75
    assert found["", "reward"]["gini"] == pytest.approx((gini([0.0, 1.0]) + gini([1.0, 1.0])) / 2)
    assert found["", "sample_metrics/words"]["n"] == 2
    assert found["arithmetic", "advantage"]["gini"] is None
    assert found["", "age"]["mean"] == 2.0
    assert found["", "total_tokens"]["max"] == 5.0
    assert (found["", "discarded/total_tokens"]["n"], found["logic", "discarded/total_tokens"]["mean"]) == (2, 6.0)
    assert found["logic", "discarded/prompt_tokens"]["gini"] is None
