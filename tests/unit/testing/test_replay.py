"""A replayed run is the recorded one, at another time and of any length."""

import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.documented_metrics import undocumented

from telescope.dashboard.registry import Registry
from telescope.dashboard.runs import health_of
from telescope.record.reader import Run
from telescope.record.tables import TABLES
from telescope.testing.demo import LIVE
from telescope.testing.replay import NUM_REPEATED, ONCE, RECORDING, TIMES, Replay

ORIGIN = 1_800_000_000.0
RECORDED = sorted(path.name for path in RECORDING.iterdir())
MOST_BYTES = 1_700_000
"""Size of all recordings: they are in every wheel."""


def recorded(table: str, recording: str = LIVE) -> pa.Table:
    return pq.read_table(RECORDING / recording / f"{table}.parquet")


def texts_of(table: pa.Table) -> list[Any]:
    """The values of all columns but numbers."""
    return [column.to_pylist() for column in table.columns if not pa.types.is_primitive(column.type)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    with Replay(folder, origin=ORIGIN) as replay:
        replay.write_all()
    return Run(folder)


def test_every_recorded_row_is_replayed_at_its_time(run: Run) -> None:
    for name in TABLES.keys() - ONCE:
        before, after = recorded(name), run.table(name)
        assert after.num_rows == before.num_rows > 0, name
        for column in set(before.column_names) & set(TIMES):
            was, now = (
                sorted(time for time in rows[column].to_pylist() if time is not None) for rows in (before, after)
            )
            assert now == pytest.approx([ORIGIN + time for time in was], abs=1e-3), f"{name}.{column}"


def test_the_attempt_says_that_the_run_is_a_recording(run: Run) -> None:
    (notes,) = run.table("attempts")["notes"].to_pylist()
    assert "recording that is replayed" in notes[0]


def test_every_metric_and_gauge_is_documented(run: Run) -> None:
    names = {name for row in run.table("steps", columns=["metrics"]).to_pylist() for name, _ in row["metrics"]}
    gauges = set(run.table("gauges", columns=["name"])["name"].to_pylist())
    assert len(names) > 100
    assert undocumented(names | {name for name in gauges if not name.startswith("vllm:")}) == []


def test_the_recorded_run_learns_loses_a_server_and_has_a_delayed_step(run: Run) -> None:
    summary = run.summary()
    assert summary.reward_last > summary.reward_first + 0.2
    assert summary.heldout_after > summary.heldout_before
    reported = [row["message"] for row in run.table("alerts").to_pylist() if row["kind"] == "server"]
    assert [word in " ".join(reported) for word in ("is down", "is back")] == [True, True]
    seconds = sorted(row["ended_at"] - row["started_at"] for row in run.table("steps").to_pylist())
    assert seconds[-1] > 4 * seconds[len(seconds) // 2]


def test_the_other_runs_finished_and_failed(run: Run, tmp_path: Path) -> None:
    ends = {LIVE: run.summary()}
    for name in set(RECORDED) - {LIVE}:
        with Replay(tmp_path / name, name) as replay:
            replay.write_all()
        ends[name] = Run(tmp_path / name).summary()
    assert sorted(summary.status for summary in ends.values()) == ["failed", *["finished"] * 3]
    assert all((summary.status == "failed") == bool(summary.error) for summary in ends.values())


def test_recordings_are_small_and_name_no_machine() -> None:
    files = [path for path in RECORDING.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    texts = [(RECORDING / name / "run.json").read_text() for name in RECORDED]
    assert {json.loads(text)["attempt"]["host"] for text in texts} == {"node-1"}
    for path in files:
        content = str(texts_of(pq.read_table(path))) if path.suffix == ".parquet" else path.read_text()
        paths = re.findall(r"(?<![\w./:<])/(?:[\w.-]+/)+[\w.-]*", content)
        allowed = ("/opt/telescope", "/home/user", "/tmp/telescope", "/v1/", "/docs/", "/inference/")
        assert [found for found in paths if not found.startswith(allowed)] == [], path


def test_the_record_looks_like_that_of_a_real_run(run: Run) -> None:
    registry = Registry([run.files.run_dir])
    health = health_of(next(iter(registry.stores().values())))
    assert health["progress"]["step"] == recorded("steps").num_rows
    assert len(health["cells"]) >= 8
    whole = run.sql("select count(*) from eval_samples e join samples s using (attempt, sample_id)").rows[0][0]
    assert whole == run.table("eval_samples").num_rows


def test_a_short_replay_ends_as_the_recording_did(tmp_path: Path) -> None:
    with Replay(tmp_path / "short", num_steps=12) as replay:
        replay.write_all()
    short = Run(tmp_path / "short")
    assert (short.status, short.summary().steps, short.summary().num_steps) == ("finished", 12, 12)
    versions = short.sql("select max(version) as last, max(ended_at) <= max((select ended_at from runs)) from evals")
    assert versions.rows == [(12, True)]


def test_a_long_replay_repeats_the_last_steps_with_other_ids(tmp_path: Path) -> None:
    recording = "demo-lr-1e-3"
    num_recorded = recorded("steps", recording).num_rows
    num_steps = num_recorded + 2 * NUM_REPEATED + 3
    with Replay(tmp_path / "long", recording, num_steps=num_steps) as replay:
        replay.write_step(num_steps - 1)
        replay.end()
    long = Run(tmp_path / "long")
    steps = long.table("steps").to_pylist()
    assert [row["step"] for row in steps] == list(range(num_steps))
    assert all(one["ended_at"] <= other["ended_at"] for one, other in pairwise(steps))
    for later in (num_recorded, num_recorded + NUM_REPEATED):
        assert dict(steps[later]["metrics"]) == dict(steps[num_recorded - NUM_REPEATED]["metrics"])
    for table, key in (("samples", "sample_id"), ("groups", "group_id"), ("evals", "eval_id")):
        ids = long.table(table)[key].to_pylist()
        assert table == "samples" or len(set(ids)) == len(ids), table
    kept = "select count(*), count(distinct sample_id) from samples where status = 'kept'"
    ((count, distinct),) = long.sql(kept).rows
    assert count == distinct


def test_a_live_run_shows_the_samples_that_are_generated(tmp_path: Path) -> None:
    with Replay(tmp_path / "live", num_steps=20) as replay:
        replay.write_step(2)
        replay.write_until(replay.step_end(2) + 0.2)
        assert replay.recorder.flush()
        live = Run(tmp_path / "live")
        rows, now = live.in_flight().to_pylist(), live.now()
    assert rows and {row["status"] for row in rows} == {"in_flight"}
    assert now is not None and (now["step"], now["num_steps"], now["phase"]) == (3, 20, "training")


def test_a_run_ends_with_a_given_error(tmp_path: Path) -> None:
    with Replay(tmp_path / "bad", num_steps=20, origin=time.time()) as replay:
        replay.write_step(2)
        replay.end("ArithmeticError: the loss is not a number")
    summary = Run(tmp_path / "bad").summary()
    assert (summary.status, summary.steps, summary.error) == ("failed", 3, "ArithmeticError: the loss is not a number")
