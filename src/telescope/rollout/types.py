"""The seam between a rollout and the engine that samples its tokens.

`Engine` is what the rollout needs and nothing more, so that a fake stands in for vLLM in tests and benchmarks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from telescope.environments.worker_pool.messages import Advance, FirstPrompt


@dataclass(slots=True, frozen=True)
class GenerateRequest:
    """One turn to sample: token ids in, token ids out. `request_id` is unique within the run and can be aborted."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    temperature: float
    top_p: float | None = None
    seed: int | None = None
    priority: int = 0
    """Lower is served first (vLLM's order)."""
    ignore_eos: bool = False
    """Sample `max_tokens` tokens whatever they are (benchmarks)."""


@dataclass(slots=True, frozen=True)
class RequestId:
    """What a request id says. `attempt` counts the tries of a sample, so that every request has an id of its own."""

    sample_id: str
    turn: int
    attempt: int
    lane: int

    def __str__(self) -> str:
        return f"{self.sample_id}.{self.turn}.{self.attempt}@{self.lane}"


def parse_request_id(text: str) -> RequestId | None:
    """The inverse of `str(RequestId(...))`; None for an id of another form, such as that of a probe."""
    name, _, lane = text.rpartition("@")
    parts = name.rsplit(".", 2)
    if len(parts) != 3 or not all(part.isdigit() for part in (*parts[1:], lane)):
        return None
    return RequestId(parts[0], int(parts[1]), int(parts[2]), int(lane))


@dataclass(slots=True)
class Generation:
    """What the engine sampled for one request.

    `version_spans` are (policy version, first token, end token) over the N sampled tokens, contiguous from 0 to N.
    """

    token_ids_N: np.ndarray
    logprobs_N: np.ndarray
    finish_reason: str
    """`stop` (end token), `length` (`max_tokens` or context exhausted) or `abort`."""
    version_spans: list[tuple[int, int, int]]
    server_index: int = 0
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    total_seconds: float = 0.0

    @property
    def version_N(self) -> np.ndarray:
        """Policy version of each sampled token, int32 [N]."""
        versions = np.empty(len(self.token_ids_N), dtype=np.int32)
        for version, start, end in self.version_spans:
            versions[start:end] = version
        return versions


class Engine(Protocol):
    """One inference server, as a rollout sees it."""

    @property
    def held_version(self) -> int:
        """Newest policy version that the server is known to hold; a request sent now is sampled by it or a newer."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn. Raises `InfrastructureError` when the server fails, dies or exceeds the deadline."""
        ...

    async def abort(self, request_ids: list[str]) -> None:
        """Stop these requests in the engine itself. Unknown ids are not an error."""
        ...


class Environments(Protocol):
    """The environments, as a rollout sees them. `environments.pool.EnvironmentPool` is one.

    Each method raises `EnvironmentFailure` for what user code did, `InfrastructureError` for what failed around it.
    """

    async def advance(
        self,
        env_key: str,
        index: int,
        completion_token_ids: Sequence[int] | np.ndarray,
        stop_reason: str,
        *,
        for_eval: bool = False,
    ) -> Advance:
        """Have a single-turn environment score a completion."""
        ...

    async def begin(self, rollout: str, env_key: str, index: int, *, interleaved: bool = True) -> FirstPrompt:
        """Begin a conversation, whose state is held until it is done, fails, or is cancelled.

        With `interleaved` False every prompt is rendered anew. The first one is that of the whole group.
        """
        ...

    async def respond(
        self,
        rollout: str,
        completion_token_ids: Sequence[int] | np.ndarray,
        completion_logprobs: Sequence[float] | np.ndarray = (),
        stop_reason: str = "stop",
        *,
        for_eval: bool = False,
        max_context: int | None = None,
    ) -> Advance:
        """Hand over the next answer: the score, or what follows it in the next prompt.

        A next prompt that would leave no room in `max_context` tokens is not given; what there is is scored.
        """
        ...

    def cancel(self, rollout: str) -> None:
        """Give a conversation up. Unknown ids are not an error."""
        ...


@dataclass(eq=False)
class Lease:
    """One lane of one server: the right to have one sample generating there, until it is released."""

    server: int
    slot: int
    released: bool = False


class RequestSlots(Protocol):
    """Where a rollout takes its lanes from."""

    async def acquire(self, group: int, *, turn: int = 0, timeout: float) -> Lease:
        """Wait for a lane; `turn` counts from 0 and later turns go first. Raises DeadlineExceeded."""
        ...

    def release(self, lease: Lease) -> None:
        """Give a lane back, once."""
        ...

    def forget_group(self, group: int) -> None:
        """The group is finished: drop what ties it to a server."""
        ...
