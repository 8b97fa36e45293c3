"""The benchmarks of a released model and of the async window: their tasks, fields and intervals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.repository_modules import BENCHMARKS

from telescope.config import load_config
from telescope.environments.registry import get_environment

DEMO = BENCHMARKS.parent / "configs" / "examples" / "demo_countdown.yaml"
EXAMPLE = DEMO.with_name("example_countdown.yaml")


def sums(portion: str, max_number: int = 99) -> Any:
    return get_environment(
        "sums", environments_path=[BENCHMARKS / "environments"], portion=portion, max_number=max_number
    )


def questions(environment: Any) -> set[str]:
    return {environment.get_sample(index).prompt[-1]["content"] for index in range(len(environment))}


@pytest.mark.parametrize("max_number", [10, 99])
def test_no_sum_is_trained_and_held_out_nor_is_its_reverse(max_number: int) -> None:
    trained, held_out = questions(sums("train", max_number)), questions(sums("heldout", max_number))
    reversed_ = {f"What is {b.rstrip('?')} + {a}?" for a, b in (q[8:].split(" + ") for q in held_out)}
    assert len(trained) + len(held_out) == max_number**2
    assert held_out == reversed_ and not held_out & trained


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("40 + 8 = 48", 1.0), ("48", 1.0), ("It is 48.", 1.0), ("40 + 8 = 47", 0.0), ("48 or 49", 0.0), ("forty", 0.0)],
)
def test_the_last_number_of_an_answer_counts(answer: str, reward: float) -> None:
    environment = sums("heldout")
    sample = next(s for s in map(environment.get_sample, range(len(environment))) if s.answer == "48")
    assert environment.compute_reward(answer, sample).total_reward == reward


@pytest.mark.parametrize("quick", [True, False])
def test_the_fields_make_a_configuration(quick: bool) -> None:
    import async_window
    import real_model
    import whole_run

    windows = {**whole_run.FIELDS, **(whole_run.QUICK_FIELDS if quick else async_window.FIELDS)}
    for config, fields in ((DEMO, real_model.fields(quick=quick)), (EXAMPLE, windows)):
        load_config(config, [f"--{name}={json.dumps(value)}" for name, value in fields.items()])


def test_intervals_are_those_of_wilson_and_student() -> None:
    import real_model

    assert real_model.wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert real_model.wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert real_model.STUDENT_T[2] == pytest.approx(4.303, abs=0.01), "two degrees of freedom for three seeds"


def test_the_window_has_answers_of_the_stated_distribution() -> None:
    import async_window

    assert async_window.LENGTHS.sigma == pytest.approx(1.0, abs=0.01)
