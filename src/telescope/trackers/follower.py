"""Reads what a run adds to its record, for its trackers: gauges as numbers of charts, histograms, and changed files.

Runs in a thread of the process of `process`, beside the run, and only reads. A record that cannot be read costs a line
in the log, and is tried again.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from telescope.record.reader import Run
from telescope.trackers.base import TrackedRun
from telescope.trackers.changed_files import ChangedFiles
from telescope.trackers.charts import GaugeCharts, StepHistograms

CHART_SECONDS = 15.0
"""Time between two points of a gauge's chart. A gauge is recorded at least every 10 seconds."""


class RecordFollower:
    """Sends messages `gauges`, `histograms` and `files` until it is closed. `send` must not block."""

    def __init__(self, run: TrackedRun, send: Callable[[dict[str, Any]], None]) -> None:
        self._run = run
        self._send = send
        self._charts = GaugeCharts()
        self._histograms = StepHistograms()
        self._cursors: dict[str, int] = {}
        self._files = ChangedFiles(run.directory, run.uploads, run.upload_seconds)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="telescope-follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends what is left, and ends."""
        self._closing.set()
        self._thread.join()

    def _follow(self) -> None:
        chart_due = time.monotonic()
        while True:
            closing = self._closing.wait(self._run.upload_seconds)
            try:
                if closing or time.monotonic() >= chart_due:
                    chart_due = time.monotonic() + CHART_SECONDS
                    rows = self._new_rows("gauges")
                    if rows.num_rows and (values := self._charts.values(rows.to_pylist())):
                        newest = max(row for row in rows["time"].to_pylist() if row is not None)
                        self._send({"kind": "gauges", "time": newest, "values": values})
                    stats = self._new_rows("step_stats").to_pylist()
                    for step, histograms in self._histograms.take(stats, last=closing):
                        self._send({"kind": "histograms", "step": step, "histograms": histograms})
                names, sizes = self._files.due(time.monotonic(), last=closing)
                if names:
                    self._send({"kind": "files", "names": names, "sizes": sizes})
            except Exception:  # a damaged file, a disk that does not answer: the record is there later
                traceback.print_exc(file=sys.stderr)
            if closing:
                return

    def _new_rows(self, table: str) -> pa.Table:
        record = Run(self._run.directory)
        if table not in self._cursors:  # those of earlier attempts are sent already
            attempts, _ = record.rows_since(table, 0, ["attempt"])
            self._cursors[table] = sum(attempt < self._run.attempt for attempt in attempts["attempt"].to_pylist())
        rows, self._cursors[table] = record.rows_since(table, self._cursors[table])
        return rows
