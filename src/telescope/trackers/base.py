"""Defines a tracker: a service that receives a run's numbers besides its record."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

TITLES = {"wandb": "W&B", "tensorboard": "TensorBoard", "trackio": "trackio"}
"""Names in `trackers` of the config, and how messages name them. The name is also that of the package."""

Histogram = tuple[Sequence[int], Sequence[float]]
"""Counts of bins, and the edges of the bins, one more."""

Report = Callable[[str, str], None]
"""Sends a message to the log of the run: level, text."""


@dataclass(frozen=True)
class TrackedRun:
    """Describes a run to its trackers, besides the record."""

    trackers: list[str]
    directory: str
    """The run directory, or a folder for the trackers' files."""
    project: str
    run_id: str
    resume: str
    """`must` for a run that somebody named, else `allow`."""
    wandb_mode: str
    interval: float
    """Seconds between two reads of the record."""
    name: str | None = None
    entity: str | None = None
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    attempt: int = 1
    started_at: float = 0.0
    """Start of the first attempt, from which the axis of gauges counts."""
    last_step: int = -1
    """Last step that earlier attempts recorded."""
    uploads: list[str] = field(default_factory=list)
    """Kinds of files that are copied, see `wandb_files.PATTERNS`."""
    record: str = ""
    """Folder of the record, if only evals are copied (`telescope eval`)."""
    evals: dict[str, str] = field(default_factory=dict)
    """Ids and names of those evals."""


class Tracker(Protocol):
    """Receives the numbers of a run. Called from one thread. Any method may block or raise.

    `log` adds numbers and distributions of a step. Evals and distributions of a step may come after later steps.
    `log_gauges` adds numbers of the system at a Unix time, `log_summary` sets final ones. `upload` copies files that
    have changed, at the end also those that were to wait. `finish` writes or sends what waits.
    """

    last_step: int
    """Last step that earlier attempts have sent, or -1. Steps up to it are left out."""

    def log(self, step: int, values: Mapping[str, float | Histogram]) -> None: ...

    def log_gauges(self, time: float, values: Mapping[str, float]) -> None: ...

    def log_summary(self, values: Mapping[str, float]) -> None: ...

    def upload(self, last: bool) -> None: ...

    def finish(self) -> None: ...
