"""Defines a tracker: a service that receives a run's numbers besides its record."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

TITLES = {"wandb": "W&B", "tensorboard": "TensorBoard", "trackio": "trackio"}
"""Names of trackers in the config, which are also their packages, and the titles that messages use."""

Histogram = tuple[Sequence[int], Sequence[float]]
"""Counts of bins, and the edges of the bins (one more)."""

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
    """`must` if a person named the run, else `allow`."""
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
    `log_gauges` adds system numbers at a Unix time, and `log_summary` sets final numbers. `upload` copies files that
    have changed; the last call also copies delayed files. `finish` writes or sends all pending data.
    """

    last_step: int
    """Last step that earlier attempts have sent, or -1. Steps up to it are left out."""

    def log(self, step: int, values: Mapping[str, float | Histogram]) -> None: ...

    def log_gauges(self, time: float, values: Mapping[str, float]) -> None: ...

    def log_summary(self, values: Mapping[str, float]) -> None: ...

    def upload(self, last: bool) -> None: ...

    def finish(self) -> None: ...
