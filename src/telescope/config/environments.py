"""Entries of `environments` and `evals`, and the environments of a run.

An entry names an environment (or an eval) and its settings. The schema imports no user code, so it does not check that
the name exists; `telescope.config.preflight` does, before anything starts. `environment_keys` lists the environments
that a config needs, with their names in the pool. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator, model_validator

from telescope.config.base import Section, Steps, Text, Tokens, refuse
from telescope.environments.types import EnvironmentInfo, EnvironmentSpec
from telescope.errors import ConfigError
from telescope.evals.base import eval_spec
from telescope.utils.text import did_you_mean, is_misspelled

if TYPE_CHECKING:
    from telescope.config import TelescopeConfig


LARGEST_K = 4096  # largest k of pass@k; more samples of each item are a typing error


class EnvironmentEntry(Section):
    """One environment to train on."""

    name: Text
    """Environment name: one that ships here or lies in `environments_path`, or `package.module:Class`."""
    weight: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Sampling weight. The share of prompts from this environment is its weight over the sum of all weights."""
    reward_min: float | None = None
    """Smallest reward to expect. Scales charts, and rewards too if `normalize_rewards` is on. Null: what the class
    declares."""
    reward_max: float | None = None
    """Largest reward to expect. Scales charts, and rewards too if `normalize_rewards` is on. Null: what the class
    declares."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor and `load_dataset`. A name that
    neither declares becomes an attribute; a misspelled one is an error."""

    @model_validator(mode="after")
    def _reward_range_is_ordered(self) -> EnvironmentEntry:
        if self.reward_min is not None and self.reward_max is not None and self.reward_min >= self.reward_max:
            raise ValueError(f"reward_min ({self.reward_min}) must be below reward_max ({self.reward_max})")
        return self


class EvalEntry(Section):
    """One evaluation, before, during and after training."""

    name: Text
    """Eval name: a dedicated eval such as `math500`, or an environment's name."""
    eval_every: Steps = 10
    """Training steps between two runs of this eval."""
    num_samples: Annotated[
        int,
        Field(ge=-1, le=2**31),
        refuse(lambda n: n == 0 and "0 samples evaluate nothing; use -1 for the full dataset"),
    ] = -1
    """Samples to evaluate, the first ones of the dataset. -1: the full dataset."""
    separate_eval_samples: bool = False
    """Keep the evaluated samples out of training when the same environment is trained on. Needs `num_samples` above
    0."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the eval or environment, as in `environments`."""
    pass_k: dict[str, Any] = Field(default_factory=dict)
    """pass@k and pass^k: `{at_k: {metrics: [correct], k: [1, 8]}, pow_k: {metrics: [correct], k: [8]}}`. Every item is
    sampled as often as the largest k. A sample passes when the metric is 1 or more."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Sampling temperature of this eval. 0 is greedy; null takes the training temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus sampling of this eval, in (0, 1]. Null takes the training value."""
    max_tokens: Tokens | None = None
    """Longest answer of this eval, in tokens. Null takes the training value."""

    @field_validator("pass_k")
    @classmethod
    def _pass_k_is_well_formed(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key, spec in value.items():
            if key not in ("at_k", "pow_k"):
                raise ValueError(f"unknown key {key!r}; the keys are at_k (pass@k) and pow_k (pass^k)")
            if not isinstance(spec, dict) or set(spec) != {"metrics", "k"}:
                raise ValueError(f"{key} must hold exactly `metrics` and `k`, as in {{metrics: [correct], k: [8]}}")
            metrics, ks = spec["metrics"], spec["k"]
            if not isinstance(metrics, list) or not metrics or not all(isinstance(m, str) and m for m in metrics):
                raise ValueError(f"{key}.metrics must be a list of metric names, such as [correct]")
            if not isinstance(ks, list) or not ks or not all(type(k) is int and 1 <= k <= LARGEST_K for k in ks):
                raise ValueError(
                    f"{key}.k must be a list of whole numbers from 1 to {LARGEST_K}, such as [1, 8]: every item is "
                    "sampled as often as the largest"
                )
        return value

    @model_validator(mode="after")
    def _separate_samples_are_counted(self) -> EvalEntry:
        if self.separate_eval_samples and self.num_samples == -1:
            raise ValueError(
                "separate_eval_samples reserves the first num_samples samples for this eval, and num_samples is -1, "
                "which would leave none for training; set num_samples to how many to reserve"
            )
        return self


@dataclass(frozen=True)
class EnvironmentKeys:
    """Names of the environments in the pool. One key per training entry and one per eval entry."""

    specs: list[EnvironmentSpec]
    training: list[str]
    evals: list[str]


def environment_keys(config: TelescopeConfig) -> EnvironmentKeys:
    """Returns one environment per training entry. An eval of the same name with equal or no settings shares it."""
    specs: list[EnvironmentSpec] = []
    for index, entry in enumerate(config.environments):
        twice = sum(other.name == entry.name for other in config.environments) > 1
        key = f"{entry.name}#{index}" if twice else entry.name
        specs.append(EnvironmentSpec(entry.name, dict(entry.kwargs), entry.reward_min, entry.reward_max, key=key))
    trained, evals = list(specs), []
    for index, each in enumerate(config.evals):
        spec = next((s for s in trained if s.name == each.name and each.kwargs in ({}, s.kwargs)), None)
        if spec is None:
            spec = eval_spec(each.name, dict(each.kwargs), key=f"eval/{each.name}#{index}")
            specs.append(spec)
        evals.append(spec.key)
    return EnvironmentKeys(specs, [spec.key for spec in trained], evals)


def num_eval_items(entry: EvalEntry, available: int) -> int:
    """Returns the number of items of an eval. Raises ConfigError when there are fewer than `num_samples`."""
    if entry.num_samples > available:
        raise ConfigError(
            f"evals: num_samples of {entry.name!r} is {entry.num_samples}, and its dataset has {available} items. "
            "Lower it, or set it to -1 for all items"
        )
    return available if entry.num_samples == -1 else entry.num_samples


def check_eval_items(config: TelescopeConfig, keys: EnvironmentKeys, infos: Mapping[str, EnvironmentInfo]) -> list[str]:
    """Checks the evals against the loaded environments, by their keys. Returns remarks.

    Raises ConfigError for an eval with too few items, one that leaves none of an environment's to train on, or one
    whose `pass_k` misspells a metric.
    """
    found = []
    for entry, key in zip(config.evals, keys.evals, strict=True):
        declared, size = {"reward", *infos[key].metrics_ranges}, infos[key].num_samples
        unknown = {name for spec in entry.pass_k.values() for name in spec["metrics"] if name not in declared}
        for name in sorted(unknown):
            problem = f"evals: pass_k of {entry.name!r} names the metric {name!r}, which it does not declare"
            if is_misspelled(name, declared):
                raise ConfigError(f"{problem}.{did_you_mean(name, declared)}")
            found.append(f"{problem} (declared are {', '.join(sorted(declared))}): without it, the eval fails.")
        num_items = num_eval_items(entry, size)
        if entry.separate_eval_samples and key in keys.training and num_items >= size:
            raise ConfigError(
                f"evals: num_samples of {entry.name!r} holds out all {size} items of the environment from "
                "training. Lower it, set separate_eval_samples: false, or use a larger dataset."
            )
    return found
