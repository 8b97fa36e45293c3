"""Runs one sample from prompt to scored trajectory: the turns of the policy that an environment's rollout asks for.

Owns the trajectory and the retries after infrastructure failures. The environment's rollout, either the turn loop
(`turns`) or an agent, asks for turns in any order, several at a time (`Rollout.sample`). Request slots and servers are
passed in (`request_slots`, `inference.base`).

Three kinds of failure are kept apart: a bad answer gets a reward; an environment failure masks the sample; an engine
failure is retried, on another server if necessary, and masks the sample only after the last retry. A conversation whose
state is lost, with its worker process or a sandbox, begins again, which also counts as a retry.

A sample can be cancelled at any time. A running request is aborted in the engine; its tokens so far are kept for the
metrics. Any other wait ends at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from telescope.config import TelescopeConfig
from telescope.environments.types import PROMPT_TOO_LONG, ROLLOUT_ERROR, PreparedPrompt, RewardRecord
from telescope.errors import EnvironmentFailure, InfrastructureError
from telescope.inference.base import Engine, GenerateRequest, Generation, RequestId
from telescope.rollout.request_slots import Lease, RequestSlotPool
from telescope.rollout.stops import NO_STOPS, Stops
from telescope.rollout.trajectory import Trajectory, Turn, compression_ratio

MAX_INFRASTRUCTURE_RETRIES = 3
"""Retries of a sample after infrastructure failures, before it is masked."""


ATTEMPTS_OF_A_WORKER = 1000
"""More than a sample's retries in one worker, so that another worker uses other request ids."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling parameters. `max_context` limits prompt and completion together, in tokens."""

    temperature: float
    top_p: float | None
    max_tokens: int
    max_context: int
    stops: Stops = NO_STOPS


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Settings of a rollout, without its prompt. Times are in seconds."""

    sampling: SamplingSettings
    free_lane_after_generation: bool
    slot_timeout: float
    max_infrastructure_retries: int
    for_eval: bool = False
    interleaved: bool = True
    """Whether later turns extend the token ids of earlier ones (`interleaved_rollouts`) instead of rendering again."""

    @classmethod
    def from_config(cls, config: TelescopeConfig, stops: Stops = NO_STOPS) -> RolloutSettings:
        """Returns the settings that all rollouts of a run share."""
        return cls(
            sampling=SamplingSettings(
                temperature=config.temperature,
                top_p=config.top_p,
                max_tokens=config.max_tokens,
                # The engine's limit and, unless samples may be truncated, the trainer's: longer completions end with
                # `length`.
                max_context=config.max_model_len
                if config.overlong_samples == "truncate"
                else min(config.max_model_len, config.seq_len),
                stops=stops,
            ),
            free_lane_after_generation=config.free_lane_after_generation,
            # A slot may be in use for a whole generation, and a server may have to restart first.
            slot_timeout=config.request_timeout_seconds + config.inference_start_timeout_seconds,
            max_infrastructure_retries=MAX_INFRASTRUCTURE_RETRIES,
            interleaved=config.interleaved_rollouts,
        )


@dataclass(slots=True)
class RolloutTask:
    """The prompt and identity of one sample. The identity is for records, request ids and seeds."""

    sample_id: str
    group_id: int
    sample_index: int
    environment: str
    environment_key: str
    item_index: int
    prompt_token_ids: list[int]
    seed: tuple[int | str, ...]
    """Identity of its requests, from the run's seed on, without the turn (`request_seed`)."""
    lost: tuple[int, ...] = ()
    """Sampled tokens, as far as known, in each rollout worker that was lost while it ran this sample."""
    payload: Any = None
    """Further data of the prompt besides its ids (`GenerateRequest.payload`)."""


def request_seed(run_seed: int | str, *identity: int | str) -> int:
    """Returns a 31-bit seed from the run's seed and the request's identity. Independent of the order of arrival."""
    text = "/".join(str(part) for part in (run_seed, *identity))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") & 0x7FFFFFFF


class Environments(Protocol):
    """The environments of a rollout worker by key. Calls raise `EnvironmentFailure` for faults of user code."""

    @property
    def is_stuck(self) -> bool:
        """Returns whether user code hangs past its deadline and blocks a thread of this process."""

    async def prepare(self, env_key: str, index: int) -> PreparedPrompt:
        """Renders and tokenizes the prompt of a dataset item."""

    async def roll_out(self, rollout: Rollout) -> RewardRecord:
        """Runs the environment's rollout, which samples turns through `rollout`. Returns the score."""


class Rollout:
    """One running sample. `trajectory` grows until `run` returns it.

    After `cancel`, `run` returns as soon as possible, with the tokens so far. Samples with the same `slot_key` share a
    server. `on_progress` is called when a request gets a slot and when a turn ends.
    """

    def __init__(
        self,
        task: RolloutTask,
        *,
        slot_key: int,
        slots: RequestSlotPool,
        engine_of: Callable[[int], Engine],
        environments: Environments,
        settings: RolloutSettings,
        on_engine_failure: Callable[[int, InfrastructureError], None] = lambda server, error: None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.task = task
        self.trajectory = Trajectory(
            task.sample_id, task.group_id, task.sample_index, task.environment, payload=task.payload,
            started_at=time.time(),
            num_infrastructure_retries=len(task.lost), lost_conversations=list(task.lost),
        )  # fmt: skip
        self._slot_key = slot_key
        self._slots = slots
        self._engine_of = engine_of
        self._environments = environments
        self.settings = settings
        self._on_engine_failure = on_engine_failure
        self._on_progress = on_progress
        self._in_engine: dict[str, tuple[int, int]] = {}
        """Server of each running request, and the policy version that it had when the request was sent."""
        self._num_sampled = 0
        """Number of turns that the rollout has asked for since it began."""
        self._kept: Lease | None = None
        """Slot that no request uses: of the first turn, or of the last while the environment replies."""
        self._running: asyncio.Task[Any] | None = None

    @property
    def label(self) -> str:
        """Returns the sample's name in error messages."""
        return f"environment {self.task.environment_key!r}, item {self.task.item_index}"

    async def run(self) -> Trajectory:
        """Runs the sample to its end: scored, masked or cancelled.

        Raises DeadlineExceeded, an error of the run, when no request slot becomes free within `slot_timeout`.
        """
        trajectory = self.trajectory
        self._running = asyncio.current_task()
        try:
            await self._run_with_retries()
        except (EnvironmentFailure, InfrastructureError) as error:
            if not trajectory.cancelled:
                trajectory.failure_kind = "environment" if isinstance(error, EnvironmentFailure) else "infrastructure"
                trajectory.failure_message = str(error)
                if isinstance(error, EnvironmentFailure) and trajectory.end_reason != PROMPT_TOO_LONG:
                    trajectory.end_reason = ROLLOUT_ERROR
        except asyncio.CancelledError:
            if not trajectory.cancelled:
                raise
            assert self._running is not None
            self._running.uncancel()
        trajectory.finished_at = time.time()
        return trajectory

    def cancel(self) -> list[tuple[int, str]]:
        """Cancels the sample. Returns (server, request id) of each request that the caller must abort in the engines.

        The sample ends when they end. Without any, its current wait is cancelled here.
        """
        self.trajectory.cancelled = True
        if self._running is not None and not self._in_engine:
            self._running.cancel()
        return [(server, request_id) for request_id, (server, _) in self._in_engine.items()]

    def oldest_version(self) -> int | None:
        """Returns the policy version of the sample's oldest trained token. None while it has none.

        A request in the engine counts with its server's version when it was sent.
        """
        versions = self.trajectory.totals.version_range[0], *(version for _, version in self._in_engine.values())
        return min((version for version in versions if version >= 0), default=None)

    async def sample(
        self,
        prompt_token_ids: list[int],
        *,
        added_token_ids: list[int],
        parent: int | None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        routes_start: int = 0,
        keeps_slot: bool = False,
        **of_turn: Any,
    ) -> int:
        """Samples a turn. Returns its index in the trajectory.

        `keeps_slot` keeps its request slot until the next turn or `release`. `of_turn` are other fields of the turn.
        May be cancelled, which ends the request. Raises `EnvironmentFailure` when the prompt fills the context, and
        `InfrastructureError`.
        """
        trajectory = self.trajectory
        if self._num_sampled:
            self.release()
        number, self._num_sampled = self._num_sampled, self._num_sampled + 1
        num_free_tokens = self.settings.sampling.max_context - len(prompt_token_ids)
        if num_free_tokens <= 0:
            trajectory.end_reason = PROMPT_TOO_LONG
            raise EnvironmentFailure(f"the prompt of turn {number} fills the context (max_model_len, seq_len)")
        started_at = time.time()
        try:
            lease, generation = await self._generate(
                number, prompt_token_ids, min(num_free_tokens, max_tokens or num_free_tokens), routes_start, stop
            )
        finally:
            running = self._running
            if trajectory.cancelled and running not in (None, asyncio.current_task()) and not running.cancelling():
                running.cancel()
        if keeps_slot:
            self.release()
            self._kept = lease
        else:
            self._slots.release(lease)
        trajectory.generated_at = time.time()
        turn = Turn(
            added_token_ids, generation, started_at=started_at, ended_at=trajectory.generated_at, parent=parent,
            server=lease.server, slot=lease.slot, **of_turn,
        )  # fmt: skip
        trajectory.turns.append(turn)
        self._on_progress()
        if trajectory.cancelled:
            raise asyncio.CancelledError
        return len(trajectory.turns) - 1

    def may_retry(self) -> bool:
        """Counts an infrastructure failure. Returns whether the sample may continue."""
        self.trajectory.num_infrastructure_retries += 1
        return self.trajectory.num_infrastructure_retries <= self.settings.max_infrastructure_retries

    def release(self) -> None:
        """Releases the slot of the last turn, if it is kept."""
        if self._kept is not None:
            self._slots.release(self._kept)
            self._kept = None

    async def _run_with_retries(self) -> None:
        """Runs the environment's rollout. Runs it again if infrastructure failures lose its state."""
        trajectory = self.trajectory
        while not trajectory.cancelled:
            try:
                if self.settings.for_eval:  # its samples start together, so that agents would time out as they wait
                    self._kept = await self._slots.acquire(self._slot_key, timeout=self.settings.slot_timeout)
                reward = await self._environments.roll_out(self)
                break
            except InfrastructureError:
                is_over = trajectory.num_infrastructure_retries > self.settings.max_infrastructure_retries
                if is_over or not self.may_retry():
                    raise
                if trajectory.turns:
                    trajectory.lost_conversations.append(trajectory.totals.num_completion_tokens)
                    trajectory.turns.clear()
                    trajectory.chat_rewards.clear()
                self._num_sampled, trajectory.end_reason = 0, None
            finally:
                self.release()
        else:
            return
        if not any(turn.trained for turn in trajectory.turns):
            raise EnvironmentFailure(
                "its rollout ended without an answer of the policy that could be trained: call `context.generate`, or "
                "let the agent use `context.base_url` (docs/agents.md)"
            )
        trajectory.reward = reward
        if trajectory.end_reason == PROMPT_TOO_LONG:  # an agent went on without that turn
            trajectory.end_reason = None
        trajectory.compression_ratio = compression_ratio(trajectory.completion_text)

    async def _generate(
        self, turn_index: int, prompt_token_ids: list[int], num_free_tokens: int, routes_start: int, stop: Sequence[str]
    ) -> tuple[Lease, Generation]:
        """Samples one turn. Retries in a new slot after infrastructure failures. Does not release the returned slot."""
        task, trajectory, settings = self.task, self.trajectory, self.settings
        sampling = settings.sampling
        while True:
            if self._kept is not None and not self._slots.is_up(self._kept):
                self.release()  # its server was closed while the environment worked
            lease, self._kept = self._kept, None
            lease = lease or await self._slots.acquire(self._slot_key, turn=turn_index, timeout=settings.slot_timeout)
            trajectory.server_index, trajectory.slot = lease.server, lease.slot
            num_seen: int | None = None
            # Unique, because every retry of a turn or of the conversation increases the count.
            attempt = trajectory.num_infrastructure_retries + ATTEMPTS_OF_A_WORKER * len(task.lost)
            try:
                request = GenerateRequest(
                    request_id=str(RequestId(task.sample_id, turn_index, attempt, lease.slot)),
                    prompt_token_ids=prompt_token_ids,
                    max_tokens=min(sampling.max_tokens, num_free_tokens),
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    stop_token_ids=sampling.stops.token_ids,
                    stop=[*sampling.stops.texts, *stop] if stop else sampling.stops.texts,
                    seed=request_seed(*task.seed, turn_index),
                    priority=turn_index,
                    routes_start=routes_start,
                    payload=task.payload,
                )
                engine = self._engine_of(lease.server)
                version = engine.loaded_version
                self._in_engine[request.request_id] = lease.server, version
                self._on_progress()
                try:
                    generation = await engine.generate(request)
                finally:
                    del self._in_engine[request.request_id]
                problem = None if trajectory.cancelled else _problem_with(request, generation, version)
                if problem is not None:
                    num_seen = len(generation.token_ids_N)
                    raise InfrastructureError(f"server {lease.server}, request {request.request_id}: {problem}")
                return lease, generation
            except InfrastructureError as error:
                # Reported before the slot is released, so that no waiter gets a slot of a server that is down.
                self._on_engine_failure(lease.server, error)
                self._slots.release(lease)
                trajectory.failed_requests.append(num_seen)
                if not self.may_retry() or trajectory.cancelled:
                    raise
            except BaseException:
                self._slots.release(lease)
                raise


def _problem_with(request: GenerateRequest, generation: Generation, loaded_version: int) -> str | None:
    """Returns why a generation cannot be used. None if it can.

    `loaded_version` is the server's policy version when the request was sent. An older version means that the server
    has restarted with the initial weights and this has not been noticed yet.
    """
    if generation.finish_reason == "abort":
        return "the server aborted it"
    oldest = min((version for version, _, _ in generation.version_spans), default=loaded_version)
    if oldest < loaded_version:
        return f"it was sampled with policy version {oldest}, but the server had received version {loaded_version}"
    if generation.routes_MXK is not None:
        num_routed = len(request.prompt_token_ids) - request.routes_start + len(generation.token_ids_N) - 1
        if len(generation.routes_MXK) != num_routed:
            return f"it has routed experts of {len(generation.routes_MXK)} tokens instead of {num_routed}"
    return None
