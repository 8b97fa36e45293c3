"""Writes the runs that `benchmarks/dashboard.py` measures.

The first steps are generated, as `telescope ui --demo` does it. A longer run repeats them with other steps, times and
ids, because generating a million samples takes many minutes.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from telescope.record.reader import Run
from telescope.record.table_files import TableFile
from telescope.record.table_writer import write_block
from telescope.record.tables import TABLES
from telescope.testing.demo_run.curves import Story
from telescope.testing.demo_run.steps import GROUP_SIZE
from telescope.testing.demo_run.writer import RunWriter

GAUGE_SECONDS = 5.0
"""Time between two readings of all gauges."""

MOST_GENERATED = 1000
"""Steps that are generated."""

GROUP_IDS = 10**7
"""Distance of the group ids of two repetitions."""

STEPS = ("step", "version", "start_version", "end_version")
TIMES = ("time", "start", "end", "started_at", "ended_at", "opened_at", "generated_at", "finished_at")
IDS = ("sample_id", "eval_id")
ONCE = ("runs", "attempts", "environments", "alerts")
"""Tables that do not grow with the steps."""


def write_run(run_dir: Path, num_steps: int, num_samples: int) -> None:
    """Writes a finished run with that many trained samples in each step, and those of discarded groups.

    More than `MOST_GENERATED` steps must be a multiple of it.
    """
    generated = min(num_steps, MOST_GENERATED)
    if num_steps % generated:
        raise ValueError(f"{num_steps} steps are no multiple of {MOST_GENERATED}")
    with RunWriter(run_dir, Story(), num_steps=num_steps, num_groups=num_samples // GROUP_SIZE) as writer:
        for number in range(generated):
            writer.write_step(number)
        writer.write_gauges(generated, GAUGE_SECONDS)
        seconds = writer.now - writer.origin
        writer.now += (num_steps // generated - 1) * seconds
        writer.end()
    for name in sorted(TABLES.keys() - set(ONCE)):
        repeat(Run(run_dir), name, num_steps // generated, generated, seconds)


def repeat(run: Run, name: str, times: int, num_steps: int, seconds: float) -> None:
    """Appends the rows of a table again, each time `num_steps` steps and `seconds` later."""
    files, num_rows = run.table_files(name), run.num_rows(name)
    for number in range(1, times):
        for file in files:
            rows = pq.read_table(file.path) if file.rows is None else file.rows
            first = file.first + number * num_rows
            later = TableFile(file.path, first, first + rows.num_rows, shift(rows, number, num_steps, seconds))
            write_block(TABLES[name], run.files.table(name), [later])


def shift(rows: pa.Table, number: int, num_steps: int, seconds: float) -> pa.Table:
    """Returns rows with the steps, times and ids of a repetition."""
    for place, name in enumerate(rows.column_names):
        column = rows[name]
        if name in STEPS:
            column = pc.add(column, number * num_steps)
        elif name in TIMES:
            column = pc.add(column, number * seconds)
        elif name in IDS:
            column = pc.binary_join_element_wise(f"{number}x", column, "")
        elif name == "group_id":
            of_evals = pc.less(column, 0)
            column = pc.add(column, pc.if_else(of_evals, -number * GROUP_IDS, number * GROUP_IDS))
        else:
            continue
        rows = rows.set_column(place, name, column.cast(rows.schema.field(name).type))
    return rows
