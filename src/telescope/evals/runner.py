"""Runs an eval: fixed items, sampled with the engines' current weights and scored by the environment.

Samples take the same path as in training (`rollout.sample`), with the same request slots, engines and environment
workers. This module owns the choice of items and the averages. It does not decide when evals run or which weights the
engines have.

Samples of an eval never reach the trainer: their group ids are negative, which training never uses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from telescope.config import TelescopeConfig
from telescope.environments.types import PreparedPrompt
from telescope.environments.user_code import gather_or_cancel
from telescope.errors import EnvironmentFailure
from telescope.evals.entries import EnvironmentKeys, check_eval_items, num_eval_items
from telescope.evals.statistics import (
    Estimate,
    accuracy_metric,
    count_failed_as_wrong,
    estimate_mean,
    metric_label,
    metrics_over_items,
    num_completions,
)
from telescope.rollout.pool import RolloutPool
from telescope.rollout.sample import RolloutSettings, RolloutTask, SamplingSettings
from telescope.rollout.trajectory import Trajectory


@dataclass(frozen=True)
class EvalItem:
    """One item of an eval, rendered and tokenized."""

    index: int
    prompt: PreparedPrompt


@dataclass(frozen=True)
class PlannedEval:
    """An eval of a run: pool key, items and sampling settings."""

    name: str
    environment_key: str
    items: list[EvalItem]
    sampling: SamplingSettings
    held_out: bool
    """Whether training never sees these items (`separate_eval_samples`)."""
    number: int = 0
    """Index among the run's evals, because several may have the same name."""
    pass_k: dict[str, Any] = field(default_factory=dict)
    session: str = ""
    """Id of a standalone evaluation, which makes ids unique in the run's record. Empty for the run's own evals."""

    @property
    def num_completions(self) -> int:
        return num_completions(self.pass_k)

    @property
    def num_samples(self) -> int:
        """Returns the number of completions of all items."""
        return len(self.items) * self.num_completions

    def id_at(self, version: int) -> str:
        """Returns this eval's id in the record at a policy version."""
        return f"{self.session}{'-' if self.session else ''}eval{self.number}-{self.name}-v{version}"


@dataclass(frozen=True)
class EvalResult:
    """Means over the items of one eval at one policy version. `metrics` includes `reward`.

    `num_scored` counts samples, of which each item has `num_completions`; the others failed and count as wrong.
    `by_item` is the accuracy of each item by its identity, and `estimate` is its mean with a confidence interval.
    `gain` is the paired difference to the eval's first result in this run. Both are None if undefined.
    """

    name: str
    version: int
    num_items: int
    num_scored: int
    temperature: float
    metrics: dict[str, float]
    seconds: float
    held_out: bool
    number: int = 0
    num_completions: int = 1
    by_item: dict[str, float] = field(default_factory=dict)
    estimate: Estimate | None = None
    gain: Estimate | None = None

    @property
    def metric(self) -> str:
        """Returns the name of the accuracy metric: `correct` if there is one, else `reward`."""
        return accuracy_metric(self.metrics)

    @property
    def label(self) -> str:
        """Returns what the main result is called, see `metric_label`."""
        return metric_label(self.metric)

    @property
    def accuracy(self) -> float:
        """Returns the main result: the mean of `metric` over the items."""
        return self.metrics.get(self.metric, float("nan"))

    @property
    def num_failed(self) -> int:
        """Returns the number of samples without a score."""
        return self.num_items * self.num_completions - self.num_scored

    @property
    def failures(self) -> str:
        """Returns the note beside the accuracy: ` (46 failed)`, ` (46 samples failed)` if items have several, or ""."""
        samples = " samples" if self.num_completions > 1 else ""
        return f" ({self.num_failed}{samples} failed)" if self.num_failed else ""


async def plan_evals(
    config: TelescopeConfig, keys: EnvironmentKeys, environments: RolloutPool, sampling: SamplingSettings
) -> list[PlannedEval]:
    """Plans every eval of the config, in order, and renders its items. Its settings override the run's `sampling`.

    Raises EnvironmentFailure when an item cannot be rendered, and the errors of `check_eval_items`.
    """
    infos = {key: await environments.describe(key) for key in keys.evals}
    check_eval_items(config, keys, infos)
    plans = []
    for number, (entry, key) in enumerate(zip(config.evals, keys.evals, strict=True)):
        num_items = num_eval_items(entry, infos[key].num_samples)
        prompts = await asyncio.gather(*(environments.prepare(key, index) for index in range(num_items)))
        items = [EvalItem(index, prompt) for index, prompt in enumerate(prompts)]
        own = {name: getattr(entry, name) for name in ("temperature", "top_p", "max_tokens")}
        settings = dataclasses.replace(sampling, **{name: value for name, value in own.items() if value is not None})
        plans.append(PlannedEval(entry.name, key, items, settings, entry.separate_eval_samples, number, entry.pass_k))
    return plans


async def run_eval(
    plan: PlannedEval,
    *,
    version: int,
    rollouts: RolloutPool,
    lane: str,
    settings: RolloutSettings,
    seed: tuple[int | str, ...],
    group_ids: itertools.count[int],
    on_sample: Callable[[EvalItem, Trajectory], None],
    finished: Mapping[tuple[int, int], Mapping[str, float]] | None = None,
    taken: Collection[str] = (),
) -> EvalResult:
    """Samples every item and averages the metrics.

    An item is sampled as often as `pass_k` needs, else once. Failed samples count as wrong. A request's seed is made
    from `seed`, item and completion; `on_sample` is called as each sample ends. `finished` has scores of samples to
    keep, by item and completion; `taken` are ids that no new sample may have. Raises EnvironmentFailure when no sample
    could be scored.
    """
    started = time.monotonic()
    settings = dataclasses.replace(settings, sampling=plan.sampling, for_eval=True)

    async def one(item: EvalItem, completion: int) -> Trajectory:
        group_id = -1 - next(group_ids)
        sample_id = f"{plan.id_at(version)}-{item.index}" + (f"-{completion}" if completion else "")
        while sample_id in taken:
            sample_id += "-again"
        task = RolloutTask(
            sample_id, group_id, completion, plan.name, plan.environment_key, item.index, item.prompt.token_ids,
            seed=(*seed, item.index, completion),
        )  # fmt: skip
        (trajectory,) = await rollouts.run([task], settings, lane)
        on_sample(item, trajectory)
        return trajectory

    scores = dict(finished or {})
    every = [(item, completion) for item in plan.items for completion in range(plan.num_completions)]
    missing = [(item, completion) for item, completion in every if (item.index, completion) not in scores]
    trajectories = await gather_or_cancel(one(item, completion) for item, completion in missing)
    for (item, completion), trajectory in zip(missing, trajectories, strict=True):
        scores[item.index, completion] = scores_of(trajectory) or {}
    samples: dict[str, list[Mapping[str, float]]] = defaultdict(list)
    """Metrics by the identity of the item: equal items count as one."""
    for item, completion in every:
        samples[item.prompt.sample_uid].append(scores[item.index, completion])
    if not any(scores.values()):
        first = next((t.failure_message for t in trajectories), "the eval has no items")
        raise EnvironmentFailure(
            f"eval {plan.name!r}: none of its {len(trajectories)} samples could be scored; first: {first}"
        )
    counted = count_failed_as_wrong(list(samples.values()), plan.pass_k)
    metrics = metrics_over_items(counted, plan.pass_k)
    metric = accuracy_metric(metrics)
    by_item = {
        uid: float(np.mean([score[metric] for score in completions]))
        for uid, completions in zip(samples, counted, strict=True)
        if metric in metrics
    }
    return EvalResult(
        plan.name, version, len(plan.items),
        num_scored=sum(metric in each if metric in metrics else bool(each) for each in scores.values()),
        temperature=plan.sampling.temperature, metrics=metrics, seconds=time.monotonic() - started,
        held_out=plan.held_out, number=plan.number, num_completions=plan.num_completions,
        by_item=by_item, estimate=estimate_mean(list(by_item.values())) if by_item else None,
    )  # fmt: skip


def scores_of(sample: Trajectory) -> dict[str, float] | None:
    """Returns a sample's metrics, including its reward. None if it has no score."""
    if (reward := sample.reward) is None:
        return None
    total = {} if reward.total_reward is None else {"reward": reward.total_reward}
    return total | reward.sample_metrics


Scores = dict[tuple[int, int], dict[str, float]]
"""Metrics by item and completion."""


class SamplesFile:
    """Scores of finished samples on disk, to continue an interrupted evaluation.

    Each sample is a line of JSON, written when it is scored; samples without a score are sampled again. Drops an
    incomplete last line, which a kill leaves, and samples whose rows are missing in the record, because a kill loses
    the newest rows. `recorded` has the ids of samples in each table that must have them. `model` is the identity of the
    current model.
    """

    def __init__(self, path: Path, recorded: Sequence[frozenset[str]]) -> None:
        self.model = ""
        self.taken = frozenset[str]().union(*recorded)
        """Ids of samples in the record. No new sample may have them."""
        self._finished: dict[tuple[str, int], dict[tuple[int, int], tuple[str, dict[str, float]]]] = defaultdict(dict)
        end = 0
        if path.is_file():
            for line in path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                row = json.loads(line)
                if "sample_id" not in row or all(row["sample_id"] in ids for ids in recorded):  # old files lack it
                    key = row["item"], row["completion"]
                    self._finished[row["model"], row["eval"]][key] = row["uid"], row["scores"]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(end)

    def __enter__(self) -> SamplesFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def finished(self, plan: PlannedEval) -> Scores:
        """Returns the finished samples of the current model, without items that have changed."""
        uids = {item.index: item.prompt.sample_uid for item in plan.items}
        return {
            key: scores
            for key, (uid, scores) in self._finished[self.model, plan.number].items()
            if uids.get(key[0]) == uid
        }

    def has_all(self, model: str, plans: Sequence[PlannedEval]) -> bool:
        """Sets the current model. Returns whether all of its samples are finished."""
        self.model = model
        return all(len(self.finished(plan)) == plan.num_samples for plan in plans)

    def add(self, plan: PlannedEval, item: EvalItem, sample: Trajectory, scores: Mapping[str, float]) -> None:
        uid = item.prompt.sample_uid
        self._finished[self.model, plan.number][item.index, sample.sample_index] = uid, dict(scores)
        row: dict[str, Any] = {
            "model": self.model, "eval": plan.number, "name": plan.name, "item": item.index,
            "completion": sample.sample_index, "uid": uid, "sample_id": sample.sample_id, "scores": dict(scores),
        }  # fmt: skip
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
