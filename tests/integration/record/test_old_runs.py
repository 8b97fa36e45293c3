"""A run directory that an earlier version wrote: `old_run`, two attempts with a value in every column."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from telescope.record.reader import Run, list_runs
from telescope.record.tables import TABLES

OLD_RUN = Path(__file__).parent / "old_run"
LATER = {"evals", "eval_samples", "step_stats", "tool_calls", "info", "tokens", "alerts", "nodes", "prompts"}
"""Tables that did not exist then."""
FORMER = {"turns": {"token_ids", "logprobs", "versions"}}
"""Columns that are no longer written. SQL reads them."""


def test_an_old_run_is_listed():
    (summary,) = list_runs(OLD_RUN)
    assert (summary.name, summary.status, summary.attempt, summary.steps) == ("old", "finished", 2, 4)
    assert (summary.duration, summary.heldout_before, summary.heldout_after) == (600.0, 0.25, 0.75)


@pytest.mark.parametrize("name", sorted(LATER))
def test_a_table_that_an_old_run_lacks_is_empty(name):
    assert Run(OLD_RUN).table(name, all_attempts=True).num_rows == 0


@pytest.mark.parametrize("name", sorted(TABLES.keys() - LATER))
def test_every_column_of_an_old_table_is_read_and_queried(name):
    run = Run(OLD_RUN)
    (path,) = run.files.table(name).glob("*.parquet")
    stored = pq.read_table(path).schema
    data = run.table(name, all_attempts=True)
    current = [column for column in stored if column.name not in FORMER.get(name, ())]
    assert {column.name for column in current} <= set(data.column_names), "a column was renamed or removed"
    assert all(data.schema.field(column.name).type == column.type for column in current)
    assert all(data[column.name].null_count == 0 for column in current)
    assert data.num_rows == {"runs": 1, "attempts": 2}.get(name, 5)
    quoted = ", ".join(f'"{column}"' for column in stored.names)
    assert run.sql(f"SELECT {quoted} FROM {name}").rows


def test_steps_that_a_resume_replaced_are_hidden_in_an_old_run():
    run = Run(OLD_RUN)
    steps = run.sql("SELECT attempt, step, metrics['metrics'] FROM steps ORDER BY step").rows
    assert steps == [(1, 0, 0.5), (1, 1, 1.5), (2, 2, 2.5), (2, 3, 3.5)]
    assert [row["attempt"] for row in run.table("turns").to_pylist()] == [1, 1, 2, 2]
    assert len(run.unreadable) == 0
