"""Merges the files of an ended run into few large files, for archives.

Invariants: merged files are on disk (fsync) before their inputs are removed, so a kill loses nothing: readers skip the
remaining inputs, and the next `compact` removes them. A live run is refused, and a run cannot be resumed while it is
compacted.
"""

import time
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq

from telescope.errors import UserError
from telescope.record.files import WriterLock
from telescope.record.reader import Run, is_readable
from telescope.record.table_files import block_name, list_blocks, list_tails
from telescope.record.table_writer import split_at_gaps, write_block
from telescope.record.tables import TABLES
from telescope.utils.data import split_by_size

FILE_BYTES = 256 * 2**20
"""Largest size of a merged file."""

GRACE_SECONDS = 1.0
"""How long merged files stay beside their inputs, because a reader may have listed the folder before the merge."""


def compact(run: Run) -> None:
    """Merges the files of each table of an ended run. Leaves damaged files unchanged.

    Raises `UserError` if the run is live, or another process is resuming or compacting it, and `OSError`.
    """
    if run.status == "live":
        raise UserError(f"{str(run.files.run_dir)!r} is live. Compact it when it has ended.")
    lock = WriterLock(run.files)
    lock.acquire()
    try:
        replaced = [path for name in TABLES for path in _merge(run, name)]
        if replaced:
            time.sleep(GRACE_SECONDS)
        for path in replaced:
            path.unlink(missing_ok=True)
    finally:
        lock.release()


def file_sizes(run: Run) -> list[int]:
    """Returns the size of each file of the tables, in bytes."""
    return [path.stat().st_size for path in run.files.tables.glob("*/*") if path.is_file()]


def _merge(run: Run, name: str) -> list[Path]:
    """Merges the files of a table. Returns the files whose rows are now in other files."""
    folder = run.files.table(name)
    for file in run.table_files(name):
        if file.rows is None and not (
            is_readable(file.path) and pq.read_metadata(file.path).num_rows == file.end - file.first
        ):
            run.exclude(file.path)
    whole = run.table_files(name)
    blocks: list[tuple[int, int, Path]] = []
    adjacent = (
        split_by_size(files, lambda file: file.path.stat().st_size, FILE_BYTES) for files in split_at_gaps(whole)
    )
    for group in chain.from_iterable(adjacent):
        first, end = group[0].first, group[-1].end
        if len(group) > 1 or group[0].rows is not None:
            write_block(TABLES[name], folder, group)
            blocks.append((first, end, folder / block_name(first, end)))
        else:
            blocks.append((first, end, group[0].path))
    found = [(block.first, block.end, block.path) for block in list_blocks(folder)]
    found += [(first, first + 1, path) for first, path in list_tails(folder) if not run.is_excluded(path)]
    return [
        path
        for first, end, path in found
        if any(low <= first and end <= high and path != block for low, high, block in blocks)
    ]
