"""The rules of the verdict, one by one."""

import math

import pytest

from telescope.dashboard import health

LIVE = {"status": "live", "error": None, "seconds_since_step": 5.0, "step_seconds": 10.0}
QUIET = {
    health.REWARD: [0.5] * 30,
    "timing_waiting_for_data": [1.0] * 30,
    "timing_step_total": [10.0] * 30,
    "entropy": [1.0] * 30,
    "grad_norm": [1.0] * 30,
    health.KL: [0.001] * 30,
    health.NO_SIGNAL: [10.0] * 30,
    health.TRUNCATED: [0.0] * 30,
    health.AGE: [1.0] * 30,
}


def first(changes, state=LIVE):
    return health.verdict({**QUIET, **changes}, range(30), state)


def test_nothing_stands_out_without_a_rule_that_fires():
    assert first({})[0] == {"text": "Nothing stands out.", "metrics": []}
    assert not any(cell["attention"] for cell in health.cells(QUIET)[0])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"timing_waiting_for_data": [6.2] * 30}, "The trainer waits 62% of the time"),
        ({health.NO_SIGNAL: [60.0] * 30}, "60 % of the groups have equal rewards"),
        ({health.TRUNCATED: [25.0] * 30}, "25 % of the answers are cut off"),
        ({health.KL: [0.3] * 30}, "differ by 0.3 nats"),
        ({"entropy": [1.0] * 15 + [0.05] * 15}, "Entropy fell from 1 to 0.05 nats"),
        ({"grad_norm": [1.0] * 29 + [40.0]}, "40 times its median"),
        ({"grad_norm": [1.0] * 29 + [math.nan]}, "not a number"),
        ({health.REWARD: [0.8] * 20 + [0.1] * 10}, "The reward fell to 0.1 from 0.8"),
        ({health.AGE: [5.0] * 30}, "Tokens are 5.0 versions old"),
    ],
)
def test_each_rule_fires_names_its_metrics_and_gives_an_advice(changes, text):
    sentences = first(changes)
    assert text in sentences[0]["text"]
    assert set(changes) <= set(sentences[0]["metrics"])
    assert len(sentences) <= 3 and sentences[-1]["text"].endswith(".")
    assert [cell["attention"] for cell in health.cells({**QUIET, **changes})[0]].count(True) == 1


def test_an_ended_run_gets_no_advice():
    assert len(first({health.AGE: [5.0] * 30}, {**LIVE, "status": "finished"})) == 2


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({**LIVE, "status": "failed", "error": "out of memory"}, "The run failed: out of memory"),
        ({**LIVE, "status": "dead"}, "process of the run is gone"),
        ({**LIVE, "seconds_since_step": 900.0}, "No step has ended for 15 min"),
    ],
)
def test_the_end_of_a_run_and_a_stall_come_first(state, text):
    assert text in first({}, state)[0]["text"]


def test_a_run_without_steps_says_so():
    assert health.verdict({}, [], {**LIVE, "step_seconds": None})[0]["text"] == "No step has ended yet."


def test_a_ratio_is_one_sum_over_the_other():
    columns = {"a": [1.0, None, 3.0], "b": [2.0, 2.0, 6.0]}
    assert health.mean(columns, "a / b") == 0.4
    assert health.mean(columns, "b / missing") is None


def test_trends_need_more_than_noise():
    assert health.trend({"x": [0.0, 1.0] * 10}, "x") == "steady"
    assert health.trend({"x": [float(step) for step in range(20)]}, "x") == "rising"
    assert health.trend({"x": [1.0]}, "x") == "too early to say"


def test_time_left_is_the_remaining_steps_at_the_usual_duration():
    started, ended = [0.0, 10.0, 20.0], [10.0, 20.0, 90.0]
    assert health.progress(range(3), started, ended, 10, live=True) == {
        "step": 3,
        "num_steps": 10,
        "seconds_left": 70.0,
    }
    assert health.progress(range(3), started, ended, 10, live=False)["seconds_left"] is None


def test_the_verdict_of_a_run_and_its_recorded_alerts(client):
    body = client.get("/api/runs/first/health").json()
    assert "waits 62%" in body["verdict"][0]["text"]
    (alert,) = body["alerts"]
    words = ("Server 0 restarted", "Look at its log.")
    assert (alert["step"], alert["title"], alert["text"], alert["resolved"]) == (2, *words, True)
    assert body["progress"] == {"step": 12, "num_steps": 12, "seconds_left": None}
