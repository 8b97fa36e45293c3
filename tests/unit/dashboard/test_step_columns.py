"""The columns of step metrics, whatever steps record which of them."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from telescope.dashboard import steps
from telescope.dashboard.steps import StepColumns

METRICS = ("loss", "entropy", "sample_metrics/wordle/correct/mean")
Recorded = list[dict[str, float]]

STEPS = st.lists(st.dictionaries(st.sampled_from(METRICS), st.integers(-9, 9).map(float)), min_size=1, max_size=24)


def table(first: int, recorded: Recorded) -> pa.Table:
    numbers = range(first, first + len(recorded))
    times = [float(number) for number in numbers]
    metrics = pa.array([list(row.items()) for row in recorded], pa.map_(pa.string(), pa.float64()))
    columns = {"started_at": times, "ended_at": times, "num_tokens_trained": [1] * len(recorded), "metrics": metrics}
    return pa.table({"attempt": [0] * len(recorded), "step": list(numbers), **columns})


def store_of(rows: pa.Table) -> Any:
    run = SimpleNamespace(rows_since=lambda name, cursor, columns: (rows, cursor + rows.num_rows))
    return SimpleNamespace(run=run, refresh=lambda name: {name: 0})


@given(recorded=STEPS, cuts=st.sets(st.integers(1, 23)), since=st.integers(0, 30))
def test_a_metric_may_begin_stop_and_return_at_any_step(recorded: Recorded, cuts: set[int], since: int) -> None:
    """A live run is read in pieces, an ended one at once; a page asks for all rows, or for those that are new."""
    columns = StepColumns()
    edges = [0, *sorted(cut for cut in cuts if cut < len(recorded)), len(recorded)]
    small, steps.FIRST_CAPACITY = steps.FIRST_CAPACITY, 2
    try:
        for first, end in pairwise(edges):
            columns.read(store_of(table(first, recorded[first:end])))
    finally:
        steps.FIRST_CAPACITY = small
    shown, metrics = columns.visible(since, {})
    assert shown["step"] == list(range(min(since, len(recorded)), len(recorded)))
    assert set(metrics) == {name for row in recorded for name in row}
    for name, values in metrics.items():
        np.testing.assert_array_equal(values, [row.get(name, np.nan) for row in recorded[since:]])
