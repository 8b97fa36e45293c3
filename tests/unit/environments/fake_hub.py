"""A stand-in for `datasets.load_dataset`, for tests of what becomes of its rows.

How the real package reads a hub is in tests/integration/environments/test_environments_from_the_hub.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest


class FakeDatasets:
    """Acts as the module `datasets`. `requested` keeps name, subset and split of each call."""

    def __init__(self, rows: Callable[[str, str | None, str], list[dict[str, Any]]] | Exception) -> None:
        self.rows = rows
        self.requested: list[tuple[str, str | None, str]] = []

    def load_dataset(self, name: str, subset: str | None, *, split: str) -> FakeDataset:
        self.requested.append((name, subset, split))
        if isinstance(self.rows, Exception):
            raise self.rows
        return FakeDataset(pa.Table.from_pylist(self.rows(name, subset, split)))


class FakeDataset:
    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def with_format(self, name: str) -> FakeDataset:
        assert name == "arrow"
        return self

    def __getitem__(self, rows: slice) -> pa.Table:
        assert rows == slice(None)
        return self.table


def serve_rows(
    monkeypatch: pytest.MonkeyPatch, rows: Callable[[str, str | None, str], list[dict[str, Any]]] | Exception
) -> FakeDatasets:
    """Answers `load_dataset` with `rows(name, subset, split)`, or raises."""
    fake = FakeDatasets(rows)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return fake
