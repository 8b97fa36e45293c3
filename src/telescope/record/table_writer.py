"""Appends rows to the tail of one table, and turns its tails into blocks.

Owns the files of one table (`table_files` describes them). Synchronous and single-threaded; called by the recorder's
thread. Does not buffer or retry: the caller gets the `OSError`, and the rows are not in the table.

Invariants: a row is written twice, into a tail without compression and into a block with it. A new file appears
complete, by a rename. A block is on disk (fsync of file and folder) before its tails are removed; a tail is on disk
before the next one begins. A damaged tail stays where it is, and rows go on behind it. The folder's modification time
changes with every append.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from telescope.record.convert import Batch, conform, rows_to_table, warn_of
from telescope.record.files import TEMPORARY_PREFIX, replace_file, replacing, sync
from telescope.record.pending import Row
from telescope.record.table_files import TableFile, block_name, list_files, list_tails, tail_name
from telescope.record.tables import Table

TAIL_BYTES = 8 * 2**20
"""Largest tail, exceeded by at most one flush. A reader that follows a run reads the newest tail at every poll."""

ROW_GROUP_ROWS = 16_384
ROW_GROUP_BYTES = 16 * 2**20
"""Size of row groups, and approximate memory for writing a block."""

_CATEGORIES = frozenset(
    (
        *("environment", "status", "reason", "stop_reason", "eval_name", "eval_id", "failure_kind", "metric"),
        *("name", "component", "level", "place", "role", "source", "kind", "node"),
    )
)
"""Columns with few distinct values, for which a dictionary saves space."""

_FILTERED = frozenset(("attempt", "step", "status", "time", "start", "group_id", "environment"))
"""Columns that queries filter by. With statistics, readers skip row groups; others would only enlarge small files."""


class TableWriter:
    """Writes one table, continuing the files of earlier writers. Raises `OSError`."""

    def __init__(self, table: Table, directory: Path) -> None:
        self._table = table
        self._directory = directory
        self._warned: set[str] = set()
        self._tail: Path | None = None
        self._tail_bytes = 0
        self._tail_began = 0.0
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob(f"{TEMPORARY_PREFIX}*"):
            path.unlink(missing_ok=True)
        tails, listing = list_tails(directory), list_files(directory)
        self.num_rows = max([listing.end, *(first + 1 for first, path in tails if path in listing.damaged)])
        """Rows of the table."""
        self._num_rows_in_blocks = min([self.num_rows, *(first for first, _ in tails)])
        self.num_tails = len(tails)
        self.num_tail_bytes = sum(path.stat().st_size for _, path in tails)
        self.tails_began = time.monotonic()
        """When the first tail began."""

    @property
    def num_tail_rows(self) -> int:
        """The number of rows that are in no block."""
        return self.num_rows - self._num_rows_in_blocks

    def append(self, rows: Sequence[Row]) -> None:
        """Appends `rows` to the tail."""
        batches = [row for row in rows if isinstance(row, Batch)]
        data, problems = rows_to_table(self._table, [row for row in rows if not isinstance(row, Batch)])
        if batches:
            of_samples = conform(pa.Table.from_batches([batch.rows for batch in batches]), self._table.schema)
            sizes = [batch.rows.num_rows for batch in batches]
            attempts = pa.array(np.repeat([batch.attempt for batch in batches], sizes), pa.int64())
            of_samples = of_samples.set_column(of_samples.schema.get_field_index("attempt"), "attempt", attempts)
            data = pa.concat_tables([of_samples, data]).combine_chunks()
        warn_of(self._table, problems, self._warned)
        content = b"".join(batch.serialize() for batch in data.to_batches())
        if self._tail is not None:
            try:
                write_at(self._tail, self._tail_bytes, content)
                os.utime(self._directory)  # A write alone does not change the folder's modification time.
            except BaseException:
                # The next tail begins with these rows, so readers ignore the copies that this one may have.
                self._tail = None
                raise
        else:
            tail = self._directory / tail_name(self.num_rows)
            content = data.schema.serialize().to_pybytes() + content
            replace_file(tail, content)
            self._tail, self._tail_bytes, self._tail_began = tail, 0, time.monotonic()
            self.tails_began = self.tails_began if self.num_tails else self._tail_began
            self.num_tails += 1
        self._tail_bytes += len(content)
        self.num_tail_bytes += len(content)
        self.num_rows += data.num_rows

    def end_tail(self, seconds: float) -> None:
        """Ends the tail if it is large or began at least `seconds` ago. The next rows begin another tail."""
        tail = self._tail
        if tail is not None and (self._tail_bytes >= TAIL_BYTES or time.monotonic() - self._tail_began >= seconds):
            sync(tail)
            self._tail = None

    def close_block(self) -> None:
        """Turns the tails into a block."""
        listing = list_files(self._directory, self._num_rows_in_blocks)
        tails = [
            replace(file, end=min(file.end, self.num_rows), rows=file.rows.slice(0, self.num_rows - file.first))
            for file in listing.files
            if file.rows is not None
        ]
        self._tail = None  # also after a failure, because a block contains whole tails
        for run in split_at_gaps(tails):
            write_block(self._table, self._directory, run)
        for first, path in list_tails(self._directory):
            if first >= self._num_rows_in_blocks and path not in listing.damaged:
                path.unlink(missing_ok=True)
        self.num_tails, self.num_tail_bytes, self._num_rows_in_blocks = 0, 0, self.num_rows


def split_at_gaps(files: Iterable[TableFile]) -> list[list[TableFile]]:
    """Splits ordered files into lists without missing rows."""
    runs: list[list[TableFile]] = []
    for file in files:
        if runs and runs[-1][-1].end == file.first:
            runs[-1].append(file)
        else:
            runs.append([file])
    return runs


def write_block(table: Table, directory: Path, files: Sequence[TableFile]) -> None:
    """Writes the rows of adjacent files as one block. Raises pyarrow's errors for damage."""
    # The current columns, then columns that a newer version added.
    fields = {field.name: field for field in table.schema}
    for file in files:
        for field in file.rows.schema if file.rows is not None else pq.read_schema(file.path):
            fields.setdefault(field.name, field)
    schema = pa.schema(list(fields.values()))
    coding: dict[str, Any] = {
        "compression": "zstd",
        "store_schema": False,
        "use_dictionary": [name for name in fields if name in _CATEGORIES],
        "write_statistics": [name for name in fields if name in _FILTERED],
    }
    with replacing(directory / block_name(files[0].first, files[-1].end)) as temporary:
        with pq.ParquetWriter(temporary, schema, **coding) as block:
            for data in _row_groups(files, schema):
                block.write_table(data)
        sync(temporary)
    sync(directory)


def write_at(path: Path, offset: int, content: bytes) -> None:
    """Writes `content` to an existing file at `offset`."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def _row_groups(files: Iterable[TableFile], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yields the rows of all files in tables of bounded size."""
    pending: list[pa.Table] = []
    for data in (data for file in files for data in _tables_of(file)):
        pending.append(conform(data, schema))
        if (
            sum(each.num_rows for each in pending) >= ROW_GROUP_ROWS
            or sum(each.nbytes for each in pending) >= ROW_GROUP_BYTES
        ):
            yield pa.concat_tables(pending)
            pending = []
    if pending:
        yield pa.concat_tables(pending)


def _tables_of(file: TableFile) -> Iterator[pa.Table]:
    if file.rows is not None:
        yield file.rows
        return
    with pq.ParquetFile(file.path) as block:
        for group in range(block.num_row_groups):
            yield block.read_row_group(group)
