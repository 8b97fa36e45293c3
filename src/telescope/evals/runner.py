"""Runs an eval: fixed items, sampled with the engines' current weights, scored by the environment.

Samples take the same path as in training (`rollout.sample`): the same request slots, engines and environment workers.
This module owns the choice of items and the averages, not when evals run or which weights the engines have.

Samples of an eval never reach the trainer: their group ids are negative, which training never uses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from telescope.config import EvalEntry
from telescope.environments.worker_pool.messages import PreparedPrompt
from telescope.environments.worker_pool.pool import EnvironmentPool
from telescope.errors import EnvironmentFailure, InfrastructureError
from telescope.rollout.sample import Rollout, RolloutSettings, RolloutTask, SamplingSettings
from telescope.rollout.trajectory import Trajectory
from telescope.rollout.types import Engine, RequestSlots


@dataclass(frozen=True)
class EvalItem:
    """One item of an eval, rendered and tokenized."""

    index: int
    prompt: PreparedPrompt


@dataclass(frozen=True)
class PlannedEval:
    """An eval of a run: its key in the environment pool, its items, and its sampling settings."""

    name: str
    environment_key: str
    items: list[EvalItem]
    sampling: SamplingSettings
    held_out: bool
    """Whether training never sees these items (`separate_eval_samples`)."""
    number: int = 0
    """Index among the evals of the run, some of which may have the same name."""
    is_multi_turn: bool = False


@dataclass(frozen=True)
class EvalResult:
    """Averages over the scored samples of one eval at one policy version. `metrics` includes `reward`."""

    name: str
    version: int
    num_items: int
    num_scored: int
    temperature: float
    metrics: dict[str, float]
    seconds: float
    held_out: bool

    @property
    def accuracy(self) -> float:
        """The main result: the environment's `correct` if it has one, else the mean reward."""
        return self.metrics.get("correct", self.metrics.get("reward", float("nan")))


async def plan_eval(
    entry: EvalEntry, environment_key: str, environments: EnvironmentPool, sampling: SamplingSettings, number: int = 0
) -> PlannedEval:
    """Renders the first `num_samples` items (all, when -1). The entry's settings override the run's sampling.

    Raises EnvironmentFailure when an item cannot be rendered: an eval that silently shrinks measures something else.
    """
    info = await environments.describe(environment_key)
    num_items = info.num_samples if entry.num_samples == -1 else min(entry.num_samples, info.num_samples)
    prompts = await asyncio.gather(*(environments.prepare(environment_key, index) for index in range(num_items)))
    settings = dataclasses.replace(
        sampling,
        temperature=sampling.temperature if entry.temperature is None else entry.temperature,
        top_p=sampling.top_p if entry.top_p is None else entry.top_p,
        max_tokens=sampling.max_tokens if entry.max_tokens is None else entry.max_tokens,
    )
    items = [EvalItem(index, prompt) for index, prompt in enumerate(prompts)]
    return PlannedEval(
        entry.name, environment_key, items, settings, entry.separate_eval_samples, number, info.is_multi_turn
    )


async def run_eval(
    plan: PlannedEval,
    *,
    version: int,
    slots: RequestSlots,
    engine_of: Callable[[int], Engine],
    environments: EnvironmentPool,
    settings: RolloutSettings,
    seed_of: Callable[[int, int], int],
    group_ids: itertools.count[int],
    on_engine_failure: Callable[[int, InfrastructureError], None],
    on_sample: Callable[[EvalItem, Trajectory], None],
) -> EvalResult:
    """Samples every item once and averages the metrics.

    `seed_of(item, turn)` seeds the requests; `on_sample` is called as each sample ends. Raises EnvironmentFailure when
    nothing at all could be scored.
    """
    started = time.monotonic()
    settings = dataclasses.replace(settings, sampling=plan.sampling, for_eval=True)

    async def one(item: EvalItem) -> Trajectory:
        group_id = -1 - next(group_ids)
        task = RolloutTask(
            sample_id=f"eval{plan.number}-{plan.name}-v{version}-{item.index}",
            group_id=group_id,
            sample_index=0,
            environment=plan.name,
            environment_key=plan.environment_key,
            item_index=item.index,
            prompt_token_ids=item.prompt.token_ids,
            seed_of_turn=lambda turn: seed_of(item.index, turn),
            is_multi_turn=plan.is_multi_turn,
        )
        trajectory = await Rollout(
            task, slots=slots, engine_of=engine_of, environments=environments, settings=settings,
            on_engine_failure=on_engine_failure,
        ).run()  # fmt: skip
        slots.forget_group(group_id)
        on_sample(item, trajectory)
        return trajectory

    trajectories = await asyncio.gather(*(one(item) for item in plan.items))
    values: dict[str, list[float]] = defaultdict(list)
    scored = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    for reward in scored:
        if reward.total_reward is not None:
            values["reward"].append(reward.total_reward)
        for name, value in reward.sample_metrics.items():
            values[name].append(value)
    if not scored:
        first = next((t.failure_message for t in trajectories), "the eval has no items")
        raise EnvironmentFailure(
            f"eval {plan.name!r}: none of its {len(plan.items)} samples could be scored; first: {first}"
        )
    return EvalResult(
        name=plan.name,
        version=version,
        num_items=len(plan.items),
        num_scored=len(scored),
        temperature=plan.sampling.temperature,
        metrics={name: float(np.mean(column)) for name, column in values.items()},
        seconds=time.monotonic() - started,
        held_out=plan.held_out,
    )
