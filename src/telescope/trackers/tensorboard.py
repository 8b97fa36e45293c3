"""TensorBoard: event files in `RUN_DIR/tensorboard`. `tensorboard --logdir runs` shows them.

The axis of step metrics is the step; that of gauges is seconds since the run started. Needs `pip install tensorboard`,
but not torch or TensorFlow.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from telescope.trackers.base import Histogram, Report, TrackedRun

FOLDER = "tensorboard"


def start(run: TrackedRun, report: Report) -> TensorBoardTracker:
    """Opens a new event file. Those of earlier attempts are beside it, and TensorBoard shows them as one run."""
    return TensorBoardTracker(run)


class TensorBoardTracker:
    """Writes scalars, histograms, and the config as text."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.last_step = -1 if run.last_step is None else run.last_step
        self._started_at = run.started_at
        self._writer = EventFileWriter(f"{run.directory}/{FOLDER}")
        text = "\n".join(f"    {name}: {json.dumps(value)}" for name, value in run.config.items())  # a Markdown block
        self._write(text_pb("config", text), 0, time.time())

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one event with all metrics."""
        self._write(_scalars(metrics), step, time.time())
        self._writer.flush()

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Writes one event with all distributions of a step."""
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

        values = []
        for name, (counts, edges) in histograms.items():
            bins = {"bucket": counts, "bucket_limit": edges[1:], "min": edges[0], "max": edges[-1], "num": sum(counts)}
            values.append(Summary.Value(tag=name, histo=HistogramProto(**bins)))
        self._write(Summary(value=values), step, time.time())

    def log_gauges(self, time: float, values: Mapping[str, float]) -> None:
        """Writes one event with all gauges."""
        self._write(_scalars(values), int(time - self._started_at), time)

    def log_summary(self, values: Mapping[str, float]) -> None:
        """Writes the numbers below `summary/`."""
        self._write(_scalars({f"summary/{name}": value for name, value in values.items()}), 0, time.time())

    def finish(self) -> None:
        """Writes what waits, and closes the file."""
        self._writer.close()

    def _write(self, summary: object, step: int, wall_time: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=wall_time, step=step, summary=summary))


def _scalars(values: Mapping[str, float]) -> object:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
