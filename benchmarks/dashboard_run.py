"""Writes the runs that `benchmarks/dashboard.py` measures: the recording of `telescope ui --demo`, repeated.

Groups of samples are repeated within each step, and then all steps with other steps, times and ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as pq

from telescope.record.reader import Run
from telescope.record.table_files import TableFile
from telescope.record.table_writer import write_block
from telescope.record.tables import ROLLOUT_TABLES, TABLES
from telescope.testing.replay import ONCE, Replay, shift

SAMPLE_TABLES = {*ROLLOUT_TABLES, "spans"} - {"prompts"}
"""Tables that grow with the samples of a step."""

FIXED_TABLES = {*ONCE, "environments", "alerts", "prompts"}
"""Tables that do not grow with the steps."""

MAX_COPIES_IN_STEP = 100
"""Copies within a step have numbers below this, later steps multiples of it, so that ids differ."""

Copy = tuple[int, int, float]
"""The number of a copy, and how many steps and seconds later it is."""


def write_run(run_dir: Path, num_steps: int, num_samples: int) -> None:
    """Writes a finished run of copies of the recording: about `num_steps` steps, each of `num_samples` samples."""
    with Replay(run_dir) as replay:
        replay.write_all()
    recorded, seconds = replay.num_recorded, replay.step_end(replay.num_recorded - 1) - replay.origin
    kept = Run(run_dir).sql("select count(*) / count(distinct step) from samples where status = 'kept'").rows[0][0]
    within = [(copy, 0, 0.0) for copy in range(1, round(num_samples / kept))]
    if len(within) >= MAX_COPIES_IN_STEP:
        raise ValueError(f"{num_samples} samples a step are more than {MAX_COPIES_IN_STEP} copies of the recording")
    later = [
        (times * MAX_COPIES_IN_STEP, times * recorded, times * seconds) for times in range(1, -(-num_steps // recorded))
    ]
    for name in sorted(SAMPLE_TABLES):
        repeat(Run(run_dir), name, within)
    for name in sorted(TABLES.keys() - FIXED_TABLES):
        repeat(Run(run_dir), name, later)


def repeat(run: Run, name: str, copies: Iterable[Copy]) -> None:
    """Appends copies of all rows of a table."""
    files, num_rows = run.table_files(name), run.num_rows(name)
    for place, (copy, steps, seconds) in enumerate(copies, 1):
        for file in files:
            rows = pq.read_table(file.path) if file.rows is None else file.rows
            first = file.first + place * num_rows
            shifted = TableFile(file.path, first, first + rows.num_rows, shift(rows, steps, seconds, copy))
            write_block(TABLES[name], run.files.table(name), [shifted])
