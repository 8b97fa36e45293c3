"""In-memory fakes of what a rollout uses: engine, slots and environment, with scripted behavior."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from tests.fakes.turns import ScriptedTurns

from telescope.environments.types import Advance, RewardRecord
from telescope.errors import InfrastructureError
from telescope.inference.base import GenerateRequest, Generation
from telescope.rollout.request_slots import Lease, RequestSlotPool
from telescope.rollout.sample import Rollout, RolloutSettings, RolloutTask, SamplingSettings
from telescope.rollout.trajectory import Trajectory, Turn


def generation(tokens: list[int], *, version: int = 0, finish_reason: str = "stop", spans: Any = None) -> Generation:
    """A generation of `tokens`, of one version unless `spans` is given, with logprobs of -0.5."""
    default = [(version, 0, len(tokens))] if tokens else []
    return Generation(
        np.array(tokens, dtype=np.int64), np.full(len(tokens), -0.5, np.float32), finish_reason,
        default if spans is None else spans,
    )  # fmt: skip


def reward(total: float | None = 1.0, **metrics: float) -> RewardRecord:
    return RewardRecord(total, metrics, {"answer": "42", "other": None}, [], {"kind": "easy"})


@dataclass
class FakeEngine:
    """Returns the next of `answers`, by default tokens 7 and 8; raises an exception in it."""

    answers: Iterable[Any] = ()
    requests: list[GenerateRequest] = field(default_factory=list)
    wait: Callable[[], Any] | None = None
    loaded_version: int = 0

    def __post_init__(self) -> None:
        self._answers: Iterator[Any] = iter(self.answers)

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        if self.wait is not None:
            await self.wait()
        answer = next(self._answers, None)
        if isinstance(answer, BaseException):
            raise answer
        return generation([7, 8]) if answer is None else answer

    async def abort(self, request_ids: list[str]) -> None:
        raise AssertionError("a rollout aborts nothing by itself")


class FakeLanes(RequestSlotPool):
    """Returns a new lease each time, on the servers in turn, and counts them."""

    def __init__(self, num_servers: int = 1) -> None:
        super().__init__([])
        self.num_servers = num_servers
        self.leases: list[Lease] = []
        self.turns: list[int] = []
        self.releases: Counter[int] = Counter()
        self.wait: Callable[[], Any] | None = None

    async def acquire(self, group: int, *, turn: int = 0, timeout: float) -> Lease:
        if self.wait is not None:
            await self.wait()
        lease = Lease(len(self.leases) % self.num_servers, len(self.leases))
        self.leases.append(lease)
        self.turns.append(turn)
        return lease

    def release(self, lease: Lease) -> None:
        assert not lease.released, "a request slot was released twice"
        lease.released = True
        self.releases[lease.slot] += 1

    def is_up(self, lease: Lease) -> bool:
        return True

    @property
    def num_leased(self) -> int:
        return sum(not lease.released for lease in self.leases)


@dataclass
class FakeEnvironments(ScriptedTurns):
    """Returns the next of `advances`, by default a reward of 1; raises an exception in it."""

    advances: Iterable[Any] = ()
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    on_call: Callable[[], Any] | None = None
    on_begin: BaseException | None = None
    is_stuck: bool = False
    begun: list[str] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    """Open conversations."""
    first_prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    turns: bool = False
    """Rollouts are conversations."""

    def __post_init__(self) -> None:
        self._advances: Iterator[Any] = iter(self.advances)

    async def advance(self, key: str, index: int, turn: Turn, *, for_eval: bool = False) -> Advance:
        turn.text = "text"
        answer = turn.generation
        self.calls.append((key, index, answer.token_ids_N.tolist(), answer.finish_reason, for_eval))
        if self.on_call is not None:
            await self.on_call()
        advance = next(self._advances, None)
        if isinstance(advance, BaseException):
            raise advance
        return Advance([], reward()) if advance is None else advance

    async def begin(self, rollout: str, key: str, index: int) -> list[int]:
        assert rollout not in self.begun, "a conversation is begun once"
        if isinstance(self.on_begin, BaseException):
            raise self.on_begin
        self.begun.append(rollout)
        self.open.add(rollout)
        return self.first_prompt

    async def respond(self, rollout: str, turn: Turn, *, for_eval: bool = False) -> Advance:
        assert rollout in self.open, "unknown conversation"
        return await self.advance(rollout, -1, turn, for_eval=for_eval)

    def end(self, rollout: str) -> None:
        self.open.discard(rollout)


def settings(**changes: Any) -> RolloutSettings:
    """Settings of a small rollout; `max_tokens` and `max_context` are of its sampling."""
    lengths = {"max_tokens": changes.pop("max_tokens", 16), "max_context": changes.pop("max_context", 64)}
    sampling = SamplingSettings(temperature=0.7, top_p=None, **lengths)
    defaults = {"free_lane_after_generation": True, "slot_timeout": 5.0, "max_infrastructure_retries": 3}
    return RolloutSettings(sampling=sampling, **{**defaults, **changes})


def task(prompt: list[int] | None = None) -> RolloutTask:
    return RolloutTask("5-0", 5, 0, "arithmetic", "arithmetic#1", 3, prompt or [1, 2, 3], (7, 5, 0))


@dataclass
class Bench:
    """A rollout with its fakes. `run` runs one sample to its end."""

    engine: FakeEngine = field(default_factory=FakeEngine)
    environments: FakeEnvironments = field(default_factory=FakeEnvironments)
    slots: FakeLanes = field(default_factory=FakeLanes)
    failures: list[tuple[int, str]] = field(default_factory=list)
    payload: Any = None

    def on_engine_failure(self, server: int, error: InfrastructureError) -> None:
        self.failures.append((server, str(error)))

    async def run(self, prompt: list[int] | None = None, *, turns: bool = False, **changes: Any) -> Trajectory:
        self.environments.turns = turns
        return await Rollout(
            replace(task(prompt), payload=self.payload),
            slot_key=5,
            slots=self.slots,
            engine_of=lambda server: self.engine,
            environments=cast(Any, self.environments),
            settings=settings(**changes),
            on_engine_failure=self.on_engine_failure,
        ).run()


async def tick(times: int) -> None:
    """Yields to the event loop `count` times."""
    for _ in range(times):
        await asyncio.sleep(0)
