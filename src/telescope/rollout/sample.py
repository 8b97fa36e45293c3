"""One sample from prompt to scored trajectory: generate, let the environment answer, and so on until it is done.

Owns the turn loop and the retries after infrastructure failures. Does not own lanes, servers or environments: they come
in through `Lanes`, `Engine` and `EnvironmentPool`. A single-turn sample is a loop that ends after one turn.

Three kinds of failure, never mixed: a bad answer is a reward; an environment that fails masks the sample; an engine
that fails is asked again, elsewhere if need be, and masks the sample only when the retries are used up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

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


async def run_rollout(
    task: RolloutTask,
    *,
    lanes: Lanes,
    engine_of: Callable[[int], Engine],
    environments: EnvironmentPool,
    settings: RolloutSettings,
    on_engine_failure: Callable[[int, InfrastructureError], None],
) -> Trajectory:
    """Run one sample to its end and return it, scored or masked.

    Raises DeadlineExceeded when no lane comes free within `settings.lane_timeout`: that is the run's trouble, not the
    sample's.
    """
    trajectory = Trajectory(task.sample_id, task.group_id, task.sample_index, task.environment, started_at=time.time())
    added_token_ids = task.prompt_token_ids
    while True:
        turn_index = len(trajectory.turns)
        prompt_token_ids = trajectory.next_prompt(added_token_ids)
        room = settings.sampling.max_context - len(prompt_token_ids)
        if room <= 0:
            what = f"the prompt of turn {turn_index} fills the context (max_model_len, seq_len)"
            return _mask(trajectory, "environment", what)
        started_at = time.time()
        try:
            lane, generation = await _generate(
                task, turn_index, prompt_token_ids, room, trajectory, lanes, engine_of, settings, on_engine_failure
            )
        except InfrastructureError as error:
            return _mask(trajectory, "infrastructure", str(error))
        try:
            if settings.free_lane_after_generation:
                lanes.release(lane)
            trajectory.generated_at = time.time()
            turn = Turn(added_token_ids, generation, started_at=started_at, ended_at=trajectory.generated_at)
            trajectory.turns.append(turn)
            try:
                advance: Advance = await environments.advance(
                    task.environment_key,
                    task.item_index,
                    generation.token_ids_N,
                    generation.finish_reason,
                    for_eval=settings.for_eval,
                )
            except EnvironmentFailure as error:
                return _mask(trajectory, "environment", str(error))
        finally:
            if not settings.free_lane_after_generation:
                lanes.release(lane)
        turn.text = advance.completion_text
        if advance.done:
            trajectory.reward = advance.reward
            trajectory.finished_at = time.time()
            return trajectory
        added_token_ids = advance.append_token_ids


async def _generate(
    task: RolloutTask,
    turn_index: int,
    prompt_token_ids: list[int],
    room: int,
    trajectory: Trajectory,
    lanes: Lanes,
    engine_of: Callable[[int], Engine],
    settings: RolloutSettings,
    on_engine_failure: Callable[[int, InfrastructureError], None],
) -> tuple[Lease, Generation]:
    """Sample one turn, again on a fresh lane after each infrastructure failure. The returned lane is still held."""
    sampling = settings.sampling
    while True:
        lane = await lanes.acquire(task.group_id, turn=turn_index, timeout=settings.lane_timeout)
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
            generation = await engine_of(lane.server).generate(request)
            if generation.finish_reason == "abort":
                raise InfrastructureError(f"server {lane.server} aborted request {request.request_id} by itself")
            return lane, generation
        except InfrastructureError as error:
            # Reported first: the lane must not go to a waiter on a server that has just failed.
            on_engine_failure(lane.server, error)
            lanes.release(lane)
            trajectory.num_infrastructure_retries += 1
            if trajectory.num_infrastructure_retries > settings.max_infrastructure_retries:
                raise
        except BaseException:
            lanes.release(lane)
            raise


def _mask(trajectory: Trajectory, kind: str, message: str) -> Trajectory:
    trajectory.reward = None
    trajectory.failure_kind = kind
    trajectory.failure_message = message
    trajectory.finished_at = time.time()
    return trajectory
