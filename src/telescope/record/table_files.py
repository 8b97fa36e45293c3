"""Names the files of a table, reads its tails, and selects files that have each row once.

    tables/samples/000000000000-000000000640.parquet   block: rows [0, 640), never changed
    tables/samples/000000000640.arrows                 tail: rows from 640 on, an Arrow IPC stream
    tables/samples/000000000704.arrows                 the newest tail, which grows at every flush

Rows are counted from 0 over the whole run. Tails are merged into one block, which replaces them.

Invariants: the rows on disk are `[0, n)`. A file appears complete, by a rename. A tail is removed after its block has
appeared, and a reader lists tails before blocks: rows that are missing from its tails are in its blocks. There is no
manifest: the file names and the number of rows in the newest tail show which files to open and which rows are missing.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

BLOCK_NAME = re.compile(r"^(\d+)-(\d+)\.parquet$")
TAIL_NAME = re.compile(r"^(\d+)\.arrows$")

AFTER_ALL_ROWS = 2**62
"""A cursor behind all rows, with which only the number of rows is read."""


@dataclass(frozen=True, slots=True)
class TableFile:
    """One file of a table: rows `[first, end)`."""

    path: Path
    first: int
    end: int
    rows: pa.Table | None = None
    """The rows of a tail. None for a block, which may be too large for memory."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Ordered files that have each row once, ranges of missing rows, and tails that are no Arrow streams."""

    files: tuple[TableFile, ...]
    gaps: tuple[tuple[int, int], ...]
    end: int
    """One past the last row of the table."""
    damaged: tuple[Path, ...] = ()


def block_name(first: int, end: int) -> str:
    """Returns the file name of a block. Names sort in the order of the rows."""
    return f"{first:012d}-{end:012d}.parquet"


def tail_name(first: int) -> str:
    """Returns the file name of a tail."""
    return f"{first:012d}.arrows"


def list_files(directory: Path, cursor: int = 0) -> Listing:
    """Returns the files with the rows from row `cursor` on.

    Can be called while the table is written. Tails before that row are not read, unless the newest tail is damaged.
    """
    tails, damaged = _read_tails(directory, cursor)
    return replace(select([*list_blocks(directory), *tails], cursor), damaged=tuple(damaged))


def list_blocks(directory: Path) -> list[TableFile]:
    """Returns all blocks, including blocks whose rows other blocks have too."""
    matches = [match for name in _names(directory) if (match := BLOCK_NAME.match(name))]
    return [TableFile(directory / match[0], int(match[1]), int(match[2])) for match in matches]


def list_tails(directory: Path) -> list[tuple[int, Path]]:
    """Returns the first row and the path of each tail, in order."""
    matches = [match for name in _names(directory) if (match := TAIL_NAME.match(name))]
    return sorted((int(match[1]), directory / match[0]) for match in matches)


def select(files: Iterable[TableFile], cursor: int = 0) -> Listing:
    """Selects files that have each row from `cursor` on once, preferring the longest file at each row."""
    chosen: list[TableFile] = []
    gaps: list[tuple[int, int]] = []
    end, position = 0, cursor
    for file in sorted(files, key=lambda file: (file.first, -file.end)):
        end = max(end, file.end)
        if file.end <= position:
            continue
        if file.first > position:
            gaps.append((position, file.first))
        chosen.append(file)
        position = file.end
    return Listing(tuple(chosen), tuple(gaps), end)


def read_tail(path: Path) -> pa.Table | None:
    """Returns the complete rows of a tail, or None if a block has replaced it.

    If the writer was killed, the last rows of a tail may be incomplete. Raises `pa.ArrowInvalid` if the file is no
    Arrow stream.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    batches: list[pa.RecordBatch] = []
    try:
        stream = pa.ipc.open_stream(content)
    except (pa.ArrowException, OSError) as error:
        raise pa.ArrowInvalid(f"{path}: {error}") from error
    try:
        for batch in stream:
            batch.validate(full=True)
            batches.append(batch)
    except (pa.ArrowException, OSError):
        pass  # The rest is incomplete.
    return pa.Table.from_batches(batches, stream.schema)


def _read_tails(directory: Path, cursor: int) -> tuple[list[TableFile], list[Path]]:
    tails, damaged = [], []
    following = AFTER_ALL_ROWS + 1
    for first, path in reversed(list_tails(directory)):
        if following <= cursor:
            break
        try:
            rows = read_tail(path)
        except (pa.ArrowInvalid, PermissionError):
            damaged.append(path)
            continue
        if rows is not None:
            # After a failed write, the next tail begins with rows that may also be in this one.
            rows = rows.slice(0, following - first)
            tails.append(TableFile(path, first, first + rows.num_rows, rows))
            following = first
    return tails, damaged


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
