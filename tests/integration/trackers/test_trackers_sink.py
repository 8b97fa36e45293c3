"""Trackers get copies: none of them can stop or slow a run, and their process ends with the run."""

import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.integration.trackers.conftest import offline_summary, offline_values
from tests.unit.orchestrator.fakes import config_of

from telescope.errors import UserError
from telescope.orchestrator.run import _TrainingRun
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.status import RunStatus, summarize
from telescope.trackers.base import MAX_WAITING
from telescope.trackers.sink import TrackerSink

CONFIG = config_of(use_wandb=True)


@pytest.fixture
def start_instead(monkeypatch):
    """Replaces the process with a script that is given as text."""

    def replace(script: str) -> None:
        def start(self):
            return subprocess.Popen(
                [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )

        monkeypatch.setattr(TrackerSink, "_start", start)

    return replace


def messages(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_evaluation_goes_to_the_run_that_it_names(tmp_path):
    sink = TrackerSink(config_of(use_wandb=False), tmp_path, run_path="me/project/abc123")
    sink.log_step(9, {"eval/math500/accuracy": 0.5})
    sink.close()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-abc123.wandb")
    assert offline_summary(tmp_path)["eval/math500/accuracy"] == 0.5
    assert b"me" in path.read_bytes()


def test_without_credentials_wandb_records_offline_and_says_so_without_a_warning(tmp_path, caplog, capfd):
    sink = TrackerSink(CONFIG, tmp_path)
    for step in range(3):
        sink.log_step(step, {"reward_mean": step / 2, "timing/forward/total": 1.5, "odd": float("nan")})
    sink.log_summary({"heldout_after": 0.5})
    sink.close(timeout=120)
    assert sink.mode == "offline"
    assert messages(caplog) == []
    assert sink.notice is not None and "no W&B credentials" in sink.notice
    rows = offline_values(tmp_path)
    assert [(row["step"], row["reward_mean"]) for row in rows] == [(0.0, 0.0), (1.0, 0.5), (2.0, 1.0)]
    assert rows[0]["timing/forward/total"] == 1.5
    assert capfd.readouterr().out == "", "W&B prints nothing into the run's terminal"


async def test_the_live_view_reports_offline_recording(tmp_path, monkeypatch):
    async def ends_at_once(self: _TrainingRun, temporary: object) -> None:
        raise UserError("enough")

    monkeypatch.setattr(_TrainingRun, "_start_and_train", ends_at_once)
    run = _TrainingRun(config_of(run_dir=str(tmp_path / "run"), use_wandb=True, wandb_upload_code=False), [], None)
    with pytest.raises(UserError, match="enough"):
        await run.run()
    (message,) = run._status.messages
    assert "no W&B credentials" in message
    assert str(tmp_path / "run" / "wandb") in message


def test_the_summary_of_an_ended_run_is_sent(tmp_path):
    config = config_of(run_dir=str(tmp_path / "run"), use_wandb=True)
    directory = RunDirectory.create(config, [])
    with directory.open_record(console=False):
        status = RunStatus("demo", 60)
        status.step = 7
        directory.ended(
            summarize(config, directory.path, status, [], seconds=2.5, training_seconds=1.0, error=None,
                      interrupted=False)
        )  # fmt: skip
    summary = offline_summary(tmp_path / "run")
    assert (summary["seconds"], summary["steps"]) == (2.5, 7)
    assert "heldout_after" not in summary, "what is not known is not there"


def test_without_trackers_nothing_is_started(tmp_path, monkeypatch, caplog):
    sink = TrackerSink(config_of(use_wandb=False), tmp_path)
    sink.log_step(1, {"a": 1.0})
    sink.close()
    monkeypatch.setenv("WANDB_MODE", "disabled")
    TrackerSink(CONFIG, tmp_path).close()
    assert not list(tmp_path.iterdir())
    assert not messages(caplog)


def test_a_missing_package_of_wandb_is_reported_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("telescope.trackers.sink.is_installed", lambda name: False)
    sink = TrackerSink(CONFIG, tmp_path)
    sink.log_step(1, {"a": 1.0})
    sink.close()
    assert len(messages(caplog)) == 1
    assert "pip install wandb" in messages(caplog)[0]


def test_hanging_trackers_neither_block_a_step_nor_outlive_the_run(tmp_path, start_instead, caplog):
    start_instead("import time; time.sleep(1000)")
    sink = TrackerSink(CONFIG, tmp_path)
    sink.tell = (told := []).append
    for step in range(MAX_WAITING + 2000):
        sink.log_step(step, {"text": 1.0})
    sink.close(timeout=0.5)
    assert sink._process is not None
    assert sink._process.wait(30) != 0
    assert any("too slow for" in message for message in messages(caplog))
    assert any("W&B did not finish" in message for message in messages(caplog))
    assert sink._finished.wait(30)
    assert told == messages(caplog)


def test_a_process_that_crashes_is_a_warning(tmp_path, start_instead, caplog):
    start_instead("import sys; sys.stdin.readline(); sys.exit(3)")
    sink = TrackerSink(CONFIG, tmp_path)
    sink.tell = (told := []).append
    assert sink._finished.wait(60)
    sink.log_step(1, {"a": 1.0})
    sink.close()
    assert any("exited with status 3; the run continues" in message for message in messages(caplog))
    assert told == messages(caplog)


def test_a_tracker_that_fails_costs_its_own_numbers_only(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("in the way")
    sink = TrackerSink(config_of(use_wandb=True, trackers=["wandb", "tensorboard"]), tmp_path)
    sink.tell = (told := []).append
    sink.log_step(1, {"a": 1.0})
    sink.close()
    assert [message.partition(":")[0] for message in messages(caplog)] == ["TensorBoard failed"]
    assert offline_values(tmp_path)[0]["a"] == 1.0
    assert told == messages(caplog)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "logs").write_text("in the way")
    sink = TrackerSink(CONFIG, tmp_path)
    assert sink._finished.wait(60)
    sink.close()
    assert any("cannot be started; the run continues" in message for message in messages(caplog))


def test_the_process_exits_when_the_driver_exits(tmp_path):
    script = (
        "import os, sys, time; sys.path.insert(0, sys.argv[2])\n"
        "from tests.unit.orchestrator.fakes import config_of; from telescope.trackers.sink import TrackerSink\n"
        "sink = TrackerSink(config_of(use_wandb=True), sys.argv[1]); sink.log_step(1, {'a': 1.0})\n"
        "while sink._process is None: time.sleep(0.01)\n"
        "print(sink._process.pid, flush=True); os._exit(9)"
    )
    command = [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parents[3])]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120)
    process = Path("/proc") / answer.stdout.strip()
    deadline = time.monotonic() + 120
    while process.exists() and "Z" not in (process / "stat").read_text().split()[2] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process.exists() or (process / "stat").read_text().split()[2] == "Z"
