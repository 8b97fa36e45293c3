"""Protocols of the engine and the request slots for rollouts. Fakes implement them in tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(slots=True, frozen=True)
class GenerateRequest:
    """One turn to sample: token ids in, token ids out. `request_id` is unique within the run and can be aborted."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    temperature: float
    top_p: float | None = None
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the answer, besides those that the engine reads from the model's files."""
    stop: Sequence[str] = ()
    """Texts that end the answer. Its ids include them."""
    priority: int = 0
    """Lower values are served first (vLLM's order)."""
    ignore_eos: bool = False
    """Sample exactly `max_tokens` tokens (benchmarks)."""
    routes_start: int = 0
    """First prompt token whose routes are returned, if the server returns any (`router_replay`)."""


@dataclass(slots=True, frozen=True)
class RequestId:
    """Parsed request id. `attempt` counts the tries of a sample, which makes every id unique."""

    sample_id: str
    turn: int
    attempt: int
    slot: int

    def __str__(self) -> str:
        return f"{self.sample_id}.{self.turn}.{self.attempt}@{self.slot}"


def parse_request_id(text: str) -> RequestId | None:
    """Inverse of `str(RequestId(...))`. Returns None for an id of another form, such as that of a probe."""
    name, _, slot = text.rpartition("@")
    parts = name.rsplit(".", 2)
    if len(parts) != 3 or not all(part.isdigit() for part in (*parts[1:], slot)):
        return None
    return RequestId(parts[0], int(parts[1]), int(parts[2]), int(slot))


@dataclass(slots=True)
class Generation:
    """The tokens that the engine sampled for one request.

    `version_spans` are (policy version, first token, end token) over the N sampled tokens, contiguous from 0 to N.
    """

    token_ids_N: np.ndarray
    logprobs_N: np.ndarray
    finish_reason: str
    """`stop` (end token), `length` (`max_tokens` or context exhausted) or `abort`."""
    version_spans: list[tuple[int, int, int]]
    server_index: int = 0
    routes_MXK: np.ndarray | None = None
    """Experts of the M tokens from the request's `routes_start` to the last sampled one, which has none, in each of X
    layers (`router_replay`)."""

    @property
    def version_N(self) -> np.ndarray:
        """Policy version of each sampled token, int32 [N]."""
        versions = np.empty(len(self.token_ids_N), dtype=np.int32)
        for version, start, end in self.version_spans:
            versions[start:end] = version
        return versions


class Engine(Protocol):
    """Interface of one inference server for rollouts."""

    @property
    def loaded_version(self) -> int:
        """Newest policy version known to be loaded. A request sent now is sampled with this or a newer version."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples one turn. Raises `InfrastructureError` when the server fails, exits or exceeds the deadline."""
        ...

    async def abort(self, request_ids: list[str]) -> None:
        """Aborts these requests in the engine. Ignores unknown ids."""
        ...


@dataclass(eq=False)
class Lease:
    """One request slot of one server, until it is released. It permits the generation of one sample there."""

    server: int
    slot: int
    released: bool = False


class RequestSlots(Protocol):
    """Interface of the request slots for rollouts."""

    async def acquire(self, group: int, *, turn: int = 0, timeout: float) -> Lease:
        """Waits for a slot. `turn` counts from 0 and later turns go first. Raises DeadlineExceeded."""
        ...

    def release(self, lease: Lease) -> None:
        """Releases a slot; call it exactly once."""
        ...

    def forget_group(self, group: int) -> None:
        """Unbinds a finished group from its server."""
        ...
