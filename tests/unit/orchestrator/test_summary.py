"""The summary of a run, for every way that a run can end."""

import asyncio
import json
import logging
import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.unit.orchestrator.fakes import StrictRecorder, config_of

from telescope.cli.train import print_summary
from telescope.evals.runner import EvalResult
from telescope.evals.statistics import Estimate
from telescope.orchestrator.status import Interrupted, RunStatus, RunSummary, StepSummary, summarize


def result(version: int, correct: float, *, name: str = "countdown", held_out: bool = True) -> EvalResult:
    return EvalResult(name, version, 500, 499, 1.0, {"correct": correct, "reward": 0.0}, 2.5, held_out)


def summary_of(evals: list[EvalResult] | None = None, **changes: Any) -> RunSummary:
    status = RunStatus("demo", 100, step=2)
    status.history.extend(StepSummary(step, 0.25 + step / 4, 0.5, 1.5, 0.0, 100.0, 0.0, 1.0, 0.1) for step in range(2))
    arguments: dict[str, Any] = {
        "seconds": 12.34567, "training_seconds": 10.0, "error": None, "interrupted": False, **changes
    }  # fmt: skip
    return summarize(config_of(), Path("/runs/demo"), status, evals or [], **arguments)


def test_the_summary_of_a_finished_run_reports_the_gain() -> None:
    summary = summary_of([result(0, 0.25), result(100, 0.5)])
    assert summary.status == "finished"
    assert (summary.heldout_before, summary.heldout_after) == (0.25, 0.5)
    assert (summary.heldout_items, summary.heldout_temperature) == (500, 1.0)
    assert (summary.steps, summary.seconds, summary.training_seconds) == (2, 12.346, 10.0)
    assert (summary.reward_first, summary.reward_last) == (0.25, 0.5)
    assert (summary.reward_trained_first, summary.reward_trained_last) == (0.5, 0.5)
    assert "finished 2 steps in 12 s" in summary.sentence


@pytest.mark.parametrize(("steps", "status", "sentence"), [
    (16, "finished", "finished 16 steps, the last 2 in 12 s"), (1, "finished", "finished 1 step in 12 s"),
    (1, "stopped", "stopped after 1 step, as requested"), (1, "failed", "failed after 1 step"),
])  # fmt: skip
def test_the_sentence_counts_steps_and_says_which_ones_its_seconds_are_of(
    steps: int, status: Any, sentence: str
) -> None:
    assert replace(summary_of(), status=status, steps=steps).sentence == sentence


@pytest.mark.parametrize(("metrics", "label"), [({"correct": 0.5}, "accuracy"), ({"reward": 1.2}, "reward")])
def test_the_closing_lines_name_the_metric_of_the_eval(metrics: dict[str, float], label: str, capsys: Any) -> None:
    summary = summary_of([replace(result(version, 0.5), metrics=metrics) for version in (0, 100)])
    print_summary(summary, Console(width=200))
    assert f"held-out {label} " in capsys.readouterr().out


def test_the_headline_is_the_first_eval_whose_items_were_held_out() -> None:
    evals = [
        result(0, 0.1, name="seen", held_out=False), result(0, 0.2), result(5, 0.3, name="seen", held_out=False),
        result(5, 0.4),
    ]  # fmt: skip
    summary = summary_of(evals)
    assert (summary.heldout_before, summary.heldout_after) == (0.2, 0.4)
    assert [entry["name"] for entry in summary.evals] == ["seen", "countdown", "seen", "countdown"]
    assert summary.evals[0]["scored"] == 499


def test_the_summary_has_the_intervals_of_accuracy_and_gain() -> None:
    after = replace(
        result(2, 0.5), estimate=Estimate(0.5, 0.45, 0.55, 500), gain=Estimate(0.25, 0.2, 0.3, 500), num_completions=4
    )
    summary = summary_of([result(0, 0.25), after])
    assert summary.heldout_gain_interval == [0.2, 0.3]
    first, last = summary.evals
    assert (first["accuracy_interval"], first["gain"], first["gain_interval"]) == (None, None, None)
    assert (last["accuracy_interval"], last["gain"], last["gain_interval"]) == ([0.45, 0.55], 0.25, [0.2, 0.3])
    assert last["completions_per_item"] == 4


def test_two_evals_of_one_name_are_not_compared_with_each_other() -> None:
    greedy = [replace(result(version, 0.9), number=1) for version in (0, 2)]
    summary = summary_of([result(0, 0.25), greedy[0], result(2, 0.5), greedy[1]])
    assert (summary.heldout_before, summary.heldout_after) == (0.25, 0.5)


def test_what_was_not_measured_is_null_and_without_held_out_items_the_headline_is_the_first_eval() -> None:
    summary = summary_of([result(0, 0.1, held_out=False)])
    assert (summary.heldout_before, summary.heldout_after) == (0.1, None)
    assert summary_of().heldout_before is None
    assert summary_of(training_seconds=None).training_seconds is None


@pytest.mark.parametrize(("changes", "status", "error"), [
    ({"error": ValueError("a bug")}, "failed", "ValueError: a bug"),
    ({"error": ValueError("\x1b[36ma dump\x1b[39m\n" + "of many lines\n" * 200)}, "failed", "ValueError: a dump"),
    ({"error": Interrupted("stopped by a signal"), "interrupted": True}, "stopped", None),
    ({"interrupted": True}, "stopped", None),
    ({"error": asyncio.CancelledError()}, "stopped", None),
])  # fmt: skip
def test_the_summary_has_one_word_for_the_end_of_a_run(changes: dict[str, Any], status: str, error: str | None) -> None:
    summary = summary_of(**changes)
    assert (summary.status, summary.error) == (status, error)
    assert status.split("ed")[0] in summary.sentence
    assert "a bug" not in summary.sentence, "the caller reports the error"


def test_the_file_holds_every_field_as_plain_json() -> None:
    summary = summary_of([result(0, 0.25), result(2, 0.5)])
    written = json.loads(json.dumps(asdict(summary), allow_nan=False))
    names = {"heldout_before", "heldout_after", "steps", "seconds", "run_dir", "config_hash", "status", "evals"}
    assert names <= set(written)
    assert written["evals"][1]["metrics"]["correct"] == 0.5


def test_a_message_of_the_live_view_is_an_alert_of_the_record_also_from_before_it_was_open() -> None:
    status, recorder = RunStatus("demo", 10), StrictRecorder()
    status.report("group_size was raised", "config")
    status.record_alerts(partial(recorder.write, "alerts"))
    status.step = 3
    status.report("server 1 is down: it exited", "server", "warning")
    assert list(status.messages) == ["group_size was raised", "server 1 is down: it exited"]
    assert [(row["level"], row["kind"], row["step"]) for row in recorder.of("alerts")] == [
        ("info", "config", 0),
        ("warning", "server", 3),
    ]


def test_one_call_reports_to_live_view_record_and_log(caplog: pytest.LogCaptureFixture) -> None:
    status, rows = RunStatus("demo", 10), list[dict[str, Any]]()
    status.record_alerts(rows.append)
    log = logging.getLogger("telescope.orchestrator.servers")
    with caplog.at_level(logging.WARNING):
        status.report("server 1 is down: it exited\nTraceback ...", "server", "warning", log=log)
    assert (rows[0]["message"], list(status.messages)) == ("server 1 is down: it exited", [rows[0]["message"]])
    (line,) = caplog.records
    assert (line.name, line.levelname, line.filename) == (log.name, "WARNING", Path(__file__).name)
    assert "Traceback" in line.getMessage()
    assert vars(line)["is_reported"], "it is no second alert"


def test_a_finding_is_an_alert_at_its_step_with_advice_and_metrics() -> None:
    status, rows = RunStatus("demo", 10), list[dict[str, Any]]()
    status.record_alerts(rows.append)
    status.step = 4
    status.trained(4, {"loss/policy": math.nan}, 10.0)
    (row,) = rows
    assert (row["kind"], row["level"], row["step"], row["metrics"]) == ("not_finite", "error", 4, ["loss/policy"])
    assert "learning_rate" in row["advice"] and "learning_rate" in status.messages[0]


def test_a_run_looks_for_a_stall_only_between_its_first_and_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    status, rows = RunStatus("demo", 2), list[dict[str, Any]]()
    status.record_alerts(rows.append)
    clock = [1000.0]
    monkeypatch.setattr("telescope.orchestrator.status.time.monotonic", lambda: clock[0])
    status.detect_stall()
    status.trained(0, {}, 10.0)
    status.step = 1
    clock[0] += 1000
    status.detect_stall()
    status.trained(1, {}, 10.0)
    status.step = 2
    clock[0] += 1000
    status.detect_stall()
    assert [(row["kind"], row["step"]) for row in rows] == [("stalled", 1)]
