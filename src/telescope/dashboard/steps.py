"""Keeps the steps of a run as columns that grow with the run.

Owns the columns of step metrics, and sample statistics for their charts: `std`, `min`, `max` and `gini` of each sample
metric and of each environment's reward, from `step_stats`. A row is read and converted once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from telescope.dashboard.tables import RunTables

Array = np.ndarray[Any, Any]

NAMES = ("attempt", "step", "started_at", "ended_at", "num_tokens_trained")
STATISTICS = ("std", "min", "max", "gini")
FIRST_CAPACITY = 256

NUM_DIGITS = 9
"""Significant digits of metrics, more than a page shows; all 17 would double the responses. Integers keep all."""


class StepColumns:
    """Columns over all rows of `steps`. Call it under the lock of its store."""

    def __init__(self) -> None:
        self.num_rows = 0
        """Number of rows in the columns, including superseded rows. Lost files have none."""
        self._cursor = 0
        self._stats_cursor = 0
        self._num_stats = 0
        self._pending = False
        self._places: dict[tuple[int, int], int] = {}
        self._columns: dict[str, Array] = {}
        self._metrics: dict[str, Array] = {}
        self._not_finite: set[str] = set()

    def read(self, store: RunTables) -> None:
        """Adds new rows of the record."""
        data, self._cursor = store.run.rows_since("steps", self._cursor, [*NAMES, "metrics"])
        first, self.num_rows = self.num_rows, self.num_rows + data.num_rows
        rows = np.arange(first, self.num_rows)
        for name in NAMES:
            _put(self._columns, name, rows, data[name].to_numpy().astype(float))
        for name, values in metric_columns(data["metrics"]).items():
            _put(self._metrics, name, rows, values)
            if np.isinf(values).any():
                self._not_finite.add(name)
        self._places |= zip(zip(*(data[name].to_pylist() for name in NAMES[:2]), strict=True), rows, strict=True)
        self._add_statistics(store)

    def visible(self, since: int, cutoffs: Mapping[int, int]) -> tuple[dict[str, list[Any]], StepMetrics]:
        """Returns columns and metrics of the rows from `since` on, without superseded rows."""
        rows = np.arange(min(since, self.num_rows), self.num_rows)
        columns = {name: self._columns.get(name, np.empty(0))[rows] for name in NAMES}
        hidden = np.zeros(len(rows), dtype=bool)
        for attempt, first in cutoffs.items():
            hidden |= (columns["attempt"] == attempt) & (columns["step"] >= first)
        shown: dict[str, list[Any]] = {
            name: [None if math.isnan(x) else x for x in values[~hidden]] for name, values in columns.items()
        }
        whole = {name: [int(x) for x in shown[name]] for name in ("attempt", "step")}
        return shown | whole, StepMetrics(dict(self._metrics), rows[~hidden], frozenset(self._not_finite))

    def _add_statistics(self, store: RunTables) -> None:
        """Adds statistics of samples. The record has a step's statistics before its row, by at most one flush."""
        (num_rows,) = store.refresh("step_stats").values()
        if num_rows == self._num_stats and not self._pending:
            return
        self._num_stats = num_rows
        found = store.columns(
            f"SELECT rowid, attempt, step, {', '.join(STATISTICS)}, "
            "CASE WHEN metric = 'reward' THEN 'reward/' || environment "
            "ELSE replace(metric, 'sample_metrics/', 'sample_metrics/' || environment || '/') END AS name "
            "FROM step_stats WHERE rowid >= $cursor AND environment <> '' "
            "AND (metric = 'reward' OR starts_with(metric, 'sample_metrics/')) ORDER BY rowid",
            {"cursor": self._stats_cursor},
        )
        if not found.num_rows:
            return
        steps = list(zip(found["attempt"].to_pylist(), found["step"].to_pylist(), strict=True))
        rows = np.array([self._places.get(step, -1) for step in steps])
        numbers = found["rowid"].to_numpy()
        # An earlier step without a row will not get one, because its attempt was killed.
        newest = max(self._places, default=(0, -1))
        later = numbers[[row < 0 and step > newest for row, step in zip(rows, steps, strict=True)]]
        self._pending = len(later) > 0
        self._stats_cursor = int(later[0] if self._pending else numbers[-1] + 1)
        names = found["name"].combine_chunks().dictionary_encode()
        for index, name in enumerate(names.dictionary.to_pylist()):
            chosen = (names.indices.to_numpy() == index) & (rows >= 0)
            # If there is one environment, its reward is reward/total.
            if name in self._metrics or f"{name}/mean" in self._metrics:
                for statistic in STATISTICS:
                    values = found[statistic].to_numpy().astype(float)[chosen]
                    _put(self._metrics, f"{name}/{statistic}", rows[chosen], values)


class StepMetrics(Mapping[str, list[float]]):
    """Columns of some rows, NaN where a value is missing. A column is converted when it is used.

    `not_finite` names the columns in which a row of the run has infinity, which also replaces a recorded NaN.
    """

    def __init__(self, columns: dict[str, Array], rows: Array, not_finite: frozenset[str]) -> None:
        self._columns = columns
        self._rows = rows
        self.not_finite = not_finite

    def __getitem__(self, name: str) -> list[float]:
        column = self._columns[name]
        values = np.full(len(self._rows), np.nan)  # a metric that is no longer recorded has a shorter column
        known = self._rows < len(column)
        values[known] = column[self._rows[known]]
        return cast("list[float]", rounded(values).tolist())

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def rounded(values: Array) -> Array:
    """Returns numbers with `NUM_DIGITS` significant digits."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        decimals = NUM_DIGITS - 1 - np.floor(np.log10(np.abs(values)))
        scale = 10.0**decimals
        shorter = np.rint(values * scale) / scale
    return np.where((values == np.rint(values)) | ~np.isfinite(shorter), values, shorter)


def metric_columns(metrics: pa.ChunkedArray) -> dict[str, Array]:
    """Returns a column for each metric of a map column, with NaN for missing values and infinity for NaN."""
    if len(metrics) == 0:
        return {}
    whole = pa.concat_arrays(metrics.chunks)
    offsets = whole.offsets.to_numpy()
    rows = np.repeat(np.arange(len(whole)), np.diff(offsets))
    flat = slice(int(offsets[0]), int(offsets[-1]))
    keys = whole.keys[flat].dictionary_encode()
    items = whole.items[flat].to_numpy(zero_copy_only=False).astype(float)
    table = np.full((len(keys.dictionary), len(whole)), np.nan)
    table[keys.indices.to_numpy(), rows] = np.where(np.isnan(items), np.inf, items)
    return dict(zip(keys.dictionary.to_pylist(), table, strict=True))


def _put(columns: dict[str, Array], name: str, rows: Array, values: Array) -> None:
    """Writes values into a column, whose length doubles when it is full."""
    if not len(rows):
        return
    column = columns.get(name, np.empty(0))
    if len(column) <= rows[-1]:
        room = np.full(max(FIRST_CAPACITY, 2 * (int(rows[-1]) + 1)) - len(column), np.nan)
        columns[name] = column = np.concatenate([column, room])
    column[rows] = values
