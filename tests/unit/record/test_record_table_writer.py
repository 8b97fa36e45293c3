"""Whenever a writer is killed or its disk fails, a reader sees a growing prefix of the rows, each once."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from telescope.record import compact as compact_module
from telescope.record import files, table_writer
from telescope.record.compact import compact
from telescope.record.files import TEMPORARY_PREFIX
from telescope.record.reader import Run
from telescope.record.table_files import block_name
from telescope.record.table_writer import TAIL_BYTES, TableWriter
from telescope.record.tables import TABLES


class Killed(BaseException):
    """The process ends here: nothing that it does afterwards has an effect."""


class Machine:
    """A run with one table, whose writer can be killed, or have a failing disk, at any of its file operations.

    Before each of them a reader looks at the table.
    """

    def __init__(self, run_dir: Path) -> None:
        self.directory = run_dir / "tables" / "gauges"
        self.directory.mkdir(parents=True)
        self.run = Run(run_dir)
        self.writer = TableWriter(TABLES["gauges"], self.directory)
        self.visible = self.cursor = 0
        self.followed: list[float] = []
        self.operations_left = -1
        self.is_killed = False
        self.error: type[BaseException] = Killed

    def look(self) -> None:
        values = self.run.table("gauges", columns=["value"])["value"].to_pylist()
        assert values == list(range(len(values))) and len(values) >= self.visible
        self.visible = len(values)
        new, self.cursor = self.run.rows_since("gauges", self.cursor, ["value"])
        self.followed += new["value"].to_pylist()
        assert self.followed == values
        assert self.run.num_rows("gauges") == len(values)

    def before(self, partial: Callable[[], Any] = lambda: None) -> None:
        """Is called before each file operation of the writer. `partial` does a part of it."""
        if not self.is_killed:
            self.look()
            self.operations_left -= 1
            if self.operations_left == -1:
                partial()
                self.is_killed = self.error is Killed
                raise self.error(28, "no space")
        else:
            raise Killed

    @contextmanager
    def failing(self, after: int, error: type[BaseException]) -> Iterator[None]:
        """The next operations fail after `after` file operations."""
        self.operations_left, self.error, self.is_killed = after, error, False
        write, unlink, rename = Path.write_bytes, Path.unlink, os.rename
        utime, replace, write_at, sync = os.utime, os.replace, table_writer.write_at, table_writer.sync

        def cut_write(path: Path, content: bytes) -> int:
            self.before(lambda: write(path, content[: len(content) // 2]))
            return write(path, content)

        def cut_write_at(path: Path, offset: int, content: bytes) -> None:
            self.before(lambda: write_at(path, offset, content[: len(content) // 2]))
            write_at(path, offset, content)

        def watched(operation: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **options: Any) -> Any:
                self.before()
                return operation(*arguments, **options)

            return run

        with (
            patch.object(Path, "write_bytes", cut_write),
            patch.object(Path, "unlink", watched(unlink)),
            patch.object(files.os, "replace", watched(replace)),
            patch.object(table_writer.os, "rename", watched(rename)),
            patch.object(table_writer.os, "utime", watched(utime)),
            patch.object(table_writer, "write_at", cut_write_at),
            patch.object(table_writer, "sync", watched(sync)),
            suppress(Killed, OSError),
        ):
            yield
        self.look()
        if self.is_killed:
            # Another process goes on. What the last one wrote completely is there.
            self.writer = TableWriter(TABLES["gauges"], self.directory)
            assert not list(self.directory.glob(f"{TEMPORARY_PREFIX}*"))
            self.look()

    def do(self, operation: str, size: int) -> None:
        if operation == "append":
            first = self.writer.num_rows
            self.writer.append([{"value": first + place} for place in range(size)])
        elif operation == "end tail":
            self.writer.end_tail(seconds=0.0)
        elif operation == "close block":
            self.writer.close_block()
        elif operation == "restart":
            self.writer = TableWriter(TABLES["gauges"], self.directory)
        else:
            try:
                compact(self.run)
            finally:
                self.writer = TableWriter(TABLES["gauges"], self.directory)


OPERATIONS = st.one_of(
    *[st.tuples(st.just("append"), st.integers(1, 5))] * 3,
    st.tuples(st.sampled_from(["end tail", "close block", "restart", "compact"]), st.just(0)),
)
FAILURES = st.one_of(st.none(), *[st.tuples(st.integers(0, 5), st.just(kind)) for kind in (Killed, OSError)])


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(OPERATIONS, FAILURES), min_size=5, max_size=20))
def test_a_reader_sees_each_row_once_whenever_the_writer_is_killed_or_its_disk_fails(tmp_path_factory, history):
    machine = Machine(tmp_path_factory.mktemp("run"))
    with patch.object(compact_module, "GRACE_SECONDS", 0.0):
        for (operation, size), failure in history:
            after, error = failure or (10**6, Killed)
            known = machine.writer.num_rows
            with machine.failing(after, error):
                machine.do(operation, size)
            if failure and operation != "compact" and not machine.is_killed:
                machine.do(operation, size + 1)  # again, with the rows that have come since, as the recorder does
                machine.look()
            assert machine.visible >= known, "flushed rows survive"
        machine.do("close block", 0)
        machine.look()
        assert machine.visible == machine.writer.num_rows


def test_a_row_is_in_a_tail_and_then_in_a_compressed_block(tmp_path):
    writer = TableWriter(TABLES["samples"], tmp_path)
    writer.append([{"sample_id": "a", "completion_text": "ha" * 10_000}])
    writer.append([{"sample_id": "b"}])
    (tail,) = tmp_path.iterdir()
    assert (writer.num_tail_rows, writer.num_tails) == (2, 1) and tail.stat().st_size > 20_000
    writer.close_block()
    (block,) = tmp_path.iterdir()
    assert block.name == block_name(0, 2) and block.stat().st_size < 20_000
    assert (writer.num_rows, writer.num_tail_rows, writer.num_tails) == (2, 0, 0)


@pytest.mark.parametrize("large", [True, False])
def test_a_tail_ends_when_it_is_old_or_large(tmp_path, large):
    writer = TableWriter(TABLES["samples"], tmp_path)
    for name in "ab":
        writer.append([{"sample_id": name, "completion_text": "x" * (TAIL_BYTES if large else 1)}])
        writer.end_tail(seconds=1e6 if large else 0.0)
    assert len(list(tmp_path.glob("*.arrows"))) == 2
    writer.append([{"sample_id": "c"}])
    writer.end_tail(seconds=1e6)
    writer.append([{"sample_id": "d"}])
    assert len(list(tmp_path.glob("*.arrows"))) == 3


def test_the_folder_changes_with_every_append(tmp_path):
    writer = TableWriter(TABLES["samples"], tmp_path)
    writer.append([{}])
    os.utime(tmp_path, (0, 0))
    writer.append([{}])
    assert tmp_path.stat().st_mtime > 0


def values(folder: Path) -> list[float]:
    return Run(folder.parents[1]).table("gauges", columns=["value"])["value"].to_pylist()


@pytest.mark.parametrize("name", ["000000000001.arrows", "000000000002.arrows", "000000000007.arrows"])
@pytest.mark.parametrize("content", [b"not a stream", b""])
def test_rows_go_on_behind_a_damaged_tail(tmp_path, content, name):
    folder = tmp_path / "tables" / "gauges"
    writer = TableWriter(TABLES["gauges"], folder)
    writer.append([{"value": 0.0}, {"value": 1.0}])
    (folder / name).write_bytes(content)
    writer = TableWriter(TABLES["gauges"], folder)
    writer.append([{"value": 2.0}])
    assert values(folder) == [0, 1, 2]
    writer.close_block()
    assert values(folder) == [0, 1, 2]
    assert (folder / name).read_bytes() == content
