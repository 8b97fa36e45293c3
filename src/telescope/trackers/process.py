"""Copies the record of a run to its trackers, in a process of its own with one thread per tracker.

`launch` starts it. It ends when stdin closes, because the record is complete or the driver has exited.

Invariants: output of trackers goes to stderr, which is a log file. Stdout has only messages for the user. A tracker
that blocks or fails loses only its own numbers. Nothing is queued in memory: a slow tracker reads the record later.
"""

import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from telescope.record.reader import Run, eval_names, superseded
from telescope.trackers.base import TITLES, Report, TrackedRun, Tracker
from telescope.trackers.charts import GaugeCharts, StepHistograms

FINISH_SECONDS = 300.0
"""Longest time for the last uploads after stdin closed."""

CHART_SECONDS = 15.0
"""Time between two points of a gauge's chart. A gauge is recorded at least every 10 seconds."""

EVAL_NUMBERS = ("accuracy", "accuracy_low", "accuracy_high", "gain", "gain_low", "gain_high")
"""Columns of an eval that are sent besides its metrics."""


def main() -> int:
    """Copies until stdin closes. Returns the exit status."""
    out = os.dup(1)
    os.dup2(2, 1)  # output of this process and its child processes goes to stderr
    if not (first := sys.stdin.buffer.readline()):
        return 0
    run = TrackedRun(**json.loads(first))
    if run.attempt > 1:
        rows = Run(run.directory).rows_since("steps", 0, ["attempt", "step"])[0].to_pylist()
        run = replace(run, last_step=max((row["step"] for row in rows if row["attempt"] < run.attempt), default=-1))

    def report(level: str, message: str) -> None:
        with suppress(BrokenPipeError):  # the driver was killed, and the trackers still get its last rows
            os.write(out, f"{level} {' '.join(message.split())}\n".encode(errors="replace"))

    ended = threading.Event()
    threads = [threading.Thread(target=_copy, args=(name, run, report, ended), daemon=True) for name in run.trackers]
    for thread in threads:
        thread.start()
    sys.stdin.buffer.read()
    ended.set()
    deadline = time.monotonic() + FINISH_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        os._exit(1)
    return 0


def _copy(name: str, run: TrackedRun, report: Report, ended: threading.Event) -> None:
    """Copies the record to one tracker until the end. Reports the first failure and continues."""
    has_failed = False

    def attempt(call: Callable[[], Any]) -> Any:
        nonlocal has_failed
        try:
            return call()
        except Exception as error:  # whatever a tracker's package raises
            traceback.print_exc(file=sys.stderr)
            if not has_failed:
                problem = f"{TITLES[name]} failed: {str(error) or repr(error)}"
                report("WARNING", f"{problem}. The run continues; see logs/trackers.log.")
            has_failed = True

    def start() -> Any:
        return getattr(importlib.import_module(f"telescope.trackers.{name}"), f"{name.title()}Tracker")(run, report)

    tracker: Tracker | None = attempt(start)
    if tracker is None:
        return
    follower = RecordFollower(run, tracker.last_step)
    last = False
    while not last:
        last = ended.wait(run.interval)
        try:
            for method, *values in follower.take(last=last):
                attempt(partial(getattr(tracker, method), *values))
        except Exception as error:  # a damaged file or a slow disk; the record is read again later
            traceback.print_exc(file=sys.stderr)
            if last:
                problem = f"{TITLES[name]} lacks the newest numbers, because the record cannot be read: {error!r}"
                report("WARNING", f"{problem}. See logs/trackers.log.")
        attempt(partial(tracker.upload, last))
    attempt(tracker.finish)


class RecordFollower:
    """Reads a record for one tracker, which already has the steps up to `last_step`."""

    def __init__(self, run: TrackedRun, last_step: int) -> None:
        self._run = run
        self._record = Run(run.record or run.directory)
        self._first_step = last_step + 1
        self._last_step = last_step
        self._charts = GaugeCharts()
        self._chart_due = 0.0
        self._histograms = StepHistograms(last_step)
        self._cursors: dict[str, int] = {}

    def take(self, *, last: bool) -> Iterator[tuple[Any, ...]]:
        """Yields calls of a tracker as method and arguments. With `last`, the record is complete."""
        if self._run.record:
            yield from self._evals()
            return
        cut = self._record.cutoffs()
        # The first step whose rows this attempt replaces is known only after the attempt has started.
        if self._run.attempt == 1 or self._run.attempt - 1 in cut:
            for row in self._step_rows("steps", cut):
                if row["step"] > self._last_step:  # the trainer may restart from an earlier step
                    self._last_step = row["step"]
                    yield "log", row["step"], dict(row["metrics"] or ())
            for step, histograms in self._histograms.take(self._step_rows("step_stats", cut), last=last):
                yield "log", step, histograms
        yield from self._evals()
        if last or time.monotonic() >= self._chart_due:
            self._chart_due = time.monotonic() + CHART_SECONDS
            gauges = self._of_attempt("gauges")
            if gauges.num_rows and (values := self._charts.values(gauges.to_pylist())):
                yield "log_gauges", pc.max(gauges["time"]).as_py(), values
        if last:
            numbers = {name: value for name, value in self._record.result.items() if isinstance(value, int | float)}
            yield "log_summary", numbers

    def _evals(self) -> Iterator[tuple[Any, ...]]:
        named = eval_names(self._run.config)
        for row in (self._new("evals") if self._run.record else self._of_attempt("evals")).to_pylist():
            name = self._run.evals.get(row["eval_id"]) if self._run.record else named(row["name"], row["number"])
            if name is None or row["status"] != "finished":
                continue
            numbers = {
                "failed": row["num_items"] * row["num_completions"] - row["num_scored"],
                "seconds": row["ended_at"] - row["started_at"],
                **dict(row["metrics"] or ()),
                **{number: row[number] for number in EVAL_NUMBERS if row[number] is not None},
            }
            yield "log", row["step"], {f"eval/{name}/{key}": value for key, value in numbers.items()}

    def _step_rows(self, table: str, cut: dict[int, int]) -> list[dict[str, Any]]:
        rows = self._new(table)
        # Filtered as Arrow: as Python objects, the sent steps of a long run take gigabytes.
        rows = rows.filter(pc.greater_equal(rows["step"], self._first_step))
        return rows.filter(pc.invert(superseded(rows, cut))).to_pylist()

    def _of_attempt(self, table: str) -> pa.Table:
        """Returns new rows of this and later attempts, because earlier attempts have sent theirs."""
        if table not in self._cursors:
            attempts = self._record.rows_since(table, 0, ["attempt"])[0]["attempt"]
            self._cursors[table] = pc.sum(pc.less(attempts, self._run.attempt)).as_py() or 0
        return self._new(table)

    def _new(self, table: str) -> pa.Table:
        rows, self._cursors[table] = self._record.rows_since(table, self._cursors.get(table, 0))
        return rows


if __name__ == "__main__":
    sys.exit(main())
