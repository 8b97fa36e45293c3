"""What each tracker has of a run with two attempts, read back from W&B's server, event files and a database."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.trackers.conftest import offline_values, wandb_records
from tests.integration.trackers.fake_wandb import FakeWandb, StoredRun
from tests.processes import wait_for
from tests.unit.orchestrator.fakes import config_of

from telescope.orchestrator.run_directory import RunDirectory
from telescope.record.code_snapshot import CodeSnapshot
from telescope.record.files import replace_json
from telescope.record.reader import Run

SETTINGS = {"use_wandb": True, "metrics_logger_interval_seconds": 0.2, "event_upload_interval_seconds": 1}


def record_attempt(path: Path, first: int, last: int, server: FakeWandb | None = None, **settings: object) -> None:
    """Writes one attempt of a run: steps, gauges, a code snapshot and a log line, while its trackers follow."""
    config = config_of(run_dir=str(path), **{**SETTINGS, **settings})
    directory = RunDirectory.create(config, [], is_resumed=first > 0)
    with directory.open_record(console=False) as recorder:
        source = path.parent / "sources"
        source.mkdir(exist_ok=True)
        (source / "environment.py").write_text("reward = 1\n")
        (source / ".env").write_text("KEY=secret\n")
        CodeSnapshot(10**6, ["*/*"]).write(path / "code" / f"attempt-{recorder.attempt}.tar.gz", path.parent, [source])
        directory.started({}, first)
        recorder.write("logs", {"time": time.time(), "level": "INFO", "component": "driver", "message": "starts"})
        for step in range(first, last):
            metrics = {"entropy": 1.0 + (first > 0), "reward/total/mean": step / 2}
            recorder.write("steps", {"step": step, "metrics": metrics})
            bins = {"histogram": [1, 0, first + 2], "bin_edges": [0.0, 0.5, 1.0, 1.5]}
            recorder.write("step_stats", {"step": step, "environment": "", "metric": "reward", "n": 3, **bins})
            for index in (0, 1):
                row = {"time": time.time(), "component": "inference", "server": index, "value": 4.0 * index}
                recorder.write("gauges", {**row, "name": "vllm:num_requests_running"})
        recorder.write("steps", {"step": last - 1, "metrics": {"entropy": 9.0}})  # after a restart of the trainer
        done = {"num_items": 2, "num_completions": 1, "num_scored": 2, "started_at": 0.0, "ended_at": 1.0, "number": 0}
        recorder.write("evals", {**done, "status": "finished", "name": "held_out", "step": 1, "accuracy": 0.5})
        replace_json(path / "summary.json", {"seconds": 2.5, "status": "finished"})
        recorder.flush()
        if server is not None:  # the tail of a table is uploaded before a block replaces it
            wait_for(lambda: [name for name in server.puts() if "/steps/" in name and name.endswith(".arrows")])


@dataclass
class Recorded:
    """A run of two attempts in all trackers."""

    path: Path
    server: FakeWandb
    uploaded_again: set[str]
    """Files that the second attempt uploaded."""

    @property
    def stored(self) -> StoredRun:
        """The run on the W&B server."""
        (run,) = self.server.projects["telescope"].values()
        return run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Iterator[Recorded]:
    path = tmp_path_factory.mktemp("trackers") / "run"
    with FakeWandb() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in {**server.environment(), "TRACKIO_DIR": str(path.parent / "trackio")}.items():
            patch.setenv(name, value)
        patch.setenv("HOME", str(path.parent))
        for first, last in ((0, 3), (2, 5)):
            trackers = ["wandb", "tensorboard", "trackio"]
            server.requests.clear()
            record_attempt(path, first, last, server, trackers=trackers, wandb_upload_logs=first == 0, wandb_tags=["a"])
            puts = [place for kind, place in server.requests if kind == "PUT"]
        again = {place.split("/", 4)[4] for place in puts if place.startswith("/storage/")}
        yield Recorded(path, server, again)


def trained(rows: list[dict[str, float]]) -> list[tuple[float, float]]:
    return [(row["step"], row["entropy"]) for row in rows if "entropy" in row]


HISTOGRAMS = [(0, [1, 0, 2]), (1, [1, 0, 2]), (2, [1, 0, 2]), (3, [1, 0, 4]), (4, [1, 0, 4])]
"""Step and counts of the histogram of rewards."""

EACH_STEP_ONCE = [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2)]
"""Step and entropy: what was sent stays, and the run continues past it."""


def test_attempts_are_one_run_of_wandb_in_which_each_step_is_there_once(recorded):
    rows = recorded.stored.history
    assert trained(rows) == EACH_STEP_ONCE
    assert sum(row.get("eval/held_out/accuracy") == 0.5 for row in rows) == 2, "evals come when they end"
    assert recorded.stored.summary["seconds"] == 2.5
    assert (recorded.stored.tags, recorded.stored.state) == (["a"], "finished")
    assert recorded.stored.config["learning_rate"] == 1e-6, "a column of W&B's table of runs"


def test_charts_of_the_system_have_the_minutes_of_the_run_as_their_axis(recorded):
    gauges = [row for row in recorded.stored.history if "vllm/num_requests_running" in row]
    assert {row["vllm/num_requests_running/max"] for row in gauges} == {4.0}
    assert all(0 <= row["elapsed_minutes"] < 10 and "step" not in row for row in gauges)
    defined = json.loads(json.dumps(recorded.stored.config["_wandb"]["m"]))
    names = {metric["1"]: defined[metric["5"] - 1]["1"] for metric in defined if "5" in metric}
    assert names["entropy"] == "step"
    assert names["vllm/num_requests_running"] == "elapsed_minutes"


def test_the_record_on_wandb_is_a_copy_of_the_run_directory(recorded, tmp_path):
    files = recorded.stored.files
    manifest = json.loads(files["telescope/files.json"])
    for name, size in manifest["files"].items():
        assert len(files[f"telescope/{name}"]) == size
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(files[f"telescope/{name}"])
    copy, original = Run(tmp_path), Run(recorded.path)
    for table in ("steps", "gauges", "attempts", "runs"):
        assert copy.table(table).equals(original.table(table)), table
    assert copy.info == original.info


def test_the_next_attempt_uploads_what_changed_and_removes_what_was_replaced(recorded):
    tables = {name for name in recorded.stored.files if name.startswith("telescope/tables/")}
    logs = {name for name in tables if name.startswith("telescope/tables/logs/")}
    assert logs and not logs & recorded.uploaded_again, "wandb_upload_logs is false now"
    assert "telescope/code/attempt-1.tar.gz" in recorded.stored.files.keys() - recorded.uploaded_again
    manifest = json.loads(recorded.stored.files["telescope/files.json"])
    assert tables == {f"telescope/{name}" for name in manifest["files"] if name.startswith("tables/")}
    assert recorded.server.operations("deleteFiles")


def test_the_code_is_an_artifact_without_secrets(recorded):
    ((name, paths),) = recorded.stored.artifacts.items()
    assert name.startswith("source-")
    assert any(path.endswith("environment.py") for path in paths)
    assert not any(".env" in Path(path).parts for path in paths)


def test_tensorboard_has_each_step_once_and_gauges_over_seconds(recorded):
    read = tensorboard_events(recorded)
    assert [(event.step, event.value) for event in read.Scalars("entropy")] == EACH_STEP_ONCE
    assert {event.value for event in read.Scalars("vllm/num_requests_running/max")} == {4.0}
    assert read.Scalars("summary/seconds")[0].value == 2.5
    assert b"learning_rate" in read.Tensors("config")[0].tensor_proto.string_val[0]


def test_each_tracker_has_the_distribution_of_the_rewards_of_a_step(recorded):
    name = "distribution/reward"
    rows = [(row["step"], row[name]) for row in recorded.stored.history if name in row]
    assert [(step, bins["values"]) for step, bins in rows] == HISTOGRAMS
    assert rows[0][1]["bins"] == [0.0, 0.5, 1.0, 1.5]
    read = tensorboard_events(recorded, histograms=0)
    events = read.Histograms(name)
    assert [(event.step, event.histogram_value.bucket) for event in events] == HISTOGRAMS
    assert events[0].histogram_value.bucket_limit == [0.5, 1.0, 1.5]
    logs, _ = trackio_logs(recorded)
    rows = [(row["step"], row[name]) for row in logs if name in row]
    assert [(step, bins["values"]) for step, bins in rows] == HISTOGRAMS


def tensorboard_events(recorded: Recorded, **sizes: int) -> Any:
    """Returns what TensorBoard reads of the run. `sizes` is the number of events of a kind that it keeps, 0 for all."""
    from absl import logging
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # absl closes the stream of its import, which is pytest's, when something configures logging.
    logging.get_absl_handler().python_handler.stream = sys.__stderr__
    read = EventAccumulator(str(recorded.path / "tensorboard"), size_guidance=sizes or None)
    read.Reload()
    return read


def trackio_logs(recorded: Recorded) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns what trackio has of the run: metrics, and system metrics."""
    code = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage as S\n"
        "(run,) = S.get_runs('telescope')\n"
        "print(json.dumps([S.get_logs('telescope', run), S.get_system_logs('telescope', run)], default=str))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={**os.environ, "TRACKIO_DIR": str(recorded.path.parent / "trackio")},
    )  # fmt: skip
    logs, system = json.loads(answer.stdout)
    return logs, system


def test_trackio_has_each_step_once_and_gauges_as_system_metrics(recorded):
    logs, system = trackio_logs(recorded)
    assert trained(logs) == EACH_STEP_ONCE
    assert system[0]["vllm/num_requests_running/max"] == 4.0


def test_an_offline_run_has_the_record_in_its_folder_and_can_be_uploaded_later(tmp_path):
    path = tmp_path / "run"
    for first, last in ((0, 3), (2, 5)):
        record_attempt(path, first, last)
    assert trained(offline_values(path)) == EACH_STEP_ONCE
    assert any(record.HasField("artifact") for record in wandb_records(path)), "the code"
    with FakeWandb() as server:
        wandb = [sys.executable, "-m", "wandb"]
        for folder in sorted(path.glob("wandb/offline-run-*")):
            environment = {**os.environ, **server.environment()}
            subprocess.run([*wandb, "sync", str(folder)], check=True, env=environment, capture_output=True, timeout=120)
        (stored,) = server.projects["telescope"].values()
    assert trained(stored.history) == EACH_STEP_ONCE
    manifest = json.loads(stored.files["telescope/files.json"])["files"]
    assert {name: len(stored.files[f"telescope/{name}"]) for name in manifest} == manifest
    assert any(name.startswith("tables/steps/") for name in manifest)


def test_steps_that_wandb_lacks_are_filled_in_from_the_record(tmp_path, monkeypatch):
    path = tmp_path / "run"
    with FakeWandb() as server:
        for first, last in ((0, 3), (3, 5)):
            config = config_of(run_dir=str(path), **SETTINGS)
            if first:
                for name, value in server.environment().items():
                    monkeypatch.setenv(name, value)
            else:
                monkeypatch.setenv("WANDB_MODE", "disabled")
            directory = RunDirectory.create(config, [], is_resumed=first > 0)
            with directory.open_record(console=False) as recorder:
                directory.started({}, first)
                for step in range(first, last):
                    metrics = {"entropy": 1.0 + (first > 0)}
                    recorder.write("steps", {"step": step, "metrics": metrics})
            monkeypatch.delenv("WANDB_MODE", raising=False)
        (stored,) = server.projects["telescope"].values()
    assert trained(stored.history) == EACH_STEP_ONCE


def test_a_server_that_refuses_the_key_leaves_an_offline_run(tmp_path, monkeypatch, caplog):
    with FakeWandb() as server:
        for name, value in {**server.environment(), "WANDB_API_KEY": "wrong" * 8}.items():
            monkeypatch.setenv(name, value)
        record_attempt(tmp_path / "run", 0, 2)
    assert any("recorded offline" in record.message for record in caplog.records)
    assert len(trained(offline_values(tmp_path / "run"))) == 2
