"""The learning rate is a function of the step alone, and never 0 within a run."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.trainer.step import learning_rate


def fields(schedule: str, *, warmup: int, total: int, min_ratio: float, rate: float = 1.0) -> SimpleNamespace:
    return SimpleNamespace(
        lr_scheduler=schedule, warmup_steps=warmup, number_of_steps=total, min_lr_ratio=min_ratio, learning_rate=rate
    )


def rates(schedule: str, *, warmup: int, total: int, min_ratio: float = 0.0) -> list[float]:
    config = fields(schedule, warmup=warmup, total=total, min_ratio=min_ratio)
    return [learning_rate(step, config) for step in range(total)]


@pytest.mark.parametrize(("schedule", "warmup", "expected"), [
    ("constant", 4, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]), ("none", 4, [1.0, 1.0, 1.0]),
    ("linear", 2, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
])  # fmt: skip
def test_a_schedule_has_these_rates(schedule, warmup, expected):
    assert rates(schedule, warmup=warmup, total=len(expected)) == pytest.approx(expected)


def test_cosine_is_halfway_in_the_middle_and_respects_its_floor():
    found = rates("cosine", warmup=0, total=10, min_ratio=0.2)
    assert found[0] == 1.0
    assert found[5] == pytest.approx(0.6)
    assert min(found) >= 0.2


def test_steps_past_the_planned_end_stay_at_the_floor():
    rate = learning_rate(25, fields("linear", warmup=0, total=10, min_ratio=0.1, rate=2.0))
    assert rate == pytest.approx(0.2)


@given(st.sampled_from(["none", "constant", "linear", "cosine"]), st.integers(0, 30), st.integers(1, 60))
def test_no_step_of_a_run_has_a_rate_of_zero(schedule, warmup, total):
    assert all(0.0 < rate <= 1.0 for rate in rates(schedule, warmup=warmup, total=total))
