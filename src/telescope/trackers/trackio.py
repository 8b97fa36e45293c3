"""Writes to trackio's local database, which `trackio show` opens, or to the place that trackio's own settings name.

Gauges become trackio's system metrics, at the time of the call. Needs `pip install trackio`.
"""

from collections.abc import Mapping
from typing import Any

from telescope.trackers.base import Histogram, Report, TrackedRun


class TrackioTracker:
    """Writes into trackio's database. The name of its run ends in the run id, because trackio resumes by name."""

    def __init__(self, run: TrackedRun, report: Report) -> None:
        import trackio

        self.last_step = run.last_step
        self._run = trackio.init(
            project=run.project, name=f"{run.name}-{run.run_id}", config=run.config, resume="allow", embed=False,
            auto_log_cpu=False, auto_log_gpu=False,  # the gauges have these numbers for every machine
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float | Histogram]) -> None:
        import trackio

        made: dict[str, Any] = {
            name: value if isinstance(value, int | float) else trackio.Histogram(np_histogram=value)
            for name, value in values.items()
        }
        self._run.log(made, step=step)

    def log_gauges(self, time: float, values: Mapping[str, float]) -> None:
        self._run.log_system(dict(values))

    def log_summary(self, values: Mapping[str, float]) -> None:
        self._run.log({f"summary/{name}": value for name, value in values.items()})

    def upload(self, last: bool) -> None:
        """Copies nothing, because trackio's database cannot hold a record."""

    def finish(self) -> None:
        self._run.finish()
