"""A run never waits for its record and never fails because of it."""

import logging
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from tests.processes import wait_for

from telescope.errors import UserError
from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run, end_run, read_run_json, status_now
from telescope.record.table_writer import TableWriter
from telescope.record.tables import TABLES

WRITER = Path(__file__).parent / "record_writer_process.py"


def reports(caplog) -> list[str]:
    return [record.message for record in caplog.records if "CANNOT BE WRITTEN" in record.message]


def test_rows_written_by_many_threads_are_read_back(tmp_path):
    with Recorder(tmp_path, flush_seconds=0.01) as recorder:

        def write(place: int) -> None:
            for value in range(place * 100, place * 100 + 100):
                recorder.write("gauges", {"value": value})

        with ThreadPoolExecutor(8) as pool:
            written = pool.map(write, range(8))
            for name in TABLES:
                recorder.write(name, {})
            assert list(written) == [None] * 8
    run = Run(tmp_path)
    assert sorted(value for value in run.table("gauges")["value"].to_pylist() if value is not None) == list(range(800))
    assert all(run.table(name).num_rows >= 1 for name in TABLES)


def test_rows_are_flushed_by_themselves(tmp_path):
    recorder = Recorder(tmp_path, flush_seconds=0.02)
    recorder.write("steps", {"step": 1})
    wait_for(lambda: Run(tmp_path).table("steps").num_rows, "the flush")
    assert Run(tmp_path).table("steps")["attempt"].to_pylist() == [1]
    recorder.close()


def names(run_dir: Path, table: str) -> list[str]:
    """Suffixes of a table's files, in the order of their rows."""
    return [path.suffix for path in sorted((run_dir / "tables" / table).iterdir())]


def flush_twice(recorder: Recorder) -> None:
    for number in range(2):
        for table in ("samples", "turns"):
            recorder.write(table, {"sample_id": str(number)})
        recorder.write("spans", {"name": "forward"})
        assert recorder.flush(30)


def test_new_rows_go_into_one_tail_for_a_window_of_time(tmp_path):
    for name, seconds, expected in (("long", 600.0, [".arrows"]), ("short", 0.0, [".arrows"] * 2)):
        with Recorder(tmp_path / name, flush_seconds=600, tail_seconds=seconds) as recorder:
            flush_twice(recorder)
            assert names(tmp_path / name, "spans") == names(tmp_path / name, "samples") == expected


def test_events_are_a_block_after_a_duration(tmp_path):
    with Recorder(tmp_path, flush_seconds=600, block_seconds=0.0) as recorder:
        flush_twice(recorder)
        assert names(tmp_path, "spans") == [".parquet"] * 2
        assert names(tmp_path, "samples") == [".arrows"]


def test_rollouts_are_a_block_after_a_number_of_samples(tmp_path):
    with Recorder(tmp_path, flush_seconds=600, block_rollouts=2) as recorder:
        flush_twice(recorder)
        assert names(tmp_path, "samples") == names(tmp_path, "turns") == [".parquet"]
        assert names(tmp_path, "spans") == [".arrows"]
        recorder.write("samples", {"sample_id": "2"})
        assert recorder.flush(30)
        assert names(tmp_path, "samples") == [".parquet", ".arrows"]


def test_a_long_run_has_few_files(tmp_path, monkeypatch):
    monkeypatch.setattr("telescope.record.recorder.MAX_ROLLOUT_BLOCKS", 4)
    with Recorder(tmp_path, flush_seconds=600, block_rollouts=1) as recorder:
        for number in range(100):
            recorder.write("samples", {"sample_id": str(number)})
            assert recorder.flush(30)
        assert len(names(tmp_path, "samples")) < 40


def bytes_written() -> int:
    """Bytes that this process has written to files."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def test_a_long_run_writes_as_many_bytes_per_step_at_its_end_as_before(tmp_path):
    text = np.random.default_rng(0).bytes(400).hex()
    written = []
    with Recorder(tmp_path, flush_seconds=600, block_rollouts=16) as recorder:
        for step in range(240):
            for index in range(8):
                row = {"sample_id": f"{step}-{index}", "step": step, "completion_text": text[step : step + 600]}
                recorder.write("samples", row)
            recorder.write("steps", {"step": step, "metrics": {f"metric {n}": step + n for n in range(50)}})
            assert recorder.flush()
            written.append(bytes_written())
    early, late = (written[end] - written[end - 80] for end in (119, 239))
    assert late < 1.2 * early, (early, late)


def test_a_row_may_be_changed_after_it_was_written(tmp_path):
    metrics = {"a": 1.0}
    with Recorder(tmp_path, flush_seconds=5) as recorder:
        recorder.write("steps", {"step": 1, "metrics": metrics})
        metrics["a"] = 2.0
    assert Run(tmp_path).table("steps")["metrics"].to_pylist() == [[("a", 1.0)]]


@pytest.mark.parametrize(("table", "row"), [("step", {}), ("steps", {"stepp": 1})])
def test_an_unknown_table_or_column_raises(tmp_path, table, row):
    with Recorder(tmp_path) as recorder, pytest.raises(ValueError, match="step"):
        recorder.write(table, row)


def test_a_full_disk_is_reported_once_and_drops_the_least_important_rows(tmp_path):
    command = [sys.executable, str(WRITER), str(tmp_path), "small-files"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    for words in ("CANNOT BE WRITTEN", "is written again", "Rows dropped"):
        assert sum(words in line for line in lines) == 1
    run = Run(tmp_path)
    assert run.table("steps")["step"].to_pylist() == list(range(600))
    kept = run.table("samples").num_rows + run.table("logs").num_rows
    assert kept == 400, "1,000 rows fit, the 600 steps among them"
    assert run.table("logs").num_rows == 0, "log lines are dropped before samples"


def test_a_folder_that_cannot_be_created_is_reported_once_and_used_later(tmp_path, caplog):
    (tmp_path / "tables").write_text("in the way")
    recorder = Recorder(tmp_path, flush_seconds=0.01)
    for step in range(50):
        recorder.write("steps", {"step": step})
    assert not recorder.flush(2.0)
    assert len(reports(caplog)) == 1
    assert "tables" in reports(caplog)[0]
    (tmp_path / "tables").unlink()
    assert recorder.flush(30)
    assert recorder.close()
    assert len(reports(caplog)) == 1
    assert Run(tmp_path).table("steps")["step"].to_pylist() == list(range(50))


def test_a_removed_run_directory_is_reported_once_and_not_created_again(tmp_path, caplog):
    recorder = Recorder(tmp_path / "run", flush_seconds=0.01)
    recorder.write("steps", {"step": 1})
    assert recorder.flush(30)
    shutil.rmtree(tmp_path / "run")
    recorder.write("steps", {"step": 2})
    recorder.write("groups", {"group_id": 1})
    assert not recorder.flush(2.0)
    assert len(reports(caplog)) == 1
    assert "was removed or replaced" in reports(caplog)[0]
    assert not recorder.close(timeout=600.0), "and the end does not wait for it"
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_is_moved_away_and_back_is_complete(tmp_path, caplog):
    recorder = Recorder(tmp_path / "run", flush_seconds=0.01)
    recorder.write("steps", {"step": 1})
    assert recorder.flush(30)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    (tmp_path / "run").mkdir()
    recorder.write("steps", {"step": 2})
    assert not recorder.flush(2.0)
    (tmp_path / "run").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    assert recorder.flush(30)
    assert recorder.close()
    assert Run(tmp_path / "run").table("steps")["step"].to_pylist() == [1, 2]
    assert len(reports(caplog)) == 1


def test_closing_on_a_disk_that_never_works_ends_within_its_deadline(tmp_path, caplog):
    (tmp_path / "tables").write_text("in the way")
    recorder = Recorder(tmp_path, flush_seconds=0.01)
    recorder.write("steps", {"step": 1})
    assert not recorder.close(timeout=3.0)
    recorder._thread.join(30)
    assert any("is incomplete: 1 rows" in record.message for record in caplog.records)
    assert not recorder._thread.is_alive()


def test_a_run_whose_disk_stays_full_is_listed_with_its_end(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path, flush_seconds=0.01)
    info = begin_run(recorder, name="full", config_hash="", config_json="{}")
    assert recorder.flush(30)

    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(TableWriter, "append", full)
    end_run(recorder, info, "failed", config_json="{}", error="the disk is full")
    assert not recorder.close(timeout=2.0)
    ended = read_run_json(tmp_path)
    assert (ended.status, ended.error, status_now(tmp_path, ended)) == ("failed", "the disk is full", "failed")


def test_a_row_that_cannot_be_written_does_not_stop_others(tmp_path, monkeypatch, caplog):
    append = TableWriter.append

    def failing(self, rows):
        if any(row.get("step") == 13 for row in rows):
            raise RuntimeError("thirteen")
        return append(self, rows)

    monkeypatch.setattr(TableWriter, "append", failing)
    with Recorder(tmp_path, flush_seconds=0.01) as recorder:
        for step in (12, 13, 14):
            recorder.write("steps", {"step": step})
            recorder.flush()
        assert recorder.dropped == {"steps": 1}
    assert Run(tmp_path).table("steps")["step"].to_pylist() == [12, 14]
    assert any("thirteen" in str(record.exc_info) for record in caplog.records)


def test_memory_stays_bounded_while_the_disk_hangs(tmp_path, monkeypatch):
    blocked = threading.Event()
    append = TableWriter.append
    monkeypatch.setattr(TableWriter, "append", lambda self, rows: (blocked.wait(60), append(self, rows))[1])
    recorder = Recorder(tmp_path, flush_seconds=0.01, max_pending_rows=500, max_pending_bytes=10**6)
    for number in range(3000):
        recorder.write("samples", {"sample_id": str(number), "completion_text": "x" * 1000})
        recorder.write("gauges", {"value": number})
    assert recorder._pending.num_rows <= 500
    assert recorder._pending.num_bytes <= 10**6
    assert sum(recorder.dropped.values()) + recorder._pending.num_rows == 6000
    blocked.set()
    recorder.close()


def test_a_prompt_that_was_dropped_is_written_when_it_comes_again(tmp_path, monkeypatch):
    blocked = threading.Event()
    append = TableWriter.append
    monkeypatch.setattr(TableWriter, "append", lambda self, rows: (blocked.wait(60), append(self, rows))[1])
    with Recorder(tmp_path, flush_seconds=0.01, max_pending_rows=3) as recorder:
        recorder.write("prompts", {"prompt_key": "dropped"})
        for key in "abc":
            recorder.write("prompts", {"prompt_key": key})
        blocked.set()
        recorder.flush()
        for key in ("dropped", "a", "dropped"):
            recorder.write("prompts", {"prompt_key": key})
    assert sorted(Run(tmp_path).table("prompts")["prompt_key"].to_pylist()) == ["a", "b", "c", "dropped"]


def test_a_second_writer_is_refused_with_the_process_of_the_first(tmp_path):
    with Recorder(tmp_path, flush_seconds=0.01) as recorder:
        recorder.flush()
        with pytest.raises(UserError, match=r"is in use: Process \d+ on"):
            Recorder(tmp_path)
    Recorder(tmp_path).close()


def test_what_a_run_does_now_is_shown_while_it_is_live(tmp_path):
    recorder = Recorder(tmp_path, flush_seconds=600)
    info = begin_run(recorder, name="demo", config_hash="c", config_json="{}")
    assert Run(tmp_path).now() is None
    recorder.now = lambda: {"phase": "training", "components": {"trainer": "waiting for a batch"}}
    assert recorder.flush()
    now = Run(tmp_path).now()
    assert (now["attempt"], now["phase"], now["components"]["trainer"]) == (1, "training", "waiting for a batch")
    end_run(recorder, info, "finished", config_json="{}")
    assert recorder.flush()
    assert Run(tmp_path).now() is None
    recorder.close()
    assert not (tmp_path / "tables" / "now.json").exists()


def test_rows_are_written_when_the_state_of_the_run_cannot_be(tmp_path, caplog):
    with Recorder(tmp_path, flush_seconds=600) as recorder:
        recorder.now = Mock(side_effect=RuntimeError("a bug"))
        recorder.write("steps", {"step": 0, "metrics": {}})
        assert recorder.flush() and recorder.flush()
    assert Run(tmp_path).table("steps").num_rows == 1
    assert [record.message for record in caplog.records if "a bug" in record.message] != []


def test_samples_in_flight_are_shown_while_the_run_is_live(tmp_path):
    recorder = Recorder(tmp_path, flush_seconds=0.01)
    begin_run(recorder, name="r", config_hash="", config_json="{}")
    recorder.set_in_flight([{"sample_id": "a", "completion_tokens": np.int64(5), "unknown": 1}])
    recorder.flush()
    row = Run(tmp_path).in_flight().to_pylist()[0]
    assert (row["sample_id"], row["completion_tokens"], row["status"]) == ("a", 5, "in_flight")
    recorder.set_in_flight([])
    recorder.flush()
    assert Run(tmp_path).in_flight().num_rows == 0
    recorder.close()
    assert not (tmp_path / "tables" / "in_flight.json").exists()


def test_closing_twice_and_writing_afterwards_do_not_raise(tmp_path):
    recorder = Recorder(tmp_path)
    assert recorder.close()
    recorder.write("logs", {"message": "the run ended"})
    assert recorder.close()
    recorder.write("steps", {"step": 1})
    assert recorder.dropped == {"steps": 1}


def test_a_healthy_record_logs_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with Recorder(tmp_path) as recorder:
        recorder.write("steps", {"step": 1})
    assert not caplog.records
