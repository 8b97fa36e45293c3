"""Reads the argument `reward` of `dataset`: the terms of its weighted sum, each a metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from telescope.environments.user_code import load_function
from telescope.errors import UserError

COMPARISONS = ("math", "exact", "regex")


@dataclass(frozen=True)
class Terms:
    """`weights` and `functions` are by metric: `correct` for the comparison, else the name of the function or term."""

    compares: str | None
    """`math`, `exact`, `regex`, or None."""
    judges: bool
    runs_tests: bool
    functions: dict[str, Callable[..., Any]]
    weights: dict[str, float]

    @property
    def needs_answer(self) -> bool:
        return self.compares in ("math", "exact")

    def total(self, values: Mapping[str, float]) -> float:
        """Returns the reward of an answer with these metrics, other metrics ignored."""
        return math.fsum(weight * values[name] for name, weight in self.weights.items())

    def __str__(self) -> str:
        names = [(self.compares or name) if name == "correct" else name for name in self.weights]
        terms = zip(names, self.weights.values(), strict=True)
        return " + ".join(name if weight == 1 else f"{weight:g} x {name}" for name, weight in terms)


def read_terms(
    reward: str | list[str] | dict[str, float], *, pattern: str | None, criteria: object, code: object
) -> Terms:
    """Returns the terms of `reward`. Raises `UserError` for a value, or for an argument of a term that it lacks."""
    names = [reward] if isinstance(reward, str) else list(reward)
    compared = [name for name in names if ":" not in name and name not in ("judge", "code")]
    if len(compared) > 1 or not names or set(compared) - set(COMPARISONS):
        raise UserError(
            f"dataset: reward is {reward!r}; use math, exact or regex, package.module:function, judge, code, or a "
            "list or mapping with at most one of the first three."
        )
    for argument, value, use in (("criteria", criteria, "judge"), ("code", code, "code")):
        if value is not None and use not in names:
            raise UserError(f"dataset: {argument} belongs to reward: {use}, and reward is {reward!r}. Leave it out.")
    if (pattern is None) == ("regex" in compared):
        raise UserError(f"dataset: reward is {reward!r} and pattern is {pattern!r}; reward: regex needs a pattern.")
    metrics = ["correct" if name in compared else name.rpartition(":")[2] for name in names]
    taken = [*metrics, *(["format"] if compared else [])]
    if twice := [metric for metric in taken if taken.count(metric) > 1]:
        raise UserError(f"dataset: reward has two metrics named {twice[0]!r}. Rename a function.")
    weights = reward.values() if isinstance(reward, dict) else [1.0] * len(names)
    places = {metric: name for metric, name in zip(metrics, names, strict=True) if ":" in name}
    return Terms(
        compares=compared[0] if compared else None,
        judges="judge" in names,
        runs_tests="code" in names,
        functions={metric: load_function(place, "dataset: the reward") for metric, place in places.items()},
        weights=dict(zip(metrics, weights, strict=True)),
    )
