"""One sample from prompt to scored trajectory: generate, let the environment answer, and so on until it is done.

Owns the turn loop and the retries after infrastructure failures. Does not own lanes, servers or environments: they come
in through `Lanes`, `Engine` and `EnvironmentPool`. A single-turn sample is a loop that ends after one turn.

Three kinds of failure, never mixed: a bad answer is a reward; an environment that fails masks the sample; an engine
that fails is asked again, elsewhere if need be, and masks the sample only when the retries are used up.

A sample can be cancelled at any moment. One that the engine works on is aborted there, and keeps the tokens that came
of it, for the count of what was thrown away; any other wait is simply ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from telescope.config import TelescopeConfig
from telescope.environments.pool import EnvironmentPool
from telescope.environments.records import Advance
from telescope.errors import EnvironmentFailure, InfrastructureError
from telescope.rollout.trajectory import Trajectory, Turn
from telescope.rollout.types import Engine, GenerateRequest, Generation, Lanes, Lease

MAX_INFRASTRUCTURE_RETRIES = 3
"""Times that a sample is asked again after its engine failed, before it is masked."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How tokens are sampled. `max_context` bounds prompt and answer together."""

    temperature: float
    top_p: float | None
    max_tokens: int
    max_context: int


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What a rollout needs to know besides its prompt. Times are in seconds."""

    sampling: SamplingSettings
    free_lane_after_generation: bool
    lane_timeout: float
    max_infrastructure_retries: int
    priority_by_turn: bool
    """Earlier turns first in the engine's queue (`vllm_scheduling_policy: priority`)."""
    for_eval: bool = False

    @classmethod
    def from_config(cls, config: TelescopeConfig) -> RolloutSettings:
        """What every rollout of a run has in common."""
        return cls(
            sampling=SamplingSettings(
                temperature=config.temperature,
                top_p=config.top_p,
                max_tokens=config.max_tokens,
                # What the engine can hold and the trainer can pack: longer answers end with `length`.
                max_context=min(config.max_model_len, config.seq_len),
            ),
            free_lane_after_generation=config.free_lane_after_generation,
            # A lane may be held for a whole generation, and a dead server may have to come back first.
            lane_timeout=config.request_timeout_seconds + config.inference_start_timeout_seconds,
            max_infrastructure_retries=MAX_INFRASTRUCTURE_RETRIES,
            priority_by_turn=config.vllm_scheduling_policy == "priority",
        )


@dataclass(slots=True)
class RolloutTask:
    """The prompt of one sample and the identity that its record, its request ids and its seeds come from."""

    sample_id: str
    group_id: int
    sample_index: int
    environment: str
    environment_key: str
    item_index: int
    prompt_token_ids: list[int]
    seed_of_turn: Callable[[int], int]
    lane_key: int | None = None
    """What `Lanes` knows the group by, if not its id: a draw that is asked again is another group to them."""

    @property
    def lane_group(self) -> int:
        return self.group_id if self.lane_key is None else self.lane_key


class Rollout:
    """One sample under way. `trajectory` is what there is of it so far; `run` ends with it whole.

    `cancelled` is set by `cancel`, and then `run` ends as soon as it can, with the tokens that there are.
    """

    def __init__(
        self,
        task: RolloutTask,
        *,
        lanes: Lanes,
        engine_of: Callable[[int], Engine],
        environments: EnvironmentPool,
        settings: RolloutSettings,
        on_engine_failure: Callable[[int, InfrastructureError], None],
    ) -> None:
        self.task = task
        self.trajectory = Trajectory(
            task.sample_id, task.group_id, task.sample_index, task.environment, started_at=time.time()
        )
        self._lanes = lanes
        self._engine_of = engine_of
        self._environments = environments
        self._settings = settings
        self._on_engine_failure = on_engine_failure
        self._in_engine: tuple[int, str, int] | None = None
        self._running: asyncio.Task[Any] | None = None

    async def run(self) -> Trajectory:
        """Run the sample to its end and return it: scored, masked or cancelled.

        Raises DeadlineExceeded when no lane comes free within `lane_timeout`: that is the run's trouble, not the
        sample's.
        """
        trajectory = self.trajectory
        self._running = asyncio.current_task()
        try:
            await self._play()
        except (EnvironmentFailure, InfrastructureError) as error:
            if not trajectory.cancelled:
                trajectory.failure_kind = "environment" if isinstance(error, EnvironmentFailure) else "infrastructure"
                trajectory.failure_message = str(error)
        except asyncio.CancelledError:
            if not trajectory.cancelled:
                raise
            assert self._running is not None
            self._running.uncancel()
        trajectory.finished_at = time.time()
        return trajectory

    def cancel(self) -> tuple[int, str] | None:
        """Give the sample up. Returns (server, request id) of the request that the caller must abort in the engine.

        None: no engine works for it, and the wait that it is in has been ended here.
        """
        self.trajectory.cancelled = True
        if self._in_engine is not None:
            return self._in_engine[:2]
        if self._running is not None:
            self._running.cancel()
        return None

    def oldest_version(self) -> int | None:
        """Version of the oldest token that this sample trains if it ends well; None while it has none.

        A request in the engine counts with the version that its server held when it was sent.
        """
        oldest = self.trajectory.version_range[0]
        versions = [oldest] if oldest >= 0 else []
        if self._in_engine is not None:
            versions.append(self._in_engine[2])
        return min(versions, default=None)

    async def _play(self) -> None:
        task, trajectory, settings = self.task, self.trajectory, self._settings
        added_token_ids = task.prompt_token_ids
        while not trajectory.cancelled:
            turn_index = len(trajectory.turns)
            prompt_token_ids = trajectory.next_prompt(added_token_ids)
            room = settings.sampling.max_context - len(prompt_token_ids)
            if room <= 0:
                what = f"the prompt of turn {turn_index} fills the context (max_model_len, seq_len)"
                raise EnvironmentFailure(what)
            started_at = time.time()
            lane, generation = await self._generate(turn_index, prompt_token_ids, room)
            try:
                if settings.free_lane_after_generation:
                    self._lanes.release(lane)
                trajectory.generated_at = time.time()
                turn = Turn(added_token_ids, generation, started_at=started_at, ended_at=trajectory.generated_at)
                trajectory.turns.append(turn)
                if trajectory.cancelled:
                    return
                advance: Advance = await self._environments.advance(
                    task.environment_key,
                    task.item_index,
                    generation.token_ids_N,
                    generation.finish_reason,
                    for_eval=settings.for_eval,
                )
            finally:
                if not settings.free_lane_after_generation:
                    self._lanes.release(lane)
            turn.text = advance.completion_text
            if advance.done:
                trajectory.reward = advance.reward
                return
            added_token_ids = advance.append_token_ids

    async def _generate(self, turn_index: int, prompt_token_ids: list[int], room: int) -> tuple[Lease, Generation]:
        """Sample one turn, again on a fresh lane after each infrastructure failure. The returned lane is still held."""
        task, trajectory, settings = self.task, self.trajectory, self._settings
        sampling = settings.sampling
        while True:
            lane = await self._lanes.acquire(task.lane_group, turn=turn_index, timeout=settings.lane_timeout)
            trajectory.server_index, trajectory.lane = lane.server, lane.slot
            try:
                request = GenerateRequest(
                    request_id=f"{task.sample_id}.{turn_index}.{trajectory.num_infrastructure_retries}",
                    prompt_token_ids=prompt_token_ids,
                    max_tokens=min(sampling.max_tokens, room),
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    seed=task.seed_of_turn(turn_index),
                    priority=turn_index if settings.priority_by_turn else 0,
                )
                engine = self._engine_of(lane.server)
                self._in_engine = (lane.server, request.request_id, engine.held_version)
                try:
                    generation = await engine.generate(request)
                finally:
                    self._in_engine = None
                if generation.finish_reason == "abort" and not trajectory.cancelled:
                    raise InfrastructureError(f"server {lane.server} aborted request {request.request_id} by itself")
                return lane, generation
            except InfrastructureError as error:
                # Reported first: the lane must not go to a waiter on a server that has just failed.
                self._on_engine_failure(lane.server, error)
                self._lanes.release(lane)
                trajectory.num_infrastructure_retries += 1
                if trajectory.cancelled or trajectory.num_infrastructure_retries > settings.max_infrastructure_retries:
                    raise
            except BaseException:
                self._lanes.release(lane)
                raise


async def run_rollout(
    task: RolloutTask,
    *,
    lanes: Lanes,
    engine_of: Callable[[int], Engine],
    environments: EnvironmentPool,
    settings: RolloutSettings,
    on_engine_failure: Callable[[int, InfrastructureError], None],
) -> Trajectory:
    """Run one sample to its end, when nobody needs to cancel it on the way; see `Rollout.run`."""
    return await Rollout(
        task,
        lanes=lanes,
        engine_of=engine_of,
        environments=environments,
        settings=settings,
        on_engine_failure=on_engine_failure,
    ).run()
