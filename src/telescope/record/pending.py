"""Buffers a bounded number of rows until they are on disk. Drops the least important rows first.

Owns the counts of rows and bytes, and the choice of rows to drop. Does not lock, write or wait: the recorder calls it
under its lock.

Invariants: only rows of `Keep.ALWAYS` tables may exceed the bounds. Tables with the lowest `Keep` lose rows first, and
each table loses its oldest rows first. Every dropped row is counted.
"""

from collections import Counter, deque
from itertools import islice
from typing import Any

from telescope.record.convert import Batch
from telescope.record.tables import TABLES, Keep

Row = dict[str, Any] | Batch
"""One row, or a batch of rows that counts as one."""

_VALUE_BYTES = 60
"""Approximate size of a key and a small value in a dictionary."""
_ITEM_BYTES = 36
"""Approximate size of a number in a Python list."""

_COUNTED = frozenset((int, float, bool, type(None)))
"""Types whose values need no further bytes. Checked first, because this runs for every row."""


def row_bytes(row: Row) -> int:
    """Returns the approximate memory of a row, in bytes. It is exact for long texts, which need most of it."""
    if isinstance(row, Batch):
        return row.num_bytes
    total = _VALUE_BYTES * len(row)
    for value in row.values():
        kind = type(value)
        if kind in _COUNTED:
            continue
        if kind is str:
            total += value.__sizeof__()  # a character takes up to four bytes
        elif kind is dict:
            total += _VALUE_BYTES * len(value) + row_bytes(value)
        elif hasattr(value, "nbytes"):
            total += value.nbytes
        elif hasattr(value, "__len__"):
            total += _ITEM_BYTES * len(value)
    return total


class PendingRows:
    """Rows of each table, oldest first."""

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self.num_rows = 0
        self.num_bytes = 0
        self.dropped: Counter[str] = Counter()
        self._rows: dict[str, deque[tuple[Row, int]]] = {name: deque() for name in TABLES}
        self._added: Counter[str] = Counter()
        droppable = [(table.keep, name) for name, table in TABLES.items() if table.keep < Keep.ALWAYS]
        self._order = [name for _, name in sorted(droppable)]

    def add(self, table: str, row: Row) -> None:
        """Appends a row. Drops the least important rows if the buffer is full."""
        size = row_bytes(row)
        self._rows[table].append((row, size))
        self._added[table] += 1
        self.num_rows += 1
        self.num_bytes += size
        if self.num_rows > self.max_rows or self.num_bytes > self.max_bytes:
            for name in self._order:
                while self._rows[name] and (self.num_rows > self.max_rows or self.num_bytes > self.max_bytes):
                    self._pop(name)
                    self.dropped[name] += 1

    def cut(self) -> dict[str, int]:
        """Marks the end of every table. `first` ignores rows after the mark."""
        return dict(self._added)

    def first(self, table: str, cut: int, max_rows: int, max_bytes: int) -> list[Row]:
        """Returns the oldest rows before the mark `cut`, and at least one if there is any. They stay in the buffer."""
        rows: list[Row] = []
        pending = self._rows[table]
        before_cut = cut - (self._added[table] - len(pending))
        total = 0
        for row, size in islice(pending, max(0, min(before_cut, max_rows))):
            total += size
            if rows and total > max_bytes:
                break
            rows.append(row)
        return rows

    def written(self, table: str, rows: list[Row]) -> None:
        """Removes rows that `first` returned and that are now on disk."""
        # Rows that were dropped while they were written are on disk and not lost.
        self.dropped[table] -= len(rows) - self._remove(table, rows)

    def drop(self, table: str, rows: list[Row]) -> None:
        """Removes rows that `first` returned and that cannot be written. They count as dropped."""
        self.dropped[table] += self._remove(table, rows)

    def _remove(self, table: str, rows: list[Row]) -> int:
        pending = self._rows[table]
        done = {id(row) for row in rows}
        removed = 0
        while pending and id(pending[0][0]) in done:
            self._pop(table)
            removed += 1
        return removed

    def _pop(self, table: str) -> None:
        _, size = self._rows[table].popleft()
        self.num_rows -= 1
        self.num_bytes -= size
