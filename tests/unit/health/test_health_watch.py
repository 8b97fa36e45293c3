"""A live run reports each problem once, and again only when it lasts or returns."""

import math

import pytest
from tests.unit.health.series import WAIT, ordinary

from telescope.health import rules
from telescope.health.rules import GIB, WINDOW, EvalPoint
from telescope.health.watch import DISK_SILENT_SECONDS, SILENT_STEPS, Watch

CUT = {rules.TRUNCATED: 90.0}


def kinds(watch: Watch, steps: range, changes: dict[str, float]) -> list[tuple[int, str]]:
    return [(step, found.kind) for step in steps for found in watch.after_step(step, ordinary(step) | changes, 10.0)]


@pytest.fixture
def watch() -> Watch:
    return Watch()


def test_a_lasting_problem_is_reported_again_after_a_while(watch) -> None:
    assert kinds(watch, range(SILENT_STEPS + 5), CUT) == [(4, "truncation"), (SILENT_STEPS + 4, "truncation")]


def test_a_problem_that_flickers_is_one_alert_and_one_that_returns_is_another(watch) -> None:
    assert kinds(watch, range(WINDOW), {}) == []
    flickering = [
        found
        for step in range(WINDOW, 60)
        for found in kinds(watch, range(step, step + 1), CUT if step % 8 > 2 else {})
    ]
    assert [kind for _, kind in flickering] == ["truncation"]
    assert kinds(watch, range(60, 80), {}) == []
    assert [kind for _, kind in kinds(watch, range(80, 90), CUT)] == ["truncation"]


def test_a_spike_is_one_alert_at_its_step(watch) -> None:
    kinds(watch, range(50), {})
    assert kinds(watch, range(50, 51), {rules.GRAD_NORM: 50.0}) == [(50, "grad_norm")]
    assert kinds(watch, range(51, 90), {}) == []


def test_a_value_that_is_not_finite_is_reported_at_once_whatever_its_name(watch) -> None:
    kinds(watch, range(3), {})
    (found,) = watch.after_step(3, ordinary(3) | {"loss/policy": math.nan})
    assert (found.kind, found.level, found.steps_ago) == ("not_finite", "error", 0)


def test_steps_that_are_trained_again_replace_the_earlier_ones(watch) -> None:
    kinds(watch, range(30), {})
    watch.after_eval(EvalPoint("math500", 24, 0.5))
    kinds(watch, range(20, 22), {})
    assert list(watch.history.steps) == list(range(22)) and watch.history.evals == []
    assert {len(values) for values in watch.history.columns.values()} == {22}


def test_a_resumed_run_knows_its_first_entropy_and_does_not_repeat_alerts(watch) -> None:
    watch.resume([(step, ordinary(step) | CUT) for step in range(40)], [EvalPoint("math500", 9, 0.6, 0.56, 0.64)])
    assert kinds(watch, range(40, 50), CUT) == []
    fallen = kinds(watch, range(50, 60), CUT | {rules.ENTROPY: 0.01})
    assert [kind for _, kind in fallen] == ["entropy"]
    news = watch.after_eval(EvalPoint("math500", 59, 0.3, 0.26, 0.34))
    assert news == [], "nothing has grown meanwhile"


def test_an_eval_that_falls_while_answers_grow_is_reported_when_it_ends(watch) -> None:
    kinds(watch, range(10), {})
    assert watch.after_eval(EvalPoint("math500", 9, 0.6, 0.56, 0.64)) == []
    kinds(watch, range(10, 30), {rules.LENGTH: 600.0})
    (found,) = watch.after_eval(EvalPoint("math500", 29, 0.3, 0.26, 0.34))
    assert found.kind == "reward_hacking" and "0.600 (after 10 steps)" in found.text


def test_a_stall_is_reported_once_per_step(watch) -> None:
    assert watch.while_waiting(1000.0) == []
    kinds(watch, range(3), {})
    assert [len(watch.while_waiting(silence)) for silence in (100.0, 400.0, 500.0)] == [0, 1, 0]
    kinds(watch, range(3, 4), {})
    assert [found.kind for found in watch.while_waiting(400.0)] == ["stalled"]


def test_a_full_disk_is_reported_once_an_hour_and_when_it_gets_worse(watch) -> None:
    sizes = [(2.0, 0.0), (2.0, 60.0), (0.5, 120.0), (2.0, DISK_SILENT_SECONDS + 1)]
    reported = [[found.level for found in watch.check_disk(free * GIB, 100 * GIB, "runs", at)] for free, at in sizes]
    assert reported == [["warning"], [], ["error"], ["warning"]]


@pytest.mark.parametrize(("number", "advised"), [(1, False), (2, True)])
def test_advice_depends_on_the_config_of_the_run(number: int, advised: bool) -> None:
    watch = Watch({"trainer_num_workers": number})
    (found, *_) = [found for step in range(20) for found in watch.after_step(step, ordinary(step) | {WAIT: 6.2}, 10.0)]
    assert (found.kind, "lower trainer_num_workers" in found.advice) == ("waiting", advised)
