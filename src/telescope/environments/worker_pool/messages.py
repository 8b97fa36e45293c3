"""What passes between the driver and the processes that run environments.

Plain records of plain values: they are written as JSON, never pickled, so that nothing a user's code returns can run in
the driver.

Frames on the socket between the pool and a worker: a JSON header and a blob of raw bytes.

    4 bytes header length, 4 bytes blob length (little endian), header (JSON, ASCII), blob

The blob carries token ids as int32, because a thousand numbers in JSON cost more than all else in a message. Both sides
are processes of one machine that trust each other's framing; what a header holds is still read as data only.

Which request holds a worker's main thread, in memory that both processes see.

A worker that is stuck in user code cannot say so, and one that has died cannot say where. So before every step into
user code it writes the request's id to 16 shared bytes, and after the step a zero. The pool reads them to decide whose
deadline runs, and whom to hold responsible for a crash. Writing costs well under a microsecond.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from telescope.environments.base import ChatMessage
from telescope.environments.user_code import default_memory_limit

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


_LENGTHS = struct.Struct("<II")

MAX_FRAME_BYTES = 256 * 2**20
"""Beyond this a frame is taken for garbage."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


class BrokenFrameError(RuntimeError):
    """The bytes on the socket are not frames."""


def pack_frame(header: dict[str, Any], blob: bytes = b"") -> bytes:
    """One frame as bytes."""
    text = _encode(header).encode("ascii")
    return b"".join((_LENGTHS.pack(len(text), len(blob)), text, blob))


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """Frames that `data` completes. Raises `BrokenFrameError`."""
        self._buffer += data
        buffer, start, frames = self._buffer, 0, []
        while len(buffer) - start >= _LENGTHS.size:
            header_bytes, blob_bytes = _LENGTHS.unpack_from(buffer, start)
            if header_bytes + blob_bytes > MAX_FRAME_BYTES:
                raise BrokenFrameError(f"a frame of {header_bytes + blob_bytes} bytes")
            body = start + _LENGTHS.size
            end = body + header_bytes + blob_bytes
            if len(buffer) < end:
                break
            header = json.loads(buffer[body : body + header_bytes])
            frames.append((header, bytes(buffer[body + header_bytes : end])))
            start = end
        if start:
            del buffer[:start]
        return frames


def pack_ids(token_ids: Iterable[int]) -> bytes:
    """Token ids [L] as int32."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.astype(np.int32, copy=False).tobytes()
    return array("i", token_ids).tobytes()


def unpack_ids(blob: bytes) -> list[int]:
    """The inverse of `pack_ids`."""
    ids = array("i")
    ids.frombytes(blob)
    return ids.tolist()


def pack_floats(values: Iterable[float]) -> bytes:
    """Logprobs [L] as float32."""
    if isinstance(values, np.ndarray):
        return values.astype(np.float32, copy=False).tobytes()
    return array("f", values).tobytes()


def unpack_floats(blob: bytes) -> list[float]:
    """The inverse of `pack_floats`."""
    values = array("f")
    values.frombytes(blob)
    return values.tolist()


_BYTES = 16


class Slot:
    """`current` is the id of the request that holds the main thread (0: none); `entries` counts the entries."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _BYTES)
        self._view = memoryview(self._memory).cast("Q")

    @staticmethod
    def create() -> int:
        """A file descriptor for a new slot, to be inherited by the worker."""
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
