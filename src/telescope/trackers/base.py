"""What a tracker is: where a run's numbers go besides its record.

Trackers run in the process of `process`, each in a thread of its own: a tracker may block or raise, and its numbers are
then missing there and nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

TITLES = {"wandb": "W&B", "tensorboard": "TensorBoard", "trackio": "trackio"}
"""Names in `trackers` of the config, and how messages name them. The name is also that of the package."""

MAX_WAITING = 10_000
"""Messages that wait for the process, or for one tracker, at most. Later ones are dropped and counted."""

Histogram = tuple[Sequence[int], Sequence[float]]
"""Counts of bins, and the edges of the bins, one more."""

Report = Callable[[str, str], None]
"""Sends a message to the log of the run: level, text."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker knows of its run."""

    directory: str
    """The run directory, or a folder for the tracker's files."""
    project: str
    name: str | None = None
    run_id: str | None = None
    entity: str | None = None
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    attempt: int = 1
    started_at: float = 0.0
    """Start of the first attempt, from which the axis of gauges counts. Unix seconds."""
    last_step: int | None = None
    """Last step that earlier attempts recorded."""
    resume: str | None = None
    """`must` for a run that exists already and that somebody named, else `allow` or None."""
    wandb_mode: str = "offline"
    has_record: bool = False
    """Whether `directory` is a run directory, whose gauges and files are copied."""
    uploads: list[str] = field(default_factory=list)
    """Kinds of files that are copied, see `follower.PATTERNS`."""
    upload_seconds: float = 5.0
    """Time between two looks for changed files."""


class Tracker(Protocol):
    """One place that numbers go to. Called from one thread."""

    last_step: int
    """Last step that earlier attempts have sent, or -1. Steps up to it are left out."""

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics of a step. Evals of a step may come after later steps."""

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Adds distributions over the samples of a step. Metrics of later steps may come before them."""

    def log_gauges(self, time: float, values: Mapping[str, float]) -> None:
        """Adds numbers of the system at a Unix time."""

    def log_summary(self, values: Mapping[str, float]) -> None:
        """Sets final numbers of the run."""

    def finish(self) -> None:
        """Writes or sends what waits."""


def start_tracker(name: str, run: TrackedRun, report: Report) -> Tracker:
    """Starts a tracker. Raises whatever its package raises."""
    module = importlib.import_module(f"telescope.trackers.{name}")
    tracker: Tracker = module.start(run, report)
    return tracker
