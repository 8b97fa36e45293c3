"""A later attempt supersedes earlier rows from its first step on."""

import duckdb
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope.record.reader import cutoffs, superseded, superseded_sql


def test_the_steps_beyond_a_checkpoint_are_superseded():
    assert cutoffs({1: 1, 2: 51}) == {1: 51}


def test_going_back_further_supersedes_two_attempts():
    assert cutoffs({1: 1, 2: 51, 3: 21}) == {1: 21, 2: 21}


def test_an_attempt_that_trained_nothing_supersedes_nothing():
    assert cutoffs({1: 1, 2: None}) == {}


def test_a_first_attempt_supersedes_nothing():
    assert cutoffs({1: 1}) == {}
    assert superseded_sql({}) == "false"


DATABASE = duckdb.connect()
ROWS = st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(0, 9)), max_size=20)
FIRST_STEPS = st.dictionaries(st.integers(1, 4), st.none() | st.integers(0, 9))


@settings(deadline=None, max_examples=40)
@given(ROWS, FIRST_STEPS)
def test_arrow_and_sql_hide_the_same_rows_as_the_rule(rows, first_steps):
    cut = cutoffs(first_steps)
    data = pa.table(
        {
            "attempt": pa.array([attempt for attempt, _ in rows], pa.int64()),
            "step": pa.array([step for _, step in rows], pa.int64()),
        }
    )
    expected = [
        step is not None
        and any(first is not None and later > attempt and step >= first for later, first in first_steps.items())
        and attempt in first_steps
        for attempt, step in rows
    ]
    assert superseded(data, cut).to_pylist() == expected
    DATABASE.register("data", data)
    assert [row[0] for row in DATABASE.execute(f"SELECT {superseded_sql(cut)} FROM data").fetchall()] == expected
