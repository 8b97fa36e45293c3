"""A record is readable while it is written and killed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from telescope.record.compact import compact
from telescope.record.files import TEMPORARY_PREFIX
from telescope.record.query import execute
from telescope.record.reader import Run
from telescope.record.table_files import block_name
from telescope.record.table_writer import TableWriter
from telescope.record.tables import TABLES

WRITER = Path(__file__).parent / "record_writer_process.py"
WAIT_SECONDS = 60.0


def start(run_dir: Path, flush_seconds: float = 0.005) -> "subprocess.Popen[str]":
    command = [sys.executable, str(WRITER), str(run_dir), "write", str(flush_seconds)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def flushed(process: "subprocess.Popen[str]") -> int:
    """Waits until the writer reports how many rows are on disk."""
    return int(process.stdout.readline())


def numbers(run: Run, name: str, column: str) -> list[int]:
    return [int(value) for value in run.table(name, columns=[column])[column].to_pylist()]


def test_a_concurrent_reader_sees_only_a_growing_prefix(tmp_path):
    with start(tmp_path) as process:
        flushed(process)
        run, seen, rows, cursor = Run(tmp_path), 0, [], 0
        kinds: set[str] = set()
        files = reads = 0
        deadline = time.monotonic() + WAIT_SECONDS
        while (len(kinds) < 2 or files < 4 or reads < 40) and time.monotonic() < deadline:
            reads += 1
            steps = numbers(run, "steps", "step")
            samples = numbers(run, "samples", "sample_id")
            assert steps == list(range(len(steps)))
            assert samples == list(range(len(samples)))
            assert len(samples) >= len(steps) >= seen, "a step is never there without its samples, and none goes away"
            seen = len(steps)
            new, cursor = run.rows_since("gauges", cursor, ["value"])
            rows += new["value"].to_pylist()
            kinds |= {file.path.suffix for file in run.table_files("samples")}
            files = max(files, len(list(run.files.table("samples").glob("*.parquet"))))
        assert kinds == {".arrows", ".parquet"} and files >= 4, "the reads went across tails and blocks"
        assert rows == list(range(len(rows))), "following with a cursor misses no row and repeats none"
        assert run.status == "live"
        total, _ = process.communicate("", timeout=WAIT_SECONDS)
    last = int(total.split()[-1])
    assert numbers(run, "steps", "step") == list(range(last))
    assert run.status == "finished"
    assert not list(run.files.tables.rglob("*.arrows")), "an ended run has Parquet files only"


def test_concurrent_queries_count_each_row_once(tmp_path):
    with start(tmp_path) as process:
        flushed(process)
        run, seen = Run(tmp_path), 0
        sql = "SELECT count(*), count(DISTINCT step), max(step) FROM steps"
        for _ in range(25):
            ((count, distinct, most),) = run.sql(sql).rows
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


@pytest.mark.parametrize("damage", [b"", b"PAR1 cut off"])
def test_a_file_damaged_by_a_power_failure_loses_only_its_own_rows(tmp_path, caplog, damage):
    directory = tmp_path / "tables" / "gauges"
    writer = TableWriter(TABLES["gauges"], directory)
    for number in range(40):
        writer.append([{"value": number}])
        writer.close_block()
    (directory / block_name(20, 21)).write_bytes(damage)
    TableWriter(TABLES["gauges"], directory).append([{"value": 40}])
    expected = [number for number in range(41) if number != 20]
    run = Run(tmp_path)
    assert numbers(run, "gauges", "value") == expected
    assert execute([run], "SELECT count(*) FROM gauges").rows == [(40,)]
    assert sum("is damaged" in record.message for record in caplog.records) == 1
    compact(run)
    assert numbers(Run(tmp_path), "gauges", "value") == expected
    names = sorted(path.name for path in directory.iterdir())
    assert names == [block_name(0, 20), block_name(20, 21), block_name(21, 41)]
