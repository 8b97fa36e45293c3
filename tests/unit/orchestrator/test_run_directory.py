"""A run directory that disappears during a run is reported once and does not fail the run."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.processes import wait_for
from tests.unit.orchestrator.fakes import config_of

from telescope.cli import main as cli
from telescope.errors import RunError, UserError
from telescope.orchestrator import preflight, session
from telescope.orchestrator import run as run_module
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.status import RunStatus, RunSummary, summarize
from telescope.record.files import RunFiles
from telescope.record.reader import Run
from telescope.weights.model_folder import ModelOrigin, ModelSource, write_origin


def make(tmp_path: Path, **fields: Any) -> RunDirectory:
    return RunDirectory.create(config_of(run_dir=str(tmp_path / "run"), use_wandb=False, **fields), [])


def summary_of(directory: RunDirectory, **changes: Any) -> RunSummary:
    ends: dict[str, Any] = {"seconds": 1.0, "training_seconds": 1.0, "error": None, "interrupted": False}
    return summarize(directory.config, directory.path, RunStatus("demo", 60), [], **(ends | changes))


QUICK = {"metrics_logger_interval_seconds": 0.1}


def news_until(directory: RunDirectory, wanted: Callable[[str], bool]) -> list[str]:
    """Polls `record_news` like the run; returns its messages up to the wanted one."""
    lines: list[str] = []
    deadline = time.monotonic() + 30
    while not (lines and wanted(lines[-1])):
        assert time.monotonic() < deadline, lines
        line = directory.record_news()
        lines += [line] if line is not None else []
        time.sleep(0.01)
    return lines


def test_a_run_whose_directory_is_removed_reports_it_once_and_finishes(tmp_path):
    directory = make(tmp_path, **QUICK)
    with directory.open_record(console=False):
        assert directory.record_problem() is None
        assert directory.record_news() is None
        # Renamed first: a heartbeat cannot write into it while it is removed.
        shutil.rmtree((tmp_path / "run").rename(tmp_path / "removed"))
        (line,) = news_until(directory, lambda line: "CANNOT BE WRITTEN" in line)
        assert "was removed or replaced" in line and "the run continues" in line
        time.sleep(0.3)
        assert directory.record_news() is None
        problem = directory.record_problem()
        assert problem is not None and str(tmp_path / "run") in problem
        summary = summary_of(directory, record_error=problem)
        directory.ended(summary)
    assert summary.record_error == problem
    assert (summary.status, (tmp_path / "run").exists()) == ("finished", False)


def test_two_runs_that_start_in_the_same_second_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_of(wandb_run_name="demo")
    stamped = tmp_path / "runs" / "demo-20260102-030405"
    monkeypatch.setattr(preflight, "choose_run_dir", lambda config: stamped)
    paths = []
    for _ in range(3):
        preflight.check_run_dir(config)
        directory = RunDirectory.create(config, [], path=stamped)
        (directory.path / "run.json").write_text("{}")
        paths.append(directory.path)
    assert paths == [stamped, Path(f"{stamped}-2"), Path(f"{stamped}-3")]


def test_a_run_dir_that_the_user_named_is_used_as_it_is(tmp_path):
    (tmp_path / "run").mkdir()
    config = config_of(run_dir=str(tmp_path / "run"))
    assert RunDirectory.create(config, []).path == tmp_path / "run"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        RunDirectory.create(config_of(run_dir=str(tmp_path / "file")), [])


def test_a_start_that_is_refused_leaves_the_config_of_the_run_that_has_the_directory(tmp_path):
    first = make(tmp_path)
    with first.open_record(console=False):
        config = RunFiles(first.path).config.read_text()
        with pytest.raises(UserError, match="is in use"), make(tmp_path, seed=7).open_record(console=False):
            pass
        assert RunFiles(first.path).config.read_text() == config


def test_a_recovered_record_is_reported(tmp_path):
    directory = make(tmp_path, **QUICK)
    with directory.open_record(console=False):
        assert directory.record_problem() is None
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        news_until(directory, lambda line: "CANNOT BE WRITTEN" in line)
        (tmp_path / "elsewhere").rename(tmp_path / "run")
        assert news_until(directory, lambda line: "again" in line) == ["the record of this run is written again"]
        assert directory.record_problem() is None


def test_the_accuracy_before_training_is_in_the_list_of_runs_while_the_run_goes_on(tmp_path):
    directory = make(tmp_path, number_of_steps=60)
    with directory.open_record(console=False):
        directory.evaluated_before(0.25)
        directory.recorder.flush()
        summary = Run(tmp_path / "run").summary()
        assert (summary.status, summary.num_steps, summary.heldout_before) == ("live", 60, 0.25)
        directory.ended(summary_of(directory, interrupted=True))
    assert Run(tmp_path / "run").summary().status == "stopped"


@pytest.mark.parametrize(("error", "told"), [(None, ("end", "info")), (RunError("rank 0 exited"), ("run", "error"))])
def test_the_command_of_alerts_is_told_of_the_end(tmp_path, error, told):
    command = ["sh", "-c", f"cat >> {tmp_path}/told"]
    directory = make(tmp_path, alert_command=command)
    with directory.open_record(console=False):
        summary = summary_of(directory, error=error)
        directory.ended(summary)
    alert = json.loads((tmp_path / "told").read_text())
    assert (alert["kind"], alert["level"], alert["message"]) == (*told, summary.error or summary.sentence)
    recorded = Run(directory.path).table("alerts").to_pylist()
    assert [row["kind"] for row in recorded] == ([] if error is None else ["run"])


@pytest.mark.parametrize(("error", "end"), [
    (None, "The run finished 0 steps in 1 s"),
    (RunError("rank 0 exited"), "The run failed after 0 steps: RunError: rank 0 exited"),
    (KeyError("reward"), "KeyError: 'reward'"),
])  # fmt: skip
def test_the_log_of_the_driver_ends_with_the_end_of_the_run(tmp_path, error, end):
    directory = make(tmp_path)
    with directory.open_record(console=False):
        directory.ended(summary_of(directory, error=error), error)
    lines = RunFiles(directory.path).log("driver").read_text().splitlines()
    assert lines[-1].endswith(end)
    assert Run(directory.path).table("logs").to_pylist()[-1]["message"].endswith(end)
    assert [row["kind"] for row in Run(directory.path).table("alerts").to_pylist()] == (["run"] if error else [])


def test_rows_that_were_dropped_make_the_record_incomplete(tmp_path):
    directory = make(tmp_path)
    with directory.open_record(console=False):
        directory.recorder._pending.dropped["turns"] += 3
        assert directory.record_problem() == "rows were dropped while the disk could not be written: 3 of turns"


def test_a_failed_run_reports_its_incomplete_record(tmp_path, monkeypatch, capsys):
    config = config_of(run_dir=str(tmp_path / "run"), use_wandb=False, metrics_logger_interval_seconds=0.1)

    async def lose_the_directory(*arguments: object, **options: object) -> None:
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        raise RunError("trainer rank 0 exited")

    monkeypatch.setattr(session, "start_components", lose_the_directory)
    monkeypatch.setattr(cli, "_dispatch", lambda arguments: run_module.run_training(config, []))
    assert cli.main([]) == 1
    error = capsys.readouterr().err
    assert "telescope: trainer rank 0 exited\n" in error
    assert f"The record in {tmp_path / 'run'} is incomplete: " in error


def test_the_model_s_config_is_recorded_with_the_start(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": 2}')
    directory = make(tmp_path, model=str(tmp_path / "model"))
    with directory.open_record(console=False):
        directory.started({"driver": "here"}, 0)
    (attempt,) = Run(tmp_path / "run").attempts()
    assert json.loads(attempt["model_config"]) == {"model_type": "qwen3", "num_hidden_layers": 2}


def test_a_run_whose_model_is_elsewhere_starts_without_its_config(tmp_path):
    directory = make(tmp_path, model=str(tmp_path / "gone"))
    with directory.open_record(console=False):
        directory.started({}, 0)
    assert Run(tmp_path / "run").attempts()[0]["model_config"] is None


def test_the_state_of_a_run_is_plain_values():
    status = RunStatus("demo", 60)
    status.components["trainer"] = "waiting for a batch"
    assert json.loads(json.dumps(status.now())) == status.now()
    assert status.now()["components"] == {"trainer": "waiting for a batch"}


def test_the_fields_of_the_record_set_its_interval_and_its_files(tmp_path):
    blocks = {"rollout_block_size": 1, "event_tail_window_seconds": 7, "event_block_duration_seconds": 8}
    directory = make(tmp_path, metrics_logger_interval_seconds=0.05, **blocks)
    with directory.open_record(console=False) as recorder:
        recorder.write("samples", {"sample_id": "a"})
        samples = tmp_path / "run" / "tables" / "samples"
        wait_for(lambda: list(samples.glob("*.parquet")), "a file of one rollout, after an interval,")
        assert (recorder.tail_seconds, recorder.block_seconds, recorder.block_rollouts) == (7, 8, 1)


@pytest.mark.parametrize(("step", "left"), [(3, []), (5, ["model-step_5"]), (None, ["model-step_5"])])
def test_results_of_a_stopped_run_do_not_stand_beside_the_resumed_one(tmp_path, step, left):
    directory = make(tmp_path)
    with directory.open_record(console=False):
        directory.started({}, 0)
    files = RunFiles(directory.path)
    files.model.mkdir()
    files.summary.write_text('{"status": "stopped", "steps": 5}')
    if step is not None:
        write_origin(files.model, ModelOrigin(ModelSource(step), run="r"))
    resumed = RunDirectory.create(directory.config, [], is_resumed=True)
    with resumed.open_record(console=False):
        assert files.model.is_dir() and files.summary.is_file(), "the checkpoint may not load"
        resumed.started({}, 3)
    assert not files.summary.exists()
    assert [path.name for path in directory.path.glob("model*")] == left
