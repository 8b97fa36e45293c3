"""Messages between the driver and a rollout worker.

The driver sends `Orders` and gets a `Report` back in the same call, however many rollouts run. All messages are plain
data that can cross processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from telescope.environments.types import PreparedPrompt
from telescope.errors import InfrastructureError
from telescope.rollout.sample import RolloutSettings, RolloutTask
from telescope.rollout.sample_rows import Encoded
from telescope.rollout.sandbox_rows import SandboxNews
from telescope.rollout.trajectory import Trajectory


class WorkerLost(InfrastructureError):
    """A rollout worker has exited, or does not respond."""


TRAINING = ""
"""The lane of a run's training rollouts. Each eval has a separate lane."""


@dataclass(slots=True)
class GroupTask:
    """The samples of one prompt. They share a server, which computes the prompt once. `key` is unique in the run."""

    key: int
    samples: dict[int, RolloutTask]
    """Samples by index in the group. A group whose worker was lost continues with its unfinished samples."""
    settings: RolloutSettings
    lane: str = TRAINING


@dataclass(slots=True)
class RunningSample:
    """The last reported state of a running sample.

    `oldest_version` is the policy version of its oldest trained token, or of its server when its first request was
    sent. `server` is -1 until it has a request slot.
    """

    server: int = -1
    slot: int = -1
    started_at: float = 0.0
    oldest_version: int | None = None
    num_tokens: int = 0
    """Tokens sampled for it in this worker, without its running request."""


@dataclass(slots=True)
class Orders:
    """Orders for a worker, applied in the order of the fields."""

    lanes: dict[str, list[int] | None] = field(default_factory=dict)
    """Request slots of each server in a lane, which is opened if it is new. None ends a lane."""
    servers: dict[tuple[str, int], bool] = field(default_factory=dict)
    """Whether a server serves a lane."""
    prompts: list[tuple[int, str, int]] = field(default_factory=list)
    """Prompts to render: number for the reply, environment key, item."""
    groups: list[GroupTask] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    """Keys of the groups to cancel."""

    @property
    def is_empty(self) -> bool:
        return not (self.lanes or self.servers or self.prompts or self.groups or self.cancelled)


@dataclass(slots=True)
class LaneState:
    """The request slots of one lane in one worker."""

    used: list[int]
    """Slots in use, by server."""
    num_free: int
    """Free slots on servers that are up."""


@dataclass(slots=True)
class Report:
    """The events in a worker since its last report."""

    samples: list[tuple[int, int, Trajectory | BaseException]] = field(default_factory=list)
    """Ended samples: key of the group, index of the sample in it, and the sample or an error of the run."""
    rows: Encoded = field(default_factory=dict)
    """Rows of the ended samples for the record."""
    running: dict[tuple[int, int], RunningSample] = field(default_factory=dict)
    """Changed states of running samples, by group key and sample index."""
    prompts: list[tuple[int, PreparedPrompt | Exception]] = field(default_factory=list)
    failures: list[tuple[str, int, InfrastructureError]] = field(default_factory=list)
    """Lane, server and error of failed requests. The server is closed in the lane until it is ordered to be up."""
    lanes: dict[str, LaneState] = field(default_factory=dict)
    is_stuck: bool = False
    """User code hangs in a thread, so the worker must be replaced once its rollouts have ended."""
    sandboxes: SandboxNews | None = None

    @property
    def trajectories(self) -> list[Trajectory]:
        return [sample for *_, sample in self.samples if isinstance(sample, Trajectory)]

    @property
    def num_events(self) -> int:
        """Returns the number of events. A changed state of a running sample does not count; the next event sends it."""
        return len(self.samples) + len(self.prompts) + len(self.failures)
