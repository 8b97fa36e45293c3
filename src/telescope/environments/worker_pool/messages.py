"""Messages between the driver and the workers, and a worker's shared slot.

Records are sent as JSON and never pickled, so that nothing that user code returns can run in the driver. A frame on the
socket (`utils.frames`) is a JSON header and a blob, which carries token ids as int32, because a thousand numbers in
JSON cost more than the rest of a message.

A worker that hangs or crashes in user code cannot report where. So before every step into user code it writes the
request's id to 16 shared bytes, the slot, and after the step a zero. The pool reads them to decide whose deadline runs,
and which call caused a crash. Writing costs well under a microsecond.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from telescope.environments.base import ChatMessage
from telescope.environments.user_code import default_memory_limit

if TYPE_CHECKING:
    from telescope.config import TelescopeConfig

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
        """Key of this environment in `EnvironmentPool`."""
        return self.key or self.name


@dataclass(slots=True, frozen=True)
class RendererSpec:
    """The tokenizer and the options of its chat template.

    `chat_template` replaces the tokenizer's own. `tokenizer_path` is a folder or a hub id. The others are fields of the
    configuration.
    """

    tokenizer_path: str
    chat_template: str | None = None
    enable_thinking: bool = False
    trust_remote_code: bool = False
    stop_token_ids: list[int] | None = None
    stop: list[str] = field(default_factory=list)
    allow_special_tokens_in_content: bool = False

    @classmethod
    def from_config(cls, config: TelescopeConfig, folder: Path | None = None) -> RendererSpec:
        """Returns the tokenizer of a run, or of a model's `folder`, and the options of its chat template."""
        options = {field.name: getattr(config, field.name) for field in fields(cls) if field.name != "tokenizer_path"}
        return cls(str(folder or config.model), **options)


DIGEST_ITEMS = 512
"""Items of a dataset that are compared between processes and runs. Every worker reads them before its first call."""
FINGERPRINT_DIGITS = 4


def digest_positions(count: int) -> list[int]:
    """Returns the positions of the items that are compared: all, or `DIGEST_ITEMS` across a larger dataset."""
    if count <= DIGEST_ITEMS:
        return list(range(count))
    return [round(i * (count - 1) / (DIGEST_ITEMS - 1)) for i in range(DIGEST_ITEMS)]


@dataclass(slots=True, frozen=True)
class EnvironmentInfo:
    """Description of a loaded environment. `name` is a display name, which the class may set freely."""

    name: str
    num_samples: int
    is_multi_turn: bool = False
    reward_min: float | None = None
    reward_max: float | None = None
    metrics_ranges: dict[str, dict[str, float]] = field(default_factory=dict)
    tags_options: dict[str, list[str]] = field(default_factory=dict)
    not_extendable: str | None = None
    """Why this chat template prevents extending conversations by tokens (`rendering`); None if it does not."""
    dataset_digest: str = ""
    """Hash of the identities of the items at `digest_positions`; equal in all processes."""
    fingerprints: str = ""
    """The first `FINGERPRINT_DIGITS` hex digits of each of those identities, in order."""
    shares_resources: bool = False
    """Its resources exist once per host, so one process runs all of it."""
    ends_rollouts: bool = False
    """It overrides `end_rollout`, which must be called for open rollouts before a process exits."""
    notices: list[str] = field(default_factory=list)
    """Messages for the user of a run (`Environment.notice`)."""
    stops: dict[str, Any] = field(default_factory=dict)
    """What ends an answer: the fields of `stops.Stops`, equal for all environments."""


@dataclass(slots=True, frozen=True)
class PreparedPrompt:
    """A rendered prompt. `sample_uid` identifies the dataset item independently of the environment's name."""

    token_ids: list[int]
    text: str
    messages: list[ChatMessage]
    sample_uid: str


@dataclass(slots=True, frozen=True)
class FirstPrompt:
    """The first prompt of a multi-turn rollout."""

    token_ids: list[int]
    messages: list[ChatMessage]


@dataclass(slots=True, frozen=True)
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

    `append_token_ids` follow the completion in the next turn's prompt; empty when `done`. `completion_text` is the
    scored text. `seconds` is the time in the environment's code and in decoding, without waiting in queues. In a
    multi-turn rollout that continues, `messages` are the environment's messages after the completion. With `restarts`,
    nothing could be appended and `append_token_ids` is the whole next prompt; `divergence` names how the join differs
    from the chat template (`rendering`). `end_reason` is the environment's reason when the rollout is done.
    `tool_calls` are the calls of the completion, as `ToolCall.record` has them.
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
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, fields: dict[str, Any], blob: bytes) -> Advance:
        """Returns the reply of a worker's answer: the fields of this class, and the ids in the blob."""
        reward = fields.pop("reward", None)
        return cls(append_token_ids=unpack_ids(blob), reward=reward and RewardRecord(**reward), **fields)


@dataclass(slots=True, frozen=True)
class PoolStatus:
    """State of the pool, and counts since the start."""

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
    """Returns the first frame's header: what a worker loads."""
    return {
        "op": "load",
        "trial": False,
        "debug": False,
        "checks_template": False,
        "specs": [asdict(spec) for spec in specs],
        "environments_path": [str(Path(place).expanduser().resolve()) for place in environments_path],
        "memory_limit_bytes": memory_limit_bytes or default_memory_limit(),
    }


def pack_ids(token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Packs token ids [L] as int32."""
    return np.asarray(token_ids, np.int32).tobytes()


def unpack_ids(blob: bytes) -> list[int]:
    """The inverse of `pack_ids`."""
    return np.frombuffer(blob, np.int32).tolist()


def pack_floats(values: Sequence[float] | np.ndarray) -> bytes:
    """Packs logprobs [L] as float32."""
    return np.asarray(values, np.float32).tobytes()


def unpack_floats(blob: bytes) -> list[float]:
    """The inverse of `pack_floats`."""
    return np.frombuffer(blob, np.float32).tolist()


_BYTES = 16


class Slot:
    """The request on the main thread. `current` is its id (0: none); `entries` counts the steps into user code."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _BYTES)
        self._view = memoryview(self._memory).cast("Q")

    @staticmethod
    def create() -> int:
        """Returns a file descriptor of a new slot, for the worker."""
        descriptor = os.memfd_create("telescope-slot")
        os.ftruncate(descriptor, _BYTES)
        return descriptor

    def enter(self, request_id: int) -> None:
        self._view[1] += 1
        self._view[0] = request_id

    def leave(self) -> None:
        self._view[0] = 0

    def read(self) -> tuple[int, int]:
        """`(current, entries)`."""
        return self._view[0], self._view[1]

    def close(self) -> None:
        self._view.release()
        self._memory.close()
