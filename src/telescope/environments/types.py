"""Records exchanged between environments and their callers: specification, prompt, reply, score. They become JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from telescope.environments.records import ChatMessage

CONTEXT_EXHAUSTED = "context_exhausted"
"""`Advance.end_reason` of a rollout that was scored because its context had no space for another turn."""
PROMPT_TOO_LONG = "prompt_too_long"
"""End reason of a sample whose first prompt fills the context."""
ROLLOUT_ERROR = "rollout_error"
"""End reason of a sample on which the environment's code failed."""


@dataclass(slots=True, frozen=True)
class EnvironmentSpec:
    """An environment to run. `key` distinguishes two of the same name (training and evaluation); default: the name.

    `reward_min` and `reward_max` override those of the class. `factory` is a `module:function` that creates the
    environment from `(name, environments_path=..., **kwargs)`; evals have their own.
    """

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    reward_min: float | None = None
    reward_max: float | None = None
    key: str = ""
    factory: str = "telescope.environments.registry:get_environment"

    @property
    def identity(self) -> str:
        """Returns the key of this environment in a run."""
        return self.key or self.name


DIGEST_ITEMS = 512
"""Items of a dataset that are compared between processes and runs. Every worker reads them before its first call."""
FINGERPRINT_DIGITS = 4


def digest_positions(count: int) -> list[int]:
    """Returns the positions of the items to compare: all, or `DIGEST_ITEMS` spread over a larger dataset."""
    if count <= DIGEST_ITEMS:
        return list(range(count))
    return [round(i * (count - 1) / (DIGEST_ITEMS - 1)) for i in range(DIGEST_ITEMS)]


@dataclass(slots=True, frozen=True)
class EnvironmentInfo:
    """Describes a loaded environment. `name` is a display name, which the class may set freely."""

    name: str
    num_samples: int
    is_multi_turn: bool = False
    reward_min: float | None = None
    reward_max: float | None = None
    metrics_ranges: dict[str, dict[str, float]] = field(default_factory=dict)
    tags_options: dict[str, list[str]] = field(default_factory=dict)
    dataset_digest: str = ""
    """Hash of the identities of the items at `digest_positions`; equal in all processes."""
    fingerprints: str = ""
    """The first `FINGERPRINT_DIGITS` hex digits of each identity, in order."""
    shares_resources: bool = False
    """Whether its resources exist once per host, so that one process runs all of it."""
    ends_rollouts: bool = False
    """Whether it overrides `end_rollout`, which must be called for open rollouts before a process exits."""
    notices: list[str] = field(default_factory=list)
    """Messages for the user of a run (`Environment.notice`)."""
    stops: dict[str, Any] = field(default_factory=dict)
    """The ends of a completion: the fields of `stops.Stops`, equal for all environments."""


@dataclass(slots=True, frozen=True)
class PreparedPrompt:
    """A rendered prompt. `sample_uid` identifies the dataset item independently of the environment's name."""

    token_ids: list[int]
    text: str
    messages: list[ChatMessage]
    sample_uid: str


@dataclass(frozen=True)  # no slots: every sample has one, and pickle restores frozen slots field by field
class RewardRecord:
    """A score as JSON values.

    For an evaluation, `sample_metrics` are its metrics, and `total_reward` is the metric `reward`, if it exists.
    """

    total_reward: float | None
    sample_metrics: dict[str, float]
    golden_answers: dict[str, str | None]
    info_turns: list[dict[str, Any]]
    sample_tags: dict[str, str]


@dataclass(slots=True, frozen=True)
class Advance:
    """The environment's reply to a completion.

    With a `reward` the rollout ends, and `end_reason` is the environment's reason. Otherwise `append_token_ids` follow
    the completion in the next turn's prompt, and `messages` are the environment's messages after the completion. With
    `restarts`, nothing could be appended and `append_token_ids` is the whole next prompt; `divergence` names how the
    join differs from the chat template (`rollout.rendering`).
    """

    append_token_ids: list[int]
    reward: RewardRecord | None = None
    messages: list[ChatMessage] = field(default_factory=list)
    restarts: bool = False
    divergence: str | None = None
    end_reason: str | None = None
