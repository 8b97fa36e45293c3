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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from telescope.environments.types import Advance, EnvironmentSpec, RewardRecord
from telescope.environments.user_code import default_memory_limit


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


def read_advance(fields: dict[str, Any], blob: bytes) -> Advance:
    """Returns the reply of a worker's answer: the fields of `Advance`, and the ids in the blob."""
    reward = fields.pop("reward", None)
    return Advance(append_token_ids=unpack_ids(blob), reward=reward and RewardRecord(**reward), **fields)


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
