"""A later attempt supersedes earlier rows from its first step on."""

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope.record.reader import cutoffs, superseded, superseded_sql


@pytest.mark.parametrize(
    ("first_steps", "expected"),
    [({1: 1, 2: 51}, {1: 51}), ({1: 1, 2: 51, 3: 21}, {1: 21, 2: 21}), ({1: 1, 2: None}, {}), ({1: 1}, {})],
    ids=["beyond a checkpoint", "going back further", "an attempt that trained nothing", "a first attempt"],
)
def test_an_attempt_supersedes_steps_of_earlier_ones_from_its_first(first_steps, expected):
    assert cutoffs(first_steps) == expected
    assert superseded_sql({}) == "false"


DATABASE = duckdb.connect()
ROWS = st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(0, 9)), max_size=20)
FIRST_STEPS = st.dictionaries(st.integers(1, 4), st.none() | st.integers(0, 9))


@settings(deadline=None, max_examples=40)
@given(ROWS, FIRST_STEPS)
def test_arrow_and_sql_hide_the_same_rows_as_the_rule(rows, first_steps):
    cut = cutoffs(first_steps)
    columns = [pa.array([row[place] for row in rows], pa.int64()) for place in (0, 1)]
    data = pa.table(columns, names=["attempt", "step"])
    expected = [
        step is not None
        and any(first is not None and later > attempt and step >= first for later, first in first_steps.items())
        and attempt in first_steps
        for attempt, step in rows
    ]
    assert superseded(data, cut).to_pylist() == expected
    DATABASE.register("data", data)
    assert [row[0] for row in DATABASE.execute(f"SELECT {superseded_sql(cut)} FROM data").fetchall()] == expected
