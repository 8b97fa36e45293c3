"""A run directory that goes away under a run: said once, and no failure of the run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from tests.unit.orchestrator.fakes import config_of

from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.summary import summarise
from telescope.record.reader import Run


def news_until(directory: RunDirectory, wanted: Callable[[str], bool]) -> list[str]:
    """What `record_news` said, asked as often as the run asks, up to and with the line that is wanted."""
    said: list[str] = []
    deadline = time.monotonic() + 30
    while not (said and wanted(said[-1])):
        assert time.monotonic() < deadline, said
        line = directory.record_news()
        said += [line] if line is not None else []
        time.sleep(0.01)
    return said


def test_a_run_whose_directory_is_removed_says_so_once_and_ends_as_ever(tmp_path: Path) -> None:
    config = config_of(run_dir=str(tmp_path / "run"), use_wandb=False, metrics_logger_interval_seconds=0.1)
    directory = RunDirectory.create(config, [])
    with directory.open_record(console=False):
        assert directory.record_problem() is None
        assert directory.record_news() is None
        shutil.rmtree(tmp_path / "run")
        (line,) = news_until(directory, lambda line: "CANNOT BE WRITTEN" in line)
        assert "was removed or replaced" in line and "the run continues" in line
        time.sleep(0.3)
        assert directory.record_news() is None
        problem = directory.record_problem()
        assert problem is not None and str(tmp_path / "run") in problem
        summary = summarise(
            config, directory.path, RunStatus("demo", 1), [], seconds=1.0, training_seconds=1.0, error=None,
            interrupted=False, record_error=problem,
        )  # fmt: skip
        directory.ended(summary)
    assert summary.to_json()["record_error"] == problem
    assert (summary.status, (tmp_path / "run").exists()) == ("finished", False)


def test_a_record_that_works_again_is_said_too(tmp_path: Path) -> None:
    config = config_of(run_dir=str(tmp_path / "run"), use_wandb=False, metrics_logger_interval_seconds=0.1)
    directory = RunDirectory.create(config, [])
    with directory.open_record(console=False):
        assert directory.record_problem() is None
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        news_until(directory, lambda line: "CANNOT BE WRITTEN" in line)
        (tmp_path / "elsewhere").rename(tmp_path / "run")
        assert news_until(directory, lambda line: "again" in line) == ["the record of this run is written again"]
        assert directory.record_problem() is None


def test_the_accuracy_before_training_is_in_the_list_of_runs_while_the_run_goes_on(tmp_path: Path) -> None:
    config = config_of(run_dir=str(tmp_path / "run"), use_wandb=False, number_of_steps=60)
    directory = RunDirectory.create(config, [])
    with directory.open_record(console=False):
        directory.evaluated_before(0.25)
        directory.recorder.flush()
        summary = Run(tmp_path / "run").summary()
        assert (summary.status, summary.num_steps, summary.heldout_before) == ("live", 60, 0.25)
        directory.ended(
            summarise(config, directory.path, RunStatus("demo", 60), [], seconds=1.0, training_seconds=1.0, error=None,
                      interrupted=True)
        )  # fmt: skip
    assert Run(tmp_path / "run").summary().status == "stopped"
