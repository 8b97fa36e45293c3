"""What passes between the driver and the processes that run environments.

Plain records of plain values: they are written as JSON, never pickled, so that nothing a user's code returns can run in
the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from telescope.environments.base import ChatMessage


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
    dataset_digest: str = ""
    """Identities of up to 64 items spread over the dataset, hashed; equal in all processes."""


@dataclass(slots=True, frozen=True)
class PreparedPrompt:
    """A prompt, ready to be sent. `sample_uid` identifies the dataset item whatever its environment is called."""

    token_ids: list[int]
    text: str
    messages: list[ChatMessage]
    sample_uid: str


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
    """

    done: bool
    append_token_ids: list[int]
    completion_text: str
    reward: RewardRecord | None
    seconds: float = 0.0
