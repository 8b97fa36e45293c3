"""Bounded buffer of rows that wait for the disk. Drops the least important first.

Owns the count of rows and bytes, and which rows are dropped. Does not lock, write or wait: the recorder calls it under
its lock.

Invariants: rows that are being written count until they are on disk, and are not dropped meanwhile. Of the others, only
rows of `Keep.ALWAYS` tables may exceed the bounds. Tables with the lowest `Keep` lose rows first, the oldest rows of a
table before newer ones. Every dropped row is counted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from telescope.record.schema import Keep
from telescope.record.tables import TABLES

Row = dict[str, Any]
SizedRows = deque[tuple[Row, int]]
"""Rows, oldest first, each with its approximate bytes."""

_VALUE_BYTES = 60
"""Approximate size of a key and a small value in a dictionary."""
_ITEM_BYTES = 36
"""Approximate size of a number in a Python list."""

_COUNTED = frozenset((int, float, bool, type(None)))
"""Types whose values need no further bytes. Checked first, because this runs for every row."""


def row_bytes(row: Row) -> int:
    """Returns the approximate memory of a row. Exact for long texts, which need most of it."""
    total = _VALUE_BYTES * len(row)
    for value in row.values():
        kind = type(value)
        if kind in _COUNTED:
            continue
        if kind is str:
            total += len(value)
        elif kind is dict:
            total += 2 * _VALUE_BYTES * len(value)
            total += sum(len(item) for item in value.values() if type(item) is str)
        elif hasattr(value, "nbytes"):
            total += value.nbytes
        elif hasattr(value, "__len__"):
            total += _ITEM_BYTES * len(value)
    return total


class PendingRows:
    """Rows by table."""

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self.num_rows = 0
        self.num_bytes = 0
        self.dropped: Counter[str] = Counter()
        self._rows: dict[str, SizedRows] = {name: deque() for name in TABLES}
        self._droppable = sorted((name for name in TABLES if TABLES[name].keep < Keep.ALWAYS), key=_keep)

    def add(self, table: str, row: Row) -> None:
        """Appends a row, and drops rows that no longer fit."""
        size = row_bytes(row)
        self._rows[table].append((row, size))
        self.num_rows += 1
        self.num_bytes += size
        if self.num_rows > self.max_rows or self.num_bytes > self.max_bytes:
            self._drop_excess()

    def take(self) -> dict[str, SizedRows]:
        """Returns all rows of each table, to be written. They count until `remove`."""
        taken, self._rows = self._rows, {name: deque() for name in TABLES}
        return taken

    def put_back(self, taken: dict[str, SizedRows]) -> None:
        """Returns rows that could not be written to the buffer, before the newer ones."""
        for name, rows in taken.items():
            self._rows[name].extendleft(reversed(rows))
        self._drop_excess()

    def remove(self, rows: Sequence[tuple[Row, int]]) -> None:
        """Ends the count of rows that were taken."""
        self.num_rows -= len(rows)
        self.num_bytes -= sum(size for _, size in rows)

    def _drop_excess(self) -> None:
        for name in self._droppable:
            while self._rows[name] and (self.num_rows > self.max_rows or self.num_bytes > self.max_bytes):
                self.remove([self._rows[name].popleft()])
                self.dropped[name] += 1


def first_rows(rows: SizedRows, max_rows: int, max_bytes: int) -> list[tuple[Row, int]]:
    """Removes and returns the oldest rows within the bounds, at least one if there is any."""
    chosen: list[tuple[Row, int]] = []
    num_bytes = 0
    while rows and len(chosen) < max_rows and (not chosen or num_bytes + rows[0][1] <= max_bytes):
        num_bytes += rows[0][1]
        chosen.append(rows.popleft())
    return chosen


def _keep(name: str) -> Keep:
    return TABLES[name].keep
