"""The folder of one table: appends segments, merges them, and removes replaced ones.

Owns the files of one table. Synchronous and single-threaded; called by the recorder's thread. Does not buffer or retry:
`OSError` is raised to the caller and leaves the folder unchanged.

Invariants: a segment appears complete, by a rename. A merge is on disk (fsync of file and folder) before its inputs are
removed, at least `grace_seconds` later, so that a reader's listing never misses rows. A row is rewritten once per
level, and never after its file is sealed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from telescope.record.convert import conform, rows_to_table
from telescope.record.files import TEMPORARY_PREFIX, temporary_name
from telescope.record.pending import Row
from telescope.record.segments import (
    SEALED_BYTES,
    Segment,
    covered,
    final_merges,
    list_segments,
    next_merge,
    segment_name,
    select,
)
from telescope.record.tables import Table

logger = logging.getLogger(__name__)

MERGE_BUFFER_ROWS = 16_384
MERGE_BUFFER_BYTES = 16 * 2**20
"""Approximate memory of a merge, and size of a row group of its result."""

_CATEGORIES = frozenset(
    (
        *("environment", "status", "reason", "stop_reason", "eval_name", "eval_id", "failure_kind"),
        *("name", "component", "level", "place", "role"),
    )
)
"""Columns with few distinct values, which a dictionary makes small."""

_FILTERED = frozenset(("attempt", "step", "status", "time", "start", "group_id", "environment"))
"""Columns that queries filter by: statistics let a reader skip row groups. Others would only enlarge small files."""


class UnreadableSegmentError(Exception):
    """A segment is not a valid Parquet file, for example after a power failure."""

    def __init__(self, segment: Segment, cause: Exception) -> None:
        super().__init__(f"{segment.path}: {cause}")
        self.segment = segment


class TableWriter:
    """Writer of one table. Removes the unfinished files of earlier writers. Raises `OSError`."""

    def __init__(self, table: Table, directory: Path) -> None:
        self._table = table
        self._directory = directory
        self._reported: set[str] = set()
        self._unreadable: set[Path] = set()
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob(f"{TEMPORARY_PREFIX}*"):
            path.unlink(missing_ok=True)
        found = list_segments(directory)
        self._segments = list(select(found).segments)
        self._replaced = [(time.monotonic(), segment.path) for segment in covered(found)]
        self._next_row = max((segment.end for segment in found), default=0)

    def append(self, rows: Sequence[Row]) -> int:
        """Writes `rows` as one new segment. Returns its bytes."""
        data, problems = rows_to_table(self._table, rows)
        for column, problem in problems.items():
            self._report_once(column, f"has values that do not fit and are recorded as null, the first: {problem}")
        first, end = self._next_row, self._next_row + data.num_rows
        path = self._directory / segment_name(first, end, 0)
        temporary = temporary_name(path)
        try:
            # A small segment is merged soon and compressed then. A sealed one is never merged, so it is compressed now.
            compression = "none" if data.nbytes < SEALED_BYTES else "zstd"
            with _open_parquet(temporary, data.schema, compression=compression) as file:
                file.write_table(data)
            os.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        num_bytes = path.stat().st_size
        self._segments.append(Segment(path, first, end, 0, num_bytes))
        self._next_row = end
        return num_bytes

    def compact(self) -> int:
        """Does one merge if one is due. Returns the bytes written."""
        due = next_merge(self._mergeable())
        return self._merge(due, due[0].level + 1) if due else 0

    def finish(self) -> int:
        """Merges the remaining small segments. Returns the bytes written."""
        return sum(self._merge(run, max(each.level for each in run)) for run in final_merges(self._mergeable()))

    def sweep(self, grace_seconds: float) -> int:
        """Removes files that were replaced at least `grace_seconds` ago. Returns how many remain."""
        now = time.monotonic()
        while self._replaced and now - self._replaced[0][0] >= grace_seconds:
            self._replaced[0][1].unlink(missing_ok=True)
            self._replaced.pop(0)
        return len(self._replaced)

    def _mergeable(self) -> list[Segment]:
        return [segment for segment in self._segments if segment.path not in self._unreadable]

    def _merge(self, inputs: Sequence[Segment], level: int) -> int:
        """Replaces neighbors with one segment of `level`. Returns its bytes, 0 if an input is unreadable."""
        first, end = inputs[0].first, inputs[-1].end
        path = self._directory / segment_name(first, end, level)
        temporary = temporary_name(path)
        try:
            with _open_parquet(temporary, _common_schema(self._table, inputs)) as file:
                for data in _in_pieces(inputs, file.schema):
                    file.write_table(data)
            _sync(temporary)
            os.rename(temporary, path)
            _sync(self._directory)
        except UnreadableSegmentError as error:
            temporary.unlink(missing_ok=True)
            self._unreadable.add(error.segment.path)
            self._report_once(error.segment.path.name, f"cannot be read and is not merged: {error}")
            return 0
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        num_bytes = path.stat().st_size
        now = time.monotonic()
        gone = {segment.path for segment in inputs}
        place = self._segments.index(inputs[0])
        self._segments = [segment for segment in self._segments if segment.path not in gone]
        self._segments.insert(place, Segment(path, first, end, level, num_bytes))
        self._replaced += [(now, segment.path) for segment in inputs]
        return num_bytes

    def _report_once(self, what: str, message: str) -> None:
        if what not in self._reported:
            self._reported.add(what)
            logger.warning("record: %s.%s %s", self._table.name, what, message)


def _open_parquet(path: Path, schema: pa.Schema, *, compression: str = "zstd") -> pq.ParquetWriter:
    return pq.ParquetWriter(
        path,
        schema,
        compression=compression,
        store_schema=False,
        use_dictionary=[name for name in schema.names if name in _CATEGORIES],
        write_statistics=[name for name in schema.names if name in _FILTERED],
    )


def _common_schema(table: Table, inputs: Iterable[Segment]) -> pa.Schema:
    """Returns the current columns, then those that a newer version added."""
    fields = {field.name: field for field in table.schema}
    for segment in inputs:
        with _opened(segment) as file:
            for field in file.schema_arrow:
                fields.setdefault(field.name, field)
    return pa.schema(list(fields.values()))


def _opened(segment: Segment) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(segment.path)
    except (pa.ArrowException, OSError) as error:
        raise UnreadableSegmentError(segment, error) from error
    if file.metadata.num_rows != segment.num_rows:
        file.close()
        raise UnreadableSegmentError(segment, ValueError(f"it holds {file.metadata.num_rows} rows"))
    return file


def _in_pieces(inputs: Iterable[Segment], schema: pa.Schema) -> Iterable[pa.Table]:
    """Yields the rows of all inputs, in order, as bounded tables."""
    pending: list[pa.Table] = []
    num_rows = num_bytes = 0
    for segment in inputs:
        with _opened(segment) as file:
            for group in range(file.num_row_groups):
                try:
                    data = conform(file.read_row_group(group), schema)
                except (pa.ArrowException, OSError) as error:
                    raise UnreadableSegmentError(segment, error) from error
                pending.append(data)
                num_rows += data.num_rows
                num_bytes += data.nbytes
                if num_rows >= MERGE_BUFFER_ROWS or num_bytes >= MERGE_BUFFER_BYTES:
                    yield pa.concat_tables(pending)
                    pending, num_rows, num_bytes = [], 0, 0
    if pending:
        yield pa.concat_tables(pending)


def _sync(path: Path) -> None:
    """Makes a file, or the names in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
