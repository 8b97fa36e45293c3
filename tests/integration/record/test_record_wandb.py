"""W&B gets a copy, offline without credentials, and can neither stop nor slow a run."""

import json
import logging
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from tests.unit.orchestrator.fakes import config_of

from telescope.errors import UserError
from telescope.orchestrator.run import _TrainingRun
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.status import RunStatus, summarize
from telescope.record import wandb_process
from telescope.record.wandb_sink import MAX_WAITING, WandbSink


class Config:
    use_wandb = True
    wandb_project = "project"
    wandb_run_name = "name"
    wandb_tags = ("tag",)

    def to_json(self) -> str:
        return '{"seed": 1}'


@pytest.fixture(autouse=True)
def _no_credentials(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def start_instead(monkeypatch):
    """Replaces the process with a script that is given as text."""

    def replace(script: str) -> None:
        def start(self):
            return subprocess.Popen(
                [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )

        monkeypatch.setattr(WandbSink, "_start", start)

    return replace


def messages(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def records(path: Path) -> Iterator[bytes]:
    """Yields the records of a .wandb file: after 7 bytes a LevelDB log with blocks of 32 KiB."""
    data, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left_in_block = 2**15 - position % 2**15
        if left_in_block < 7:
            position += left_in_block
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def offline_summary(run_dir: Path) -> dict[str, object]:
    """Returns the summary that W&B wrote offline: the last value of every key."""
    from wandb.proto import wandb_internal_pb2

    (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    updates = [wandb_internal_pb2.Record.FromString(data) for data in records(path)]
    return {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for record in updates
        if record.HasField("summary")
        for item in record.summary.update
    }


def offline_values(run_dir: Path) -> list[dict[str, float]]:
    """Returns the history that W&B wrote offline."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    paths = sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({path.name for path in paths}) == 1, "one run of W&B"
    for data in (data for path in paths for data in records(path)):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("history"):
            rows.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
    return [{key: float(json.loads(value)) for key, value in row.items()} for row in rows]


def test_an_evaluation_goes_to_the_run_that_it_names(tmp_path, monkeypatch):
    monkeypatch.setattr(Config, "use_wandb", False)
    sink = WandbSink(Config(), tmp_path, run_path="me/project/abc123")
    sink.log_step(9, {"eval/math500/accuracy": 0.5})
    sink.close()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-abc123.wandb")
    assert offline_summary(tmp_path)["eval/math500/accuracy"] == 0.5
    assert b"me" in path.read_bytes()


def test_without_credentials_wandb_records_offline_with_one_warning(tmp_path, caplog, capfd):
    sink = WandbSink(Config(), tmp_path)
    for step in range(3):
        sink.log_step(step, {"reward_mean": step / 2, "timing/forward/total": 1.5, "odd": float("nan")})
    sink.log_summary({"heldout_after": 0.5})
    sink.close(timeout=120)
    assert sink.mode == "offline"
    assert len(messages(caplog)) == 1
    assert "no W&B credentials" in messages(caplog)[0]
    assert sink.notice == messages(caplog)[0]
    rows = offline_values(tmp_path)
    assert [(row["step"], row["reward_mean"]) for row in rows] == [(0.0, 0.0), (1.0, 0.5), (2.0, 1.0)]
    assert rows[0]["timing/forward/total"] == 1.5
    assert capfd.readouterr().out == "", "W&B prints nothing into the run's terminal"


def test_attempts_are_one_run_of_wandb_in_which_each_step_is_there_once(tmp_path):
    path = tmp_path / "run"
    for first, last, learning_rate in ((0, 3, 1e-6), (2, 5, 2e-6)):
        config = config_of(run_dir=str(path), use_wandb=True, learning_rate=learning_rate)
        directory = RunDirectory.create(config, [], is_resumed=first > 0)
        with directory.open_record(console=False):
            directory.started({}, first)
            for step in range(first, last):
                directory.step_log.log_step(step, {"attempt": 1.0 + (first > 0)})
                directory.recorder.write("steps", {"step": step, "metrics": {"attempt": 1.0}})
            directory.step_log.log_step(last - 1, {"attempt": 9.0})  # again, as after a restart of the trainer
            directory.step_log.log_step(1, {"eval/held_out": 0.5})
    rows = offline_values(path)
    trained = [(row["step"], row["attempt"]) for row in rows if "attempt" in row]
    assert trained == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2)], "what was sent stays, and the run continues past it"
    assert sum("eval/held_out" in row for row in rows) == 2, "evals come when they end"


class Resumed:
    """W&B's answer after it has resumed a run whose last step is 4."""

    resumed, offline = True, False
    summary: ClassVar[dict[str, object]] = {"step": {"max": 4}}


def test_steps_that_wandb_lacks_are_filled_in_from_the_record(tmp_path, monkeypatch):
    path = tmp_path / "run"
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(WandbSink, "_start", lambda self: subprocess.Popen(
        [sys.executable, "-c", f"import sys; open({str(tmp_path / 'sent')!r}, 'w').write(sys.stdin.read())"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ))  # fmt: skip
    for first in (0, 5):
        directory = RunDirectory.create(config_of(run_dir=str(path), use_wandb=True), [], is_resumed=first > 0)
        with directory.open_record(console=False):
            directory.started({}, first)
            for step in range(first, 7):
                directory.recorder.write("steps", {"step": step, "metrics": {"reward": step / 2}})
    first_message, *sent = [json.loads(line) for line in (tmp_path / "sent").read_text().splitlines()]
    assert first_message["last_step"] == 6
    assert [(each["step"], each["metrics"]["reward"]) for each in sent if each["kind"] == "step"] == [
        (step, step / 2) for step in range(5)
    ]
    assert wandb_process._last_step(Resumed(), first_message) == 4, "of these, the process sends none again"


async def test_the_live_view_reports_offline_recording(tmp_path, monkeypatch):
    async def ends_at_once(self: _TrainingRun, temporary: object) -> None:
        raise UserError("enough")

    monkeypatch.setattr(_TrainingRun, "_start_and_train", ends_at_once)
    run = _TrainingRun(config_of(run_dir=str(tmp_path / "run"), use_wandb=True), [], None)
    with pytest.raises(UserError, match="enough"):
        await run.run()
    (message,) = run._status.messages
    assert "no W&B credentials" in message
    assert str(tmp_path / "run" / "wandb") in message


def test_the_summary_of_an_ended_run_is_sent_to_wandb(tmp_path):
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


def test_a_disabled_sink_does_nothing(tmp_path, monkeypatch, caplog):
    config = Config()
    config.use_wandb = False
    sink = WandbSink(config, tmp_path)
    sink.log_step(1, {"a": 1.0})
    sink.close()
    monkeypatch.setenv("WANDB_MODE", "disabled")
    WandbSink(Config(), tmp_path).close()
    assert not list(tmp_path.iterdir())
    assert not messages(caplog)


def test_a_missing_package_is_reported_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("telescope.record.wandb_sink._is_installed", lambda: False)
    sink = WandbSink(Config(), tmp_path)
    sink.log_step(1, {"a": 1.0})
    sink.close()
    assert len(messages(caplog)) == 1
    assert "pip install wandb" in messages(caplog)[0]


def test_a_hanging_wandb_neither_blocks_a_step_nor_outlives_the_run(tmp_path, start_instead, caplog):
    start_instead("import time; time.sleep(1000)")
    sink = WandbSink(Config(), tmp_path)
    for step in range(MAX_WAITING + 2000):
        sink.log_step(step, {"text": 1.0})
    sink.close(timeout=0.5)
    assert sink._process is not None
    assert sink._process.wait(30) != 0
    assert any("too slow for" in message for message in messages(caplog))
    assert any("was ended" in message for message in messages(caplog))
    assert sink._finished.wait(30)


def test_a_wandb_that_crashes_is_a_warning(tmp_path, start_instead, caplog):
    start_instead("import sys; sys.stdin.readline(); sys.exit(3)")
    sink = WandbSink(Config(), tmp_path)
    assert sink._finished.wait(60)
    sink.log_step(1, {"a": 1.0})
    sink.close()
    assert any("exited with status 3; the run continues" in message for message in messages(caplog))


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "logs").write_text("in the way")
    sink = WandbSink(Config(), tmp_path)
    assert sink._finished.wait(60)
    sink.close()
    assert any("cannot be started; the run continues" in message for message in messages(caplog))


def test_the_process_exits_when_the_driver_exits(tmp_path):
    script = (
        "import os, sys, time; sys.path.insert(0, sys.argv[2])\n"
        "from test_record_wandb import Config; from telescope.record.wandb_sink import WandbSink\n"
        "sink = WandbSink(Config(), sys.argv[1]); sink.log_step(1, {'a': 1.0})\n"
        "while sink._process is None: time.sleep(0.01)\n"
        "print(sink._process.pid, flush=True); os._exit(9)"
    )
    command = [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120)
    process = Path("/proc") / answer.stdout.strip()
    deadline = time.monotonic() + 120
    while process.exists() and "Z" not in (process / "stat").read_text().split()[2] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process.exists() or (process / "stat").read_text().split()[2] == "Z"
