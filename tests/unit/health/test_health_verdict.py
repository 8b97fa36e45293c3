"""The verdict, the strip, progress and recorded alerts in words."""

from typing import Any

import pytest
from tests.unit.health.series import WAIT, history

from telescope.health import rules, verdict
from telescope.health.rules import EvalPoint, History
from telescope.health.verdict import State

LIVE = State("live", seconds_since_step=5.0, step_seconds=10.0)


def sentences(changed: dict[str, list[float | None]], state: State = LIVE) -> list[dict[str, Any]]:
    seen = history(changed)
    return verdict.verdict(seen, rules.findings(seen), state)


def test_a_healthy_run_says_what_came_out_and_that_nothing_stands_out() -> None:
    outcome, calm = sentences({rules.NO_SIGNAL: [10.0] * 60})
    assert outcome["text"].startswith("Mean reward of all groups: ")
    assert (calm["text"], calm["metrics"], calm["is_outcome"]) == ("Nothing stands out.", [], False)
    assert not any(cell["attention"] for cell in verdict.cells(history(), []))
    assert [one["is_outcome"] for one in sentences({rules.NO_SIGNAL: [10.0] * 60}, State("finished"))] == [True]


def test_evals_are_the_outcome_and_groups_without_signal_are_named_from_a_third() -> None:
    points = (
        EvalPoint("countdown", -1, 0.178, 0.15, 0.21), EvalPoint("other", -1, 0.5), EvalPoint("countdown", 59, 0.58),
    )  # fmt: skip
    seen = history({rules.NO_SIGNAL: [45.5] * 60}, points)
    outcome, cost = verdict.verdict(seen, [], State("finished"))
    assert outcome["text"] == "countdown: 17.8 % (15.0 to 21.0) before training, 58.0 % after 60 steps."
    assert cost["text"].startswith("On average, 46 % of a step's groups had equal rewards") and cost["metrics"] == [
        rules.NO_SIGNAL
    ]
    (only, _) = verdict.verdict(history({rules.NO_SIGNAL: [0.0] * 60}, points[:1]), [], State("live"))
    assert only["text"] == "countdown: 17.8 % (15.0 to 21.0) before training."


def test_an_eval_of_the_reward_is_no_share() -> None:
    points = (EvalPoint("code", -1, 1.2, 1.1, 1.3, "reward"), EvalPoint("code", 59, -0.5, metric="reward"))
    (only, _) = verdict.verdict(history({rules.NO_SIGNAL: [0.0] * 60}, points), [], State("live"))
    assert only["text"] == f"code, reward: 1.200 (1.100 to 1.300) before training, {rules.MINUS}0.500 after 60 steps."


@pytest.mark.parametrize(("name", "changed"), [
    ("wait", {WAIT: [6.2] * 10}), ("grad_norm", {rules.GRAD_NORM: [40.0]}), ("kl", {rules.KL: [0.5, 1e-4, 1e-4]}),
    ("truncated", {rules.TRUNCATED: [90.0] * 10}), ("reward", {rules.REWARD: [0.05] * 10}),
])  # fmt: skip
def test_a_finding_marks_the_cell_of_its_metric_alone(name: str, changed: dict[str, list[float | None]]) -> None:
    seen = history(changed)
    found = rules.findings(seen)
    cells = verdict.cells(seen, found)
    assert [(cell["name"], cell["words"]) for cell in cells if cell["attention"]] == [(name, found[0].words)]


def test_a_run_gets_its_outcome_the_worst_fact_and_advice_while_it_can_take_it() -> None:
    wrong = {WAIT: [6.2] * 10, rules.ENTROPY: [0.01] * 10, rules.AGE: [5.0] * 10, rules.NO_SIGNAL: [10.0] * 60}
    outcome, fact, advice = sentences(wrong)
    assert "Mean reward" in outcome["text"] and "Entropy fell" in fact["text"] and "learning_rate" in advice["text"]
    assert [one["text"] for one in sentences(wrong, State("finished"))] == [outcome["text"], fact["text"]]


def test_groups_without_signal_are_named_once_beside_another_problem() -> None:
    # The advice for a wait names 40 % and more.
    for share, state in ((35.0, LIVE), (55.0, LIVE), (55.0, State("finished"))):
        texts = [one["text"] for one in sentences({WAIT: [6.2] * 10, rules.NO_SIGNAL: [share] * 60}, state)]
        assert "waits" in texts[1]
        assert sum(f"{share:.0f} %" in text and "equal rewards" in text for text in texts) == 1


def test_a_stall_brings_its_own_advice_and_evals_after_the_last_step_are_none() -> None:
    stalled = {"seconds_since_step": 900.0, "step_seconds": 10.0}
    stall, *_, advice = sentences({}, State("live", **stalled))
    assert "py-spy" in advice["text"] and "py-spy" not in stall["text"]
    after_training = sentences({}, State("live", **stalled, is_training=False))
    assert not any("No step has ended" in one["text"] for one in after_training)


@pytest.mark.parametrize(("state", "text"), [
    (State("failed", "out of memory"), "The run failed: out of memory"), (State("dead"), "process of the run is gone"),
    (State("live", seconds_since_step=900.0, step_seconds=10.0), "No step has ended for 15 min"),
])  # fmt: skip
def test_the_end_of_a_run_and_a_stall_come_first(state: State, text: str) -> None:
    assert text in sentences({}, state)[0]["text"]


def test_a_run_without_steps_says_so() -> None:
    assert verdict.verdict(History({}, ()), [], State("live"))[0]["text"] == "No step has ended yet."
    ended = verdict.verdict(History({}, ()), [], State("finished"))
    assert ended[0]["text"] == "The run ended before its first step."


def test_a_ratio_is_one_sum_over_the_other() -> None:
    seen = History({"a": [1.0, None, 3.0], "b": [2.0, 2.0, 6.0]}, range(3))
    assert seen.mean("a / b") == 0.4
    assert seen.mean("b / missing") is None


@pytest.mark.parametrize(("values", "words"), [
    ([0.0, 1.0] * 10, "steady"),
    (list(range(20)), "doubled, still rising"),
    ([10.0 + 0.1 * n for n in range(100)], "up, still rising"),
    ([0.6 - 0.01 * n for n in range(30)] + [0.25, 0.26] * 15, "halved, flat now"),
    ([5.0, 5.1] * 20 + [4.0, 4.1] * 5, "down, still falling"),
    ([1.0, 1.1] * 10 + [3.0, 3.1] * 5 + [2.5, 2.6] * 5, "doubled, falling now"),
    ([1.0, 1.1] * 5 + [3.0, 3.1] * 10 + [1.0, 1.1] * 5, "falling"),
    ([1.0], "too early"),
])  # fmt: skip
def test_a_trend_is_that_of_the_run_and_whether_it_lasts(values: list[float], words: str) -> None:
    assert verdict.trend(History({"x": values}, range(len(values))), "x") == words


def test_time_left_is_the_remaining_steps_at_the_usual_duration() -> None:
    started, ended = [0.0, 10.0, 20.0], [10.0, 20.0, 90.0]
    shown = verdict.progress(range(3), started, ended, 10, live=True)
    assert shown == {"step": 3, "num_steps": 10, "seconds_left": 70.0}
    assert verdict.progress(range(3), started, ended, 10, live=False)["seconds_left"] is None


def row(kind: str, message: str, **more: Any) -> dict[str, Any]:
    return {
        **{"attempt": 2, "time": 1.0, "step": 3, "level": "warning", "kind": kind, "message": message},
        **{"advice": None, "metrics": None, **more},
    }


def test_an_alert_is_resolved_once_its_cause_is_gone() -> None:
    seen = history({rules.TRUNCATED: [90.0] * 10})
    rows = [
        row("server", "server 1 is back with the current weights", level="info"),
        row("eval", "math500 at version 40: accuracy 0.612", level="info"),
        row("eval", "eval math500 at version 20 was skipped: its servers serve rollouts"),
        row("eval", "eval aime at version 20 was skipped: its servers serve rollouts"),
        row("server", "server 0 is down: killed"),
        row("server", "server 1 is down: killed"),
        row("truncation", "90 % of the answers are cut off."),
        row("grad_norm", "The gradient norm reached 40, usually 0.3."),
        row("checkpoint", "the checkpoint after step 8 was not written", attempt=1),
    ]
    shown = verdict.alerts(rows, 2, rules.findings(seen))
    assert [alert["resolved"] for alert in shown] == [True, True, True, False, False, True, False, True, True]


def test_a_problem_that_was_reported_again_is_one_alert() -> None:
    seen = history({rules.TRUNCATED: [90.0] * 10})
    rows = [row("truncation", f"{50 + step // 10} % are cut off.", step=step) for step in (330, 230, 130, 10)]
    lasting, before = verdict.alerts(rows, 2, rules.findings(seen))
    assert (lasting["first_step"], lasting["step"], lasting["count"], lasting["title"]) == (
        130, 330, 3, "83 % are cut off",
    )  # fmt: skip
    assert (before["step"], before["count"]) == (10, 1)
    assert (lasting["resolved"], before["resolved"]) == (False, True)


def test_what_each_attempt_of_a_run_reports_is_listed_once() -> None:
    checkpoint, accuracy = "A checkpoint takes 13 MiB of the {} GiB that are free.", "math at version 4: accuracy {}"
    rows = [
        row("eval", accuracy.format(0.6), level="info"),
        row("server", "server 0 is back with the current weights", level="info"),
        row("config", checkpoint.format(57), level="info"),
        row("environment", "What ends an answer: <eos>", level="info"),
        row("config", "clip_low does not bind.", level="info"),
        row("server", "server 0 is back with the current weights", level="info", attempt=1),
        row("environment", "the prompt of item 3 is too long", attempt=1),
        row("eval", accuracy.format(0.5), level="info", attempt=1),
        row("eval", "math at version 2: accuracy 0.4", level="info", attempt=1),
        row("config", checkpoint.format(58), level="info", attempt=1),
        row("environment", "What ends an answer: <eos>", level="info", attempt=1),
    ]
    listed = [alert["title"] for alert in verdict.alerts(rows, 2, [])]
    assert listed == [row["message"].rstrip(".") for row in (*rows[:7], rows[8])]
    assert len(verdict.alerts(rows[5:], 2, [])) == 6  # before the second attempt has reported anything


@pytest.mark.parametrize(("kind", "ends_of_steps", "resolved"), [
    ("stalled", [[], [99.0], [101.0]], [False, False, True]),  # by the next step
    ("log", [[90.0 + step for step in range(count)] for count in (5, 20, 21)], [False, False, True]),  # after ten
])  # fmt: skip
def test_a_stall_and_a_logged_warning_are_resolved_by_later_steps(
    kind: str, ends_of_steps: list[list[float]], resolved: list[bool]
) -> None:
    rows = [row(kind, "No step has ended for 6 min.", time=100.0)]
    assert [verdict.alerts(rows, 2, [], ends)[0]["resolved"] for ends in ends_of_steps] == resolved


def test_a_nearly_full_disk_is_resolved_when_it_is_no_longer_reported_every_hour() -> None:
    rows = [row("disk", "The disk has 9 GiB left.", time=3600.0 * hour) for hour in (31, 30, 2, 1)]
    for last_step, is_resolved in ((31.5, False), (33.0, True)):
        newest, before = verdict.alerts(rows, 2, [], [3600.0, 3600.0 * last_step])
        assert (newest["count"], newest["first_time"], newest["resolved"]) == (2, 3600.0 * 30, is_resolved)
        assert (before["count"], before["first_time"], before["resolved"]) == (2, 3600.0, True)


def test_an_alert_of_an_earlier_version_has_its_advice_in_its_message() -> None:
    (shown,) = verdict.alerts([row("server", "Server 0 restarted. Look at its log.")], 2, [])
    assert (shown["title"], shown["text"], shown["advice"]) == ("Server 0 restarted", "Look at its log.", None)
    assert shown["metrics"] == []
