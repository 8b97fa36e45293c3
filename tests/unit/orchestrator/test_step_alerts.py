"""Alerts from the metrics of steps fire for what they describe, once, and not for ordinary noise."""

from __future__ import annotations

import math
import random

import pytest

from telescope.orchestrator.step_alerts import LASTING, RULES, SILENT_STEPS, WINDOW, StepAlerts

Metrics = dict[str, float]


def ordinary(seed: int) -> Metrics:
    draw = random.Random(seed)
    return {
        "entropy": 0.6 * draw.uniform(0.7, 1.3), "reward/total/mean": 0.4 * draw.uniform(0.8, 1.2),
        "kl_divergence_inference": 1e-4 * draw.uniform(0.2, 5), "grad_norm": 0.3 * draw.uniform(0.3, 3),
        "stop_reason_length_pct": draw.uniform(0, 20), "discarded/zero_advantage/pct": draw.uniform(0, 60),
        "discarded/max_async/pct": 0.0, "timing_step_total": 10.0, "timing_waiting_for_data": draw.uniform(0, 4),
    }  # fmt: skip


def alerts_of(steps: list[Metrics]) -> list[tuple[int, str, str]]:
    watching = StepAlerts()
    return [(step, *alert) for step, metrics in enumerate(steps) for alert in watching.after(step, metrics)]


def test_ordinary_noise_is_no_alert() -> None:
    assert alerts_of([ordinary(step) for step in range(300)]) == []
    assert alerts_of([{} for _ in range(30)]) == [], "nor are steps without these metrics"


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("not_finite", {"loss/policy": math.nan}, "loss/policy is not a finite number"),
        ("entropy", {"entropy": 0.01}, "0.01 nats"),
        ("reward", {"reward/total/mean": 0.05}, "mean reward"),
        ("kl", {"kl_divergence_inference": 0.5}, "is 0.5"),
        ("grad_norm", {"grad_norm": 40.0}, "is 40"),
        ("truncation", {"stop_reason_length_pct": 80.0}, "80 % of the answers were cut off"),
        ("zero_advantage", {"discarded/zero_advantage/pct": 90.0}, "90 % of the groups"),
        ("stale", {"discarded/max_async/pct": 25.0}, "max_off_policy_steps"),
        ("waiting", {"timing_waiting_for_data": 8.0}, "Add inference servers"),
    ],
)
def test_each_rule_fires_for_what_it_describes_and_for_nothing_else(kind: str, changes: Metrics, words: str) -> None:
    before = [ordinary(step) for step in range(WINDOW)]
    after = [ordinary(step) | changes for step in range(WINDOW, WINDOW + LASTING)]
    ((step, found, message),) = alerts_of([*before, *after])
    assert (found, WINDOW <= step < WINDOW + LASTING) == (kind, True)
    assert words in message


def test_every_rule_has_a_case() -> None:
    marks = test_each_rule_fires_for_what_it_describes_and_for_nothing_else.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in marks[0].args[1]} == set(RULES)


def test_a_lasting_problem_is_reported_again_after_a_while_and_a_new_one_at_once() -> None:
    bad = {"stop_reason_length_pct": 90.0}
    lasting = [step for step, _, _ in alerts_of([bad] * (SILENT_STEPS + LASTING))]
    assert lasting == [LASTING - 1, LASTING - 1 + SILENT_STEPS]
    again = [step for step, _, _ in alerts_of([*[bad] * LASTING, {}, *[bad] * LASTING])]
    assert again == [LASTING - 1, 2 * LASTING]
