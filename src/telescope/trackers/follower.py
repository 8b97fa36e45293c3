"""Reads what a run adds to its record, for its trackers: gauges as numbers of charts, histograms, and changed files.

Runs in a thread of the process of `process`, beside the run, and only reads. A record that cannot be read costs a line
in the log, and is tried again.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pyarrow as pa

from telescope.record.code_snapshot import SECRETS
from telescope.record.files import FileState, record_files
from telescope.record.reader import Run
from telescope.trackers.base import Histogram, TrackedRun

CHART_SECONDS = 15.0
"""Time between two points of a gauge's chart. A gauge is recorded at least every 10 seconds."""

SECTIONS = {"host": "system", "gpu": "system", "trainer": "system", "inference": "vllm", "orchestrator": "orchestrator"}
"""Section of the charts of each component."""

LEFT_OUT = ("_bucket", "gpu_given", "engine_clock_seconds")
"""Endings of gauges that are no number to look at."""

SINCE_START = ("network_sent_bytes", "network_received_bytes")
"""Counters whose name does not end like one."""

Series = tuple[str, str, tuple[tuple[str, str | None], ...], Any, Any, Any, Any]
"""Component, name, labels, node, GPU, rank, server."""

BYTES_PER_SECOND = 2**18
"""Rate at which a growing file is sent again: one of 10 MB every 40 seconds."""

PATTERNS = {
    "code": ("code/*",),
    "logs": ("tables/logs/*",),
    "logs_detailed": ("logs/driver.log", "logs/environment*.log"),
    "logs_stdout": ("logs/trainer-*.log", "logs/inference-*.log"),
}
"""Files of each kind that a config can leave out. Other log files are never copied; everything else is `record`."""


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
                    self._send_gauges()
                    self._send_histograms(closing)
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

    def _send_histograms(self, closing: bool) -> None:
        for step, values in self._histograms.take(self._new_rows("step_stats").to_pylist(), last=closing):
            self._send({"kind": "histograms", "step": step, "values": values})

    def _send_gauges(self) -> None:
        rows = self._new_rows("gauges")
        if rows.num_rows and (values := self._charts.values(rows.to_pylist())):
            newest = max(row for row in rows["time"].to_pylist() if row is not None)
            self._send({"kind": "gauges", "time": newest, "values": values})


class GaugeCharts:
    """Turns rows of `gauges` into the numbers of charts. Keeps the last value of each counter between calls.

    A run samples hundreds of series per second: too many lines for a chart of a tracker, where the record has each of
    them. Over the rows of some seconds, and over all machines, GPUs, ranks and servers:

        a gauge        mean; with several series also name/min and name/max of their means
        a counter      growth per second, summed: `..._total` becomes `..._per_second`
        a histogram    mean of the new values: `..._sum` and `..._count` become `..._mean`
    """

    def __init__(self) -> None:
        self._last: dict[Series, tuple[float, float]] = {}

    def values(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        """Returns the numbers of new rows, by the name of their chart."""
        gauges: dict[str, dict[Series, list[float]]] = defaultdict(lambda: defaultdict(list))
        newest: dict[Series, tuple[float, float]] = {}
        for row in rows:
            name, value = row["name"], row["value"]
            if value is None or name.endswith(LEFT_OUT):
                continue
            labels = tuple(sorted(dict(row["labels"] or ()).items()))
            series = (row["component"], name, labels, row["node"], row["gpu"], row["rank"], row["server"])
            if name.endswith(("_total", "_sum", "_count", *SINCE_START)):
                newest[series] = (row["time"], value)
                self._last.setdefault(series, newest[series])
            else:
                gauges[_chart(series, name)][series].append(value)
        charts = {}
        for chart, of_series in gauges.items():
            means = [sum(each) / len(each) for each in of_series.values()]
            charts[chart] = sum(means) / len(means)
            if len(means) > 1:
                charts |= {f"{chart}/min": min(means), f"{chart}/max": max(means)}
        return charts | self._growth(newest)

    def _growth(self, newest: dict[Series, tuple[float, float]]) -> dict[str, float]:
        rates: dict[str, float] = defaultdict(float)
        sums: dict[str, float] = defaultdict(float)
        counts: dict[str, float] = defaultdict(float)
        for series, (now, value) in newest.items():
            name = series[1]
            before, earlier = self._last[series]
            self._last[series] = (now, value)
            grown = value - earlier if value >= earlier else value  # it starts from 0 with its process
            if name.endswith("_sum"):
                sums[_chart(series, name.removesuffix("_sum"))] += grown
            elif name.endswith("_count"):
                counts[_chart(series, name.removesuffix("_count"))] += grown
            elif now > before:
                rates[_chart(series, f"{name.removesuffix('_total')}_per_second")] += grown / (now - before)
        means = {f"{chart}_mean": sums[chart] / count for chart, count in counts.items() if count and chart in sums}
        return dict(rates) | means


def _chart(series: Series, name: str) -> str:
    """Returns the name of the chart: section, name without vLLM's prefix, and its labels."""
    component, _, labels, *_ = series
    texts = [value or "" for _, value in labels]
    return "/".join([SECTIONS.get(component, str(component)), name.rpartition(":")[2], *texts])


class StepHistograms:
    """Turns rows of `step_stats` into the histograms of each step. A step comes once, with all of them.

        distribution/<number>                  over all samples of the step
        distribution/<environment>/<number>    over those of an environment, in a run of several

    Keeps the rows of the newest step between calls, because more of them may come.
    """

    def __init__(self) -> None:
        self._rows: dict[int, list[Mapping[str, Any]]] = {}
        self._last_step = -1

    def take(
        self, rows: Iterable[Mapping[str, Any]], *, last: bool = False
    ) -> Iterator[tuple[int, dict[str, Histogram]]]:
        """Adds new rows, and yields the steps that are complete, in order. `last`: no more rows come."""
        for row in rows:
            # After a restart of the trainer from an earlier step, what was sent stays.
            if row["step"] > self._last_step and row["histogram"]:
                self._rows.setdefault(row["step"], []).append(row)
        for step in sorted(self._rows)[: None if last else -1]:
            self._last_step = step
            yield step, _histograms(self._rows.pop(step))


def _histograms(rows: list[Mapping[str, Any]]) -> dict[str, Histogram]:
    has_several = len({row["environment"] for row in rows} - {""}) > 1
    shown = [row for row in rows if has_several or not row["environment"]]
    names = ["/".join(filter(None, ("distribution", row["environment"], row["metric"]))) for row in shown]
    return {name: (row["histogram"], row["bin_edges"]) for name, row in zip(names, shown, strict=True)}


def kind_of(name: str) -> str | None:
    """Returns the kind of upload that a file belongs to. None: it is never copied."""
    if any(fnmatch(part, pattern) for part in Path(name).parts for pattern in SECRETS):
        return None
    found = next((kind for kind, names in PATTERNS.items() if any(fnmatch(name, each) for each in names)), None)
    return found or (None if name.startswith("logs/") else "record")


@dataclass
class _Sent:
    state: FileState
    time: float


class ChangedFiles:
    """Chooses which files of a run are copied, and when.

    unchanged         never again: most files of a record never change
    new               at once
    changed, large    at most `BYTES_PER_SECOND` of one file, so that a growing one is not sent over and over
    """

    def __init__(self, run_dir: str | Path, kinds: Collection[str], interval: float) -> None:
        self._run_dir = run_dir
        self._kinds = kinds
        self._interval = interval
        self._sent: dict[str, _Sent] = {}

    def due(self, now: float, *, last: bool = False) -> tuple[list[str], dict[str, int]]:
        """Returns changed files in order, and the sizes of all wanted files.

        `last`: also changed files whose time has not come.
        """
        names = []
        found = {name: state for name, state in record_files(self._run_dir).items() if kind_of(name) in self._kinds}
        for name, state in sorted(found.items()):
            sent = self._sent.get(name)
            if sent is not None:
                wait = max(self._interval, state.size / BYTES_PER_SECOND)
                if state == sent.state or (now - sent.time < wait and not last):
                    continue
            self._sent[name] = _Sent(state, now)
            names.append(name)
        return names, {name: state.size for name, state in found.items()}
