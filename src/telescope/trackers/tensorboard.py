"""Writes event files for TensorBoard to `RUN_DIR/tensorboard`. `tensorboard --logdir runs` shows them.

Step metrics have the step as their axis, gauges the seconds since the run started. Needs `pip install tensorboard`, but
not torch or TensorFlow.
"""

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from telescope.trackers.base import Histogram, Report, TrackedRun

FOLDER = "tensorboard"


class TensorboardTracker:
    """Writes a new event file beside the files of earlier attempts, which TensorBoard shows as one run."""

    def __init__(self, run: TrackedRun, report: Report) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.last_step = run.last_step
        self._started_at = run.started_at
        self._writer = EventFileWriter(f"{run.directory}/{FOLDER}")
        text = "\n".join(f"    {name}: {json.dumps(value)}" for name, value in run.config.items())  # a Markdown block
        self._write(0, time.time(), {}, text_pb("config", text).value)

    def log(self, step: int, values: Mapping[str, float | Histogram]) -> None:
        self._write(step, time.time(), values)

    def log_gauges(self, time: float, values: Mapping[str, float]) -> None:
        self._write(int(time - self._started_at), time, values)

    def log_summary(self, values: Mapping[str, float]) -> None:
        self.log(0, {f"summary/{name}": value for name, value in values.items()})

    def upload(self, last: bool) -> None:
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()

    def _write(
        self, step: int, wall_time: float, values: Mapping[str, float | Histogram], texts: Iterable[Any] = ()
    ) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

        summaries = list(texts)
        for name, value in values.items():
            if isinstance(value, int | float):
                summaries.append(Summary.Value(tag=name, simple_value=value))
                continue
            counts, edges = value
            bins = HistogramProto(bucket=counts, bucket_limit=edges[1:], min=edges[0], max=edges[-1], num=sum(counts))
            summaries.append(Summary.Value(tag=name, histo=bins))
        self._writer.add_event(Event(wall_time=wall_time, step=step, summary=Summary(value=summaries)))
