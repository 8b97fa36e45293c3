"""Entries of `environments` and `evals`.

An entry names an environment (or an eval) and its settings. The schema imports no user code, so it does not check that
the name exists; `telescope.orchestrator.preflight` does, before anything starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from telescope.config.base import Section, Steps, Text, Tokens, refuse

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


def distinct_names(entries: Sequence[Any]) -> list[str]:
    """Returns one name per entry of `environments`: its name, or `name#number` where several entries share it."""
    names = [entry.name for entry in entries]
    return [f"{name}#{number}" if names.count(name) > 1 else name for number, name in enumerate(names)]
