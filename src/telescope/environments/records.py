"""What passes between the driver and the processes that run environments.

Plain records of plain values: they are written as JSON, never pickled, so that nothing a user's code returns can run in
the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from telescope.environments.base import ChatMessage
from telescope.environments.limits import default_memory_limit

CONTEXT_EXHAUSTED = "context_exhausted"
"""`Advance.end_reason` of a rollout that had no room for another turn and was scored as it was."""


@dataclass(slots=True, frozen=True)
class EnvironmentSpec:
    """An environment to run. `key` tells apart two of the same name (training and evaluation); default: the name.

    `reward_min` and `reward_max` override the class's own. `factory` is `module:function` and makes the environment
    from `(name, environments_path=..., **kwargs)`; evals have one of their own.
    """

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    reward_min: float | None = None
    reward_max: float | None = None
    key: str = ""
    factory: str = "telescope.environments.registry:get_environment"

    @property
    def identity(self) -> str:
        """What `EnvironmentPool` calls this environment."""
        return self.key or self.name


@dataclass(slots=True, frozen=True)
class RendererSpec:
    """How prompts become token ids: the tokenizer, and what its chat template is told.

    `chat_template` replaces the tokenizer's own. `tokenizer_path` is a folder or a hub id.
    """

    tokenizer_path: str
    chat_template: str | None = None
    enable_thinking: bool = False
    trust_remote_code: bool = False


@dataclass(slots=True, frozen=True)
class EnvironmentInfo:
    """What an environment says of itself. `name` is the name for people, which a class may set freely."""

    name: str
    num_samples: int
    is_multi_turn: bool = False
    reward_min: float | None = None
    reward_max: float | None = None
    metrics_ranges: dict[str, dict[str, float]] = field(default_factory=dict)
    tags_options: dict[str, list[str]] = field(default_factory=dict)
    not_extendable: str | None = None
    """Why conversations cannot be extended token by token with this chat template (`dialogue`); None when they can."""
    dataset_digest: str = ""
    """Identities of up to 64 items spread over the dataset, hashed; equal in all processes."""
    shares_resources: bool = False
    """It prepares resources that a host has once: one process plays all of it."""
    ends_rollouts: bool = False
    """It has an `end_rollout` of its own, which open rollouts are owed when a process ends."""
    notices: list[str] = field(default_factory=list)
    """What the user of a run has to know of it (`Environment.notice`)."""


@dataclass(slots=True, frozen=True)
class PreparedPrompt:
    """A prompt, ready to be sent. `sample_uid` identifies the dataset item whatever its environment is called."""

    token_ids: list[int]
    text: str
    messages: list[ChatMessage]
    sample_uid: str


@dataclass(slots=True, frozen=True)
class FirstPrompt:
    """The prompt of the first turn of a rollout of several."""

    token_ids: list[int]
    messages: list[ChatMessage]


@dataclass(slots=True, frozen=True)
class RewardRecord:
    """A score as plain values. Of an evaluation, `sample_metrics` are its metrics, and `total_reward` the one that is
    called `reward`, if there is one."""

    total_reward: float | None
    sample_metrics: dict[str, float]
    golden_answers: dict[str, str | None]
    info_turns: list[dict[str, Any]]
    sample_tags: dict[str, str]


@dataclass(slots=True, frozen=True)
class Advance:
    """What the environment made of a completion.

    `append_token_ids` follow the completion in the next turn's prompt, empty when `done`. `completion_text` is what was
    scored. `seconds` is the time in the environment's code, decoding included, waiting in queues not.

    Of a rollout of several turns that goes on, `messages` are what the environment said after the completion. With
    `restarts` nothing could be appended and `append_token_ids` is the whole next prompt; `divergence` names how the
    join differs from the chat template (`dialogue`). `end_reason` is the environment's word for why a rollout is done.
    """

    done: bool
    append_token_ids: list[int]
    completion_text: str
    reward: RewardRecord | None
    seconds: float = 0.0
    messages: list[ChatMessage] = field(default_factory=list)
    restarts: bool = False
    divergence: str | None = None
    end_reason: str | None = None


@dataclass(slots=True, frozen=True)
class PoolStatus:
    """State and counts since the start, for the record and for messages."""

    workers_ready: int
    calls_waiting: int
    calls_in_workers: int
    rollouts_open: int
    restarts: int
    deadlines_passed: int
    pids: tuple[int, ...]


def load_header(
    specs: Sequence[EnvironmentSpec], environments_path: Sequence[str | Path], memory_limit_bytes: int | None = None
) -> dict[str, Any]:
    """The first frame to a worker: what it loads."""
    return {
        "op": "load",
        "trial": False,
        "specs": [asdict(spec) for spec in specs],
        "environments_path": [str(Path(place).expanduser().resolve()) for place in environments_path],
        "memory_limit_bytes": memory_limit_bytes or default_memory_limit(),
    }
