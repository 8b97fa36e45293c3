"""A record is readable while it is written, merged and killed."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from telescope.record import segments
from telescope.record.files import TEMPORARY_PREFIX
from telescope.record.query import Database
from telescope.record.reader import Run
from telescope.record.table_writer import TableWriter
from telescope.record.tables import GAUGES

WRITER = Path(__file__).parent / "record_writer_process.py"
WAIT_SECONDS = 60.0


def start(run_dir: Path, flush_seconds: float = 0.005) -> "subprocess.Popen[str]":
    command = [sys.executable, str(WRITER), str(run_dir), "write", str(flush_seconds)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def flushed(process: "subprocess.Popen[str]") -> int:
    """Waits until the writer reports how many rows are on disk."""
    assert process.stdout is not None
    return int(process.stdout.readline())


def numbers(run: Run, name: str, column: str) -> list[int]:
    return [int(value) for value in run.table(name, columns=[column])[column].to_pylist()]


def test_a_concurrent_reader_sees_only_a_growing_prefix(tmp_path):
    with start(tmp_path) as process:
        flushed(process)
        run, seen, rows, cursor = Run(tmp_path), 0, [], 0
        levels, files = set(), 0
        deadline = time.monotonic() + WAIT_SECONDS
        reads = 0
        while (2 not in levels or reads < 40) and time.monotonic() < deadline:
            reads += 1
            steps = numbers(run, "steps", "step")
            samples = numbers(run, "samples", "sample_id")
            assert steps == list(range(len(steps)))
            assert samples == list(range(len(samples)))
            assert len(samples) >= len(steps) >= seen, "a step is never there without its samples, and none goes away"
            seen = len(steps)
            new, cursor = run.rows_since("gauges", cursor, ["value"])
            rows += new["value"].to_pylist()
            levels |= {segment.level for segment in segments.snapshot(run.files.table("steps")).segments}
            files = max(files, len(list(run.files.table("steps").iterdir())))
        assert {0, 1, 2} <= levels, "the reads went across merges of merges"
        assert rows == list(range(len(rows))), "following with a cursor misses no row and repeats none"
        assert files < 200, "replaced files are removed while the run goes on"
        assert run.status == "live"
        total, _ = process.communicate("", timeout=WAIT_SECONDS)
    last = int(total.split()[-1])
    assert numbers(run, "steps", "step") == list(range(last))
    assert run.status == "finished"
    assert all(len(list(folder.iterdir())) == 1 for folder in run.files.tables.iterdir() if folder.is_dir())


def test_concurrent_queries_count_each_row_once(tmp_path):
    with start(tmp_path) as process:
        flushed(process)
        database, seen = Database([Run(tmp_path)]), 0
        for _ in range(25):
            ((count, distinct, most),) = database.execute(
                "SELECT count(*), count(DISTINCT step), max(step) FROM steps"
            ).rows
            assert count == distinct == most + 1 >= seen
            seen = count
        process.communicate("", timeout=WAIT_SECONDS)


def test_flushed_rows_survive_kill_9_and_the_next_attempt_appends(tmp_path):
    written = []
    for attempt in (1, 2, 3):
        with start(tmp_path, flush_seconds=0.02) as process:
            for _ in range(4):
                on_disk = flushed(process)
            process.send_signal(signal.SIGKILL)
            process.wait(WAIT_SECONDS)
        run = Run(tmp_path)
        assert run.status == "dead"
        everything = run.table("steps", all_attempts=True)
        of_attempt = [row["step"] for row in everything.to_pylist() if row["attempt"] == attempt]
        assert of_attempt == list(range(len(of_attempt)))
        assert len(of_attempt) >= on_disk
        written.append(len(of_attempt))
        assert len(everything) == sum(written), "no attempt loses or repeats rows of the one before"
        assert numbers(run, "steps", "step") == of_attempt, "each attempt starts over, so only the newest is shown"
    with start(tmp_path) as process:
        flushed(process)
        process.communicate("", timeout=WAIT_SECONDS)
    assert not list(tmp_path.rglob(f"{TEMPORARY_PREFIX}*")), "files that were cut off are removed by the next writer"


@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.one_of(
            *[st.integers(1, 4).map(lambda size: ("append", size))] * 3,
            st.sampled_from([("compact", 0), ("sweep", 0), ("reopen", 0), ("finish", 0)]),
        ),
        min_size=10,
        max_size=60,
    )
)
def test_all_rows_exist_once_after_every_operation_of_a_writer(tmp_path_factory, operations):
    run_dir = tmp_path_factory.mktemp("run")
    directory = run_dir / "tables" / "gauges"
    writer, count = TableWriter(GAUGES, directory), 0
    run = Run(run_dir)
    with patch.object(segments, "FAN_IN", 3):
        for name, size in operations:
            if name == "append":
                writer.append([{"value": count + place} for place in range(size)])
                count += size
            elif name == "reopen":
                writer = TableWriter(GAUGES, directory)
            elif name == "sweep":
                writer.sweep(0.0)
            else:
                getattr(writer, name)()
            assert numbers(run, "gauges", "value") == list(range(count))


def test_bytes_written_per_flush_stay_flat_over_a_long_run(tmp_path):
    writer = TableWriter(GAUGES, tmp_path)
    row = {"attempt": 1, "time": 1.0, "name": "queue_depth", "component": "orchestrator", "value": 1.0}
    windows = []
    for window in range(4):
        num_bytes = 0
        for place in range(segments.FAN_IN**2):
            num_bytes += writer.append([{**row, "time": float(window * 1000 + place)}] * 10)
            while merged := writer.compact():
                num_bytes += merged
            writer.sweep(0.0)
        windows.append(num_bytes)
    assert max(windows) <= 1.1 * windows[0]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("damage", [b"", b"PAR1 cut off"])
def test_a_file_damaged_by_a_power_failure_loses_only_its_own_rows(tmp_path, caplog, damage):
    directory = tmp_path / "tables" / "gauges"
    writer = TableWriter(GAUGES, directory)
    for number in range(40):
        writer.append([{"value": number}])
    (directory / segments.segment_name(20, 21, 0)).write_bytes(damage)
    writer = TableWriter(GAUGES, directory)
    while writer.compact():
        pass
    writer.finish()
    writer.sweep(0.0)
    expected = [number for number in range(40) if number != 20]
    run = Run(tmp_path)
    assert numbers(run, "gauges", "value") == expected
    assert Database([run]).execute("SELECT count(*) FROM gauges").rows == [(39,)]
    assert sum("is damaged" in record.message for record in caplog.records) == 1
    assert len(list(directory.iterdir())) == 3
