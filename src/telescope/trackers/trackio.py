"""trackio: a local database that `trackio show` opens, or what trackio's own settings name.

Gauges are trackio's system metrics, over time. Needs `pip install trackio`.
"""

from __future__ import annotations

from collections.abc import Mapping

from telescope.trackers.base import Histogram, Report, TrackedRun


def start(run: TrackedRun, report: Report) -> TrackioTracker:
    """Opens the run, which all attempts share."""
    return TrackioTracker(run)


class TrackioTracker:
    """Writes into trackio's database. The name of its run ends in the run id, because trackio resumes by name."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self.last_step = -1 if run.last_step is None else run.last_step
        self._run = trackio.init(
            project=run.project,
            name="-".join(filter(None, (run.name, run.run_id))) or None,
            config=run.config,
            resume="allow",
            embed=False,
            auto_log_cpu=False,  # the gauges have it, of every machine
            auto_log_gpu=False,
        )

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics at this step."""
        self._run.log(dict(metrics), step=step)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Logs the distributions at this step."""
        import trackio

        self._run.log({name: trackio.Histogram(np_histogram=bins) for name, bins in histograms.items()}, step=step)

    def log_gauges(self, time: float, values: Mapping[str, float]) -> None:
        """Logs the gauges as system metrics, at the time of the call."""
        self._run.log_system(dict(values))

    def log_summary(self, values: Mapping[str, float]) -> None:
        """Logs the numbers below `summary/`, after the last step."""
        self._run.log({f"summary/{name}": value for name, value in values.items()})

    def finish(self) -> None:
        """Writes what waits."""
        self._run.finish()
