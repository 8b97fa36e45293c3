"""Runs, attempts and queries of the reader."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from telescope.errors import UserError
from telescope.record.compact import compact
from telescope.record.files import RunFiles
from telescope.record.query import execute
from telescope.record.reader import Run, find_runs, is_run, list_runs
from telescope.record.recorder import Recorder
from telescope.record.run_info import RunInfo, begin_run, end_run, next_attempt
from telescope.record.table_files import block_name


def write_attempt(run_dir, steps, *, name="demo", status="finished", first_step=None, reward=0.0, error=None):
    """An attempt that trains `steps`, with two samples and turns each, a log line each, and a discarded sample."""
    with Recorder(run_dir, attempt=next_attempt(run_dir), flush_seconds=0.01) as recorder:
        config = {"config_hash": "abc", "config_json": '{"seed": 1}'}
        info = begin_run(recorder, name=name, tags=["t"], first_step=first_step, **config)
        for step in steps:
            for place in range(2):
                sample = f"{step}-{place}"
                recorder.write("samples", {"sample_id": sample, "step": step, "status": "kept", "reward": reward})
                recorder.write("turns", {"sample_id": sample, "turn": 0, "text": f"attempt {recorder.attempt}"})
            recorder.write("logs", {"message": f"step {step}"})
            recorder.write("steps", {"step": step, "reward_mean": reward + step / 10, "metrics": {"entropy": 0.5}})
        recorder.write("samples", {"sample_id": "discarded", "status": "discarded"})
        if status != "killed":
            end_run(recorder, info, status, config_json='{"seed": 1}', error=error)


def column(run, table, name, **options):
    return run.table(table, **options)[name].to_pylist()


@pytest.fixture
def resumed(tmp_path):
    write_attempt(tmp_path / "run", range(1, 8), status="failed", first_step=1)
    write_attempt(tmp_path / "run", range(5, 7), first_step=5, reward=1.0)
    return Run(tmp_path / "run")


def test_steps_that_a_resume_repeated_are_hidden_with_samples_and_turns(resumed):
    assert column(resumed, "steps", "step") == [1, 2, 3, 4, 5, 6]
    assert column(resumed, "steps", "attempt") == [1, 1, 1, 1, 2, 2]
    assert column(resumed, "samples", "reward", columns=["reward"]) == [0.0] * 8 + [None] + [1.0] * 4 + [None]
    assert column(resumed, "turns", "text") == ["attempt 1"] * 8 + ["attempt 2"] * 4
    assert len(column(resumed, "logs", "message")) == 9, "what was logged stays true"
    assert len(column(resumed, "steps", "step", all_attempts=True)) == 9


def test_queries_hide_what_the_reader_hides(resumed):
    for table in ("steps", "samples", "turns", "logs", "attempts"):
        assert resumed.sql(f"SELECT count(*) FROM {table}").rows == [(resumed.table(table).num_rows,)]
    assert resumed.sql("SELECT step, reward_mean FROM steps ORDER BY step").rows[4:] == [(5, 1.5), (6, 1.6)]


def test_a_resume_without_first_step_supersedes_from_its_first_row(tmp_path):
    write_attempt(tmp_path, range(1, 4))
    write_attempt(tmp_path, range(1, 3))
    assert column(Run(tmp_path), "steps", "attempt") == [2, 2]


def test_a_run_keeps_its_id_over_attempts(resumed):
    (row,) = resumed.table("runs").to_pylist()
    assert row["run_id"] == resumed.info.run_id
    assert row["started_at"] == resumed.info.started_at <= row["ended_at"]
    assert [attempt["attempt"] for attempt in resumed.attempts()] == [1, 2]
    assert dict(resumed.attempts()[0]["versions"])["python"]


def test_runs_are_listed_newest_first_with_their_results(tmp_path):
    write_attempt(tmp_path / "old", range(3))
    write_attempt(tmp_path / "group" / "new", range(4), status="failed", error="RuntimeError: no")
    (tmp_path / "old" / "summary.json").write_text(json.dumps({"heldout_before": 0.2, "heldout_after": 0.45}))
    (tmp_path / "notes").mkdir()
    new, old = list_runs(tmp_path)
    assert (new.label, new.status, new.steps, new.error) == ("group/new", "failed", 4, "RuntimeError: no")
    assert (old.reward_first, old.reward_last, old.heldout_before, old.heldout_after) == (0.0, 0.2, 0.2, 0.45)


def test_a_run_has_its_own_name_rather_than_that_of_a_link(tmp_path):
    write_attempt(tmp_path / "runs" / "sweep" / "b", range(2))
    write_attempt(tmp_path / "elsewhere" / "c", range(2))
    for link, target in {
        **{"a-latest": "sweep/b", "z-latest": "sweep/b", "again": ".", "a-sweep": "sweep"},
        "linked": tmp_path / "elsewhere",
    }.items():
        (tmp_path / "runs" / link).symlink_to(target)
    assert sorted(run.label for run in find_runs(tmp_path / "runs")) == ["linked/c", "sweep/b"]


def test_a_killed_run_is_dead_and_a_folder_without_runs_is_an_error(tmp_path):
    script = (
        "import sys, os; from telescope.record.recorder import Recorder\n"
        "from telescope.record.run_info import begin_run\n"
        "begin_run(Recorder(sys.argv[1]), name='x', config_hash='', config_json='{}'); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], timeout=60)
    assert list_runs(tmp_path)[0].status == "dead"
    with pytest.raises(UserError, match="not a run directory"):
        Run(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        list_runs(tmp_path / "missing")


def test_a_query_covers_all_runs_and_reads_odd_paths_literally(tmp_path):
    root = tmp_path / "it's [1] * ?"
    write_attempt(root / "a", range(2))
    write_attempt(root / "b", range(3))
    answer = execute(find_runs(root), "SELECT run, count(*) FROM steps GROUP BY run ORDER BY run")
    assert answer.rows == [("a", 2), ("b", 3)]
    assert answer.columns[0] == "run"


def test_files_of_another_version_are_read(tmp_path):
    write_attempt(tmp_path, range(2))
    older = pa.table({"step": pa.array([2], pa.int64()), "color": ["red"]})
    pq.write_table(older, tmp_path / "tables" / "steps" / block_name(2, 3))
    run = Run(tmp_path)
    assert column(run, "steps", "reward_mean") == [0.0, 0.1, None]
    assert run.sql("SELECT step, reward_mean, color FROM steps ORDER BY step").rows[2] == (2, None, "red")
    write_attempt(tmp_path, [3], first_step=3)
    assert Run(tmp_path).sql("SELECT color FROM steps WHERE step = 2").rows == [("red",)]
    compact(Run(tmp_path))
    assert Run(tmp_path).sql("SELECT color FROM steps WHERE step = 2").rows == [("red",)], "a merge keeps it"


@pytest.mark.parametrize(
    ("sql", "parts"),
    [
        ("SELECT * FROM sampels", ["no table 'sampels'", "Did you mean 'samples'?", "The tables are alerts, "]),
        ("SELECT reward_men FROM steps", ["no column 'reward_men'", "'reward_mean'", "Columns of steps: run, attempt"]),
        ("SELECT s.entropy FROM steps s", ["no column 'entropy'", "metrics['entropy'] in steps.metrics"]),
        ("SELECT 1; SELECT 2", ["2 statements"]),
        ("", ["0 statements"]),
        ("SELEC 1", ["syntax error"]),
        ("SELECT foo(1)", ["foo"]),
    ],
)
def test_an_error_lists_existing_names(resumed, sql, parts):
    with pytest.raises(UserError) as caught:
        resumed.sql(sql)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    "sql",
    [
        "COPY steps TO '{path}'", "EXPLAIN ANALYZE COPY steps TO '{path}'", "explain (analyze) copy steps to '{path}'",
        "EXPORT DATABASE '{path}'", "ATTACH '{path}'", "INSTALL httpfs", "CREATE TABLE x (a INT)", "DELETE FROM steps",
        "SET threads = 1",
    ],
)  # fmt: skip
def test_a_query_cannot_write(resumed, tmp_path, sql):
    path = tmp_path / "written"
    with pytest.raises(UserError, match="read-only"):
        resumed.sql(sql.format(path=path))
    assert not path.exists()


@pytest.mark.parametrize("sql", ["DESCRIBE steps", "SUMMARIZE steps", "FROM steps", "SHOW TABLES", "EXPLAIN SELECT 1"])
def test_reading_statements_are_answered(resumed, sql):
    assert resumed.sql(sql).rows


def test_the_reader_imports_no_heavy_packages():
    heavy = ["torch", "ray", "vllm", "transformers", "wandb", "tensorboard", "trackio", "pydantic", "yaml"]
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({heavy!r}))\n"
        "import telescope.record.reader, telescope.record.query, telescope.cli.runs, telescope.cli.query\n"
        "import telescope.record, telescope.record.logging, telescope.trackers.launch"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_what_may_not_be_read_does_not_hide_other_runs_and_tables(tmp_path, monkeypatch, caplog):
    write_attempt(tmp_path / "run", [1, 2])
    write_attempt(tmp_path / "secret", [1])

    def refuse(path, *, names=("secret", "logs")):
        if Path(path).name in names:
            raise PermissionError(13, "Permission denied", str(path))
        return path

    listdir = os.listdir
    monkeypatch.setattr("telescope.record.table_files.os.listdir", lambda path: listdir(refuse(path)))
    monkeypatch.setattr("telescope.record.reader.is_run", lambda path: is_run(refuse(path)))
    (run,) = find_runs(tmp_path)
    assert column(run, "steps", "step") == [1, 2]
    assert run.table("logs").num_rows == run.num_rows("logs") == 0
    assert len(run.unreadable) == 1
    assert "a run is left out" in caplog.text
    assert "table logs cannot be read" in caplog.text


@pytest.mark.parametrize("query", ["FROM samples", "TABLE samples", "WITH s AS (FROM samples) FROM s"])
def test_a_query_of_all_columns_has_the_texts_of_samples(tmp_path, query):
    with Recorder(tmp_path) as recorder:
        recorder.write("samples", {"sample_id": "a", "prompt_key": "p"})
        recorder.write("prompts", {"prompt_key": "p", "text": "asked"})
        recorder.write("turns", {"sample_id": "a", "turn": 0, "role": "assistant", "text": "answered"})
    (row,) = Run(tmp_path).sql(query).to_dicts()
    assert (row["prompt_text"], row["completion_text"]) == ("asked", "answered")


@pytest.mark.parametrize("ended_at", [150.0, None], ids=["ended", "killed"])
def test_the_time_between_two_attempts_does_not_count_as_duration(tmp_path, ended_at):
    other = asdict(RunInfo("a", "demo", "stopped" if ended_at else "running", 100.0, 1, ended_at))
    RunFiles(tmp_path).run_json.write_text(json.dumps(other))
    RunFiles(tmp_path).heartbeat.write_text('{"time": 150.0}')
    with Recorder(tmp_path, attempt=2) as recorder:
        for start in (1000.0, 1020.0):  # the second is a restart of lost ranks
            info = begin_run(recorder, name="demo", config_hash="c", config_json="{}", started_at=start)
        end_run(recorder, info, "finished", config_json="{}", ended_at=1030.0)
    assert Run(tmp_path).summary().duration == 50.0 + 30.0


@pytest.mark.parametrize("content", [b"", b'{"run_id": "a', None])
def test_a_run_is_resumed_as_itself_if_its_run_json_is_damaged(tmp_path, content):
    infos = []
    for first_step in (1, 3, 2):
        with Recorder(tmp_path, attempt=next_attempt(tmp_path)) as recorder:
            start = {"config_hash": "c", "config_json": "{}", "first_step": first_step}
            infos.append(begin_run(recorder, name="run", **start))
            for step in range(first_step, first_step + 3):
                recorder.write("steps", {"step": step})
        path = recorder.files.run_json
        path.unlink() if content is None else path.write_bytes(content)
    assert [info.attempt for info in infos] == [1, 2, 3]
    assert len({(info.run_id, info.started_at) for info in infos}) == 1
    assert Run(tmp_path).table("steps")["step"].to_pylist() == [1, 2, 3, 4]
