"""What `telescope eval` prints and writes."""

import json
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.orchestrator.fakes import config_of

from telescope.cli.eval import _run_path, _steps, _write_plot, as_json, print_outcome
from telescope.errors import UserError
from telescope.evals.runner import EvalResult
from telescope.evals.statistics import Estimate


def result(name: str, version: int, number: int, accuracy: float) -> EvalResult:
    return EvalResult(
        name, version, 10, 37, 1.0, {"correct": accuracy, "pass@4/correct": 0.9}, 1.0, False, number, 4, {},
        Estimate(accuracy, accuracy - 0.1, accuracy + 0.1, 10), Estimate(0.2, 0.1, 0.3, 10) if version else None,
    )  # fmt: skip


@pytest.fixture
def outcome(tmp_path) -> Any:
    """Two checkpoints, an eval twice with other settings, another once."""
    targets = [SimpleNamespace(label=f"step_{step}", path=tmp_path, step=step) for step in (0, 50)]
    evals = [("math500", 0, 0.5), ("math500", 1, 0.5), ("wordle", 2, 0.25)]
    results = [
        SimpleNamespace(target=one, version=one.step, results=[result(name, one.step, *rest) for name, *rest in evals])
        for one in targets
    ]
    config = config_of(evals=[{"name": name, "num_samples": 10} for name, *_ in evals])
    job = SimpleNamespace(output=tmp_path, run_dir=None, config=config)
    return SimpleNamespace(job=job, results=results, problems=["eval aime_2024 at version 50 failed: no items"])


def test_the_table_has_every_model_and_eval_and_what_went_wrong(outcome, capsys):
    print_outcome(outcome, Path("accuracy.svg"))
    out = capsys.readouterr().out
    assert out.count("math500#0") == out.count("math500#1") == out.count("wordle") == 2
    problem = "eval aime_2024 at version 50 failed: no items"
    for words in ("0.400 to 0.600", "+0.200 (+0.100 to +0.300)", "pass@4/correct", problem):
        assert words in out
    assert "failed" in out.splitlines()[0]
    assert [line.split()[-1] for line in out.splitlines() if "math500#0" in line] == ["3", "3"]


def test_an_eval_of_the_reward_is_not_called_accuracy(outcome, capsys, tmp_path):
    for each in outcome.results:
        each.results[2] = replace(each.results[2], metrics={"reward": 1.2})
    print_outcome(outcome, Path("accuracy.svg"))
    out = capsys.readouterr().out
    assert "accuracy or reward" in out and out.count("wordle, reward") == out.count("math500#0, accuracy") == 2
    for each in outcome.results:
        del each.results[:2]
    _write_plot(outcome, tmp_path / "plot.svg")
    assert "Reward, with 95 % intervals" in (tmp_path / "plot.svg").read_text()


def test_an_interval_without_width_is_not_shown(outcome, capsys):
    results = outcome.results[1].results
    results[0] = replace(results[0], gain=Estimate(0.0, 0.0, 0.0, 10))
    print_outcome(outcome, Path("accuracy.svg"))
    assert "+0.000 (on every item)" in capsys.readouterr().out


def test_the_plot_has_a_line_per_eval_with_intervals(outcome, tmp_path):
    _write_plot(outcome, tmp_path / "plot.svg")
    root = xml.etree.ElementTree.parse(tmp_path / "plot.svg").getroot()
    assert sum(element.tag.endswith("polyline") for element in root) == 3
    assert {"math500#0", "math500#1", "wordle"} <= {element.text for element in root}


def test_the_json_has_numbers_and_intervals(outcome):
    values = json.loads(json.dumps(as_json(outcome)))
    first = values["models"][1]["evals"][0]
    assert (first["name"], first["number"], first["accuracy"]) == ("math500", 0, 0.5)
    assert (first["num_scored"], first["num_failed"]) == (37, 3)
    assert first["interval"] == pytest.approx([0.4, 0.6])
    assert first["gain"] == [0.2, 0.1, 0.3]


def test_steps_and_wandb_runs_are_read_or_refused():
    assert _steps("50, 100") == [50, 100]
    assert _steps("all") == []
    assert _run_path("me/project/runs/abc") == _run_path("me/project/abc") == "me/project/abc"
    with pytest.raises(UserError, match="entity/project/run_id"):
        _run_path("abc")
