"""Trackers get copies: none of them can stop or slow a run, and their process ends with the run."""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.integration.trackers.conftest import offline_summary, offline_values
from tests.processes import has_ended
from tests.unit.orchestrator.fakes import config_of

from telescope.config import TelescopeConfig
from telescope.errors import UserError
from telescope.orchestrator.run import _TrainingRun
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.status import RunStatus, summarize
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run
from telescope.trackers import process
from telescope.trackers.base import TrackedRun
from telescope.trackers.launch import TrackerProcess

CONFIG = config_of(use_wandb=True)


@pytest.fixture
def start_instead(monkeypatch):
    """Replaces the process with a script that is given as text."""

    def replace(script: str) -> None:
        def start(self):
            return subprocess.Popen(
                [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )

        monkeypatch.setattr(TrackerProcess, "_start", start)

    return replace


@contextmanager
def recorded(path: Path) -> Iterator[Recorder]:
    """A record that has begun."""
    with Recorder(path) as recorder:
        begin_run(recorder, name="r", config_hash="h", config_json="{}")
        yield recorder


@contextmanager
def tracked(path: Path, config: TelescopeConfig = CONFIG) -> Iterator[tuple[Recorder, TrackerProcess, list[str]]]:
    """A record of a run that has begun, its tracker process, and the messages for the live view."""
    told: list[str] = []
    with recorded(path) as recorder:
        trackers = TrackerProcess(config, path)
        trackers.tell = told.append
        yield recorder, trackers, told


def messages(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_standalone_evaluation_goes_to_the_run_that_it_names(tmp_path):
    done = {"status": "finished", "num_items": 4, "num_completions": 2, "num_scored": 7, "started_at": 3.0}
    done |= {"ended_at": 5.0, "accuracy": 0.5, "accuracy_low": 0.4, "metrics": {"pass@2/correct": 0.75}}
    with recorded(tmp_path / "run") as recorder:
        ids = ("standalone-a-eval0-math500-v10", "standalone-a-eval0-math500-v20", "eval0-math500-v10")
        for number, eval_id in enumerate(ids):
            recorder.write("evals", {**done, "eval_id": eval_id, "name": "math500", "step": 9 + number})
        recorder.write("evals", {"eval_id": ids[0], "name": "math500", "step": 9, "status": "failed"})
    named = {"entity": "me", "project": "project", "run_id": "abc123"}
    evals = {"record": str(tmp_path / "run"), "evals": {ids[0]: "math500#0"}}
    trackers = TrackerProcess(config_of(use_wandb=False), tmp_path, {**named, **evals})
    trackers.close()
    assert trackers.notice is not None
    assert trackers.notice.startswith("wandb_run_path is set, but there are no W&B credentials")
    assert trackers.notice.endswith("or leave it out.")
    (path,) = tmp_path.glob("wandb/offline-run-*/run-abc123.wandb")
    assert b"me" in path.read_bytes()
    (row,) = offline_values(tmp_path)
    numbers = {"accuracy": 0.5, "accuracy_low": 0.4, "failed": 1, "seconds": 2, "pass@2/correct": 0.75}
    wanted = {f"eval/math500#0/{name}": value for name, value in numbers.items()} | {"step": 9}
    assert {name: value for name, value in row.items() if not name.startswith("_")} == wanted


def test_without_credentials_wandb_records_offline_and_says_so_without_a_warning(tmp_path, caplog, capfd):
    with tracked(tmp_path) as (recorder, trackers, _):
        for step in range(3):
            metrics = {"reward_mean": step / 2, "timing/forward/total": 1.5, "odd": float("nan")}
            recorder.write("steps", {"step": step, "metrics": metrics})
    trackers.close(timeout=120)
    assert trackers.mode == "offline"
    assert messages(caplog) == []
    assert trackers.notice is not None and "no W&B credentials" in trackers.notice
    rows = offline_values(tmp_path)
    assert [(row["step"], row["reward_mean"]) for row in rows] == [(0.0, 0.0), (1.0, 0.5), (2.0, 1.0)]
    assert rows[0]["timing/forward/total"] == 1.5
    assert capfd.readouterr().out == "", "W&B prints nothing into the run's terminal"


async def test_the_live_view_reports_offline_recording(tmp_path, monkeypatch):
    async def ends_at_once(self: _TrainingRun) -> None:
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
    TrackerProcess(config_of(use_wandb=False), tmp_path).close()
    monkeypatch.setenv("WANDB_MODE", "disabled")
    TrackerProcess(CONFIG, tmp_path).close()
    assert not list(tmp_path.iterdir())
    assert not messages(caplog)


def test_a_missing_package_of_wandb_is_reported_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("telescope.trackers.launch.is_installed", lambda name: False)
    TrackerProcess(CONFIG, tmp_path).close()
    assert len(messages(caplog)) == 1
    assert "pip install wandb" in messages(caplog)[0]


def test_hanging_trackers_do_not_outlive_the_run(tmp_path, start_instead, caplog):
    start_instead("import time; time.sleep(1000)")
    with tracked(tmp_path) as (_, trackers, told):
        pass
    before = time.monotonic()
    trackers.close(timeout=0.5)
    assert time.monotonic() - before < 5
    assert trackers._process.wait(30) != 0
    assert len(messages(caplog)) == 1
    assert "W&B did not finish in 0.5 s and was ended. `wandb sync`" in messages(caplog)[0]
    assert told == messages(caplog)


def test_a_slow_tracker_gets_every_step_later(tmp_path, monkeypatch):
    taken: list[tuple[int, dict[str, float]]] = []
    busy, free, ended = threading.Event(), threading.Event(), threading.Event()

    class SlowTracker:
        last_step = -1

        def __init__(self, *_: object) -> None:
            self.log_summary = self.upload = lambda _: None

        def log(self, step: int, values: dict[str, float]) -> None:
            busy.set()
            free.wait(60)
            taken.append((step, values))

        def finish(self) -> None:
            pass

    modules = SimpleNamespace(import_module=lambda name: SimpleNamespace(SlowTracker=SlowTracker))
    monkeypatch.setattr(process, "importlib", modules)
    run = TrackedRun(["slow"], str(tmp_path), "p", "r", resume="allow", wandb_mode="disabled", interval=0.01)
    with recorded(tmp_path) as recorder, ThreadPoolExecutor(1) as pool:
        copied = pool.submit(process._copy, "slow", run, lambda *_: None, ended)
        try:
            for step in range(2000):
                recorder.write("steps", {"step": step, "metrics": {"a": float(step)}})
                if step == 0:
                    assert recorder.flush() and busy.wait(60)
            assert recorder.flush()
        finally:
            ended.set()
            free.set()
        copied.result(60)
    assert taken == [(step, {"a": float(step)}) for step in range(2000)]


def test_a_process_that_crashes_is_a_warning(tmp_path, start_instead, caplog):
    start_instead("import sys, time; sys.stdin.readline(); time.sleep(1); sys.exit(3)")
    with tracked(tmp_path) as (_, trackers, told):
        pass
    trackers.close()
    assert any("exited with status 3; the run continues" in message for message in messages(caplog))
    assert told == messages(caplog)


def test_a_tracker_that_fails_costs_its_own_numbers_only(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("in the way")
    with tracked(tmp_path, config_of(use_wandb=True, trackers=["wandb", "tensorboard"])) as (recorder, trackers, told):
        recorder.write("steps", {"step": 1, "metrics": {"a": 1.0}})
    trackers.close()
    assert [message.partition(":")[0] for message in messages(caplog)] == ["TensorBoard failed"]
    assert offline_values(tmp_path)[0]["a"] == 1.0
    assert told == messages(caplog)


def test_a_record_that_cannot_be_read_at_the_end_is_a_warning_and_its_files_are_uploaded(tmp_path, caplog):
    with recorded(tmp_path) as recorder:
        trackers = TrackerProcess(config_of(use_wandb=True, event_upload_interval_seconds=600), tmp_path)
        recorder.write("evals", {"name": "math500", "status": "finished", "step": 0})  # without its numbers
    trackers.close(timeout=120)
    (message,) = messages(caplog)
    assert message.startswith("W&B lacks the newest numbers, because the record cannot be read: TypeError(")
    assert list(tmp_path.glob("wandb/offline-run-*/files/telescope/files.json"))


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "logs").write_text("in the way")
    with tracked(tmp_path) as (_, trackers, _):
        pass
    trackers.close()
    assert any("cannot be started; the run continues" in message for message in messages(caplog))
    assert trackers.notice == messages(caplog)[-1], "the live view shows it"


def test_the_process_of_a_killed_run_copies_what_is_recorded_and_exits(tmp_path):
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from tests.integration.trackers.test_trackers_process import CONFIG, TrackerProcess, recorded\n"
        "from pathlib import Path\n"
        "from telescope.cluster.reaper import Reaper\n"
        "with Reaper(), recorded(Path(sys.argv[1])) as recorder:\n"
        "    trackers = TrackerProcess(CONFIG, recorder.files.run_dir)\n"
        "    recorder.write('steps', {'step': 1, 'metrics': {'a': 1.0}}); recorder.flush()\n"
        "    print(trackers._process.pid, flush=True); os._exit(9)"
    )
    command = [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parents[3])]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120)
    assert has_ended(int(answer.stdout), seconds=120)
    assert offline_values(tmp_path)[0]["a"] == 1.0


def test_a_message_to_a_killed_driver_does_not_end_the_copy(tmp_path):
    run = TrackedRun(["wandb"], str(tmp_path), "p", "r", resume="allow", wandb_mode="offline", interval=600.0)
    with recorded(tmp_path) as recorder:
        recorder.write("evals", {"name": "math500", "status": "finished", "step": 0})  # without its numbers: a warning
    command = [sys.executable, "-m", "telescope.trackers.process"]
    first = json.dumps(asdict(replace(run, uploads=["record"]))).encode() + b"\n"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdin is not None and started.stdout is not None
        started.stdout.close()
        started.stdin.write(first)
        started.stdin.close()
        assert started.wait(120) == 0
    assert list(tmp_path.glob("wandb/offline-run-*/files/telescope/files.json"))
