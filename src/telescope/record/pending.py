"""Rows that wait for the disk: a buffer with a bound, and an order in which rows are given up.

Owns the count of rows and bytes, and what is dropped when there are too many. Does not lock, write or wait: the
recorder calls it under its lock.

Invariants: neither bound is passed by anything but rows of `Keep.ALWAYS` tables. The cheapest tables lose rows first,
and of one table the oldest. Every dropped row is counted.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice
from typing import Any

from telescope.record.tables import TABLES, Keep

Row = dict[str, Any]

_VALUE_BYTES = 60
"""A key and a small value in a dictionary, roughly."""
_ITEM_BYTES = 36
"""A number in a Python list, roughly. An array knows its size."""


_COUNTED = frozenset((int, float, bool, type(None)))
"""Types whose values need no more than their place in the row: most of them, and this runs for every row."""


def row_bytes(row: Row) -> int:
    """About how much memory a row holds. Exact for long texts, which is where memory goes."""
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
    """Rows by table, oldest first."""

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self.num_rows = 0
        self.num_bytes = 0
        self.dropped: Counter[str] = Counter()
        self._rows: dict[str, deque[tuple[Row, int]]] = {name: deque() for name in TABLES}
        self._added: Counter[str] = Counter()
        self._order = sorted((name for name in TABLES if TABLES[name].keep < Keep.ALWAYS), key=_drop_order)

    def add(self, table: str, row: Row) -> None:
        """Append a row, and drop what no longer fits."""
        size = row_bytes(row)
        self._rows[table].append((row, size))
        self._added[table] += 1
        self.num_rows += 1
        self.num_bytes += size
        if self.num_rows > self.max_rows or self.num_bytes > self.max_bytes:
            self._drop_excess()

    def cut(self) -> dict[str, int]:
        """A mark in every table: `first` with it returns nothing that is added later."""
        return dict(self._added)

    def first(self, table: str, cut: int, max_rows: int, max_bytes: int) -> list[Row]:
        """The oldest rows of a table before the mark `cut`, at least one if there is any. They stay in the buffer."""
        rows: list[Row] = []
        waiting = self._rows[table]
        before_cut = cut - (self._added[table] - len(waiting))
        total = 0
        for row, size in islice(waiting, max(0, min(before_cut, max_rows))):
            total += size
            if rows and total > max_bytes:
                break
            rows.append(row)
        return rows

    def written(self, table: str, rows: list[Row]) -> None:
        """Forget rows that `first` returned and that are on disk now."""
        # Rows that were dropped while they were being written are not lost after all.
        self.dropped[table] -= len(rows) - self._remove(table, rows)

    def give_up(self, table: str, rows: list[Row]) -> None:
        """Forget rows that `first` returned and that cannot be written; they count as dropped."""
        self.dropped[table] += self._remove(table, rows)

    def _remove(self, table: str, rows: list[Row]) -> int:
        waiting = self._rows[table]
        done = {id(row) for row in rows}
        removed = 0
        while waiting and id(waiting[0][0]) in done:
            self._pop(table)
            removed += 1
        return removed

    def _drop_excess(self) -> None:
        for name in self._order:
            while self._rows[name] and (self.num_rows > self.max_rows or self.num_bytes > self.max_bytes):
                self._pop(name)
                self.dropped[name] += 1

    def _pop(self, table: str) -> None:
        _, size = self._rows[table].popleft()
        self.num_rows -= 1
        self.num_bytes -= size


def _drop_order(name: str) -> tuple[int, str]:
    return (TABLES[name].keep, name)
