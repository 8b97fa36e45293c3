"""Reads the argument `reward` of `dataset`, and calls reward functions.

The terms of `reward` are a weighted sum, and each is a metric. Functions have the signature of TRL's:
`f(prompts, completions, **columns) -> list[float]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from telescope.environments.math_problems import ANSWERS_KEY
from telescope.environments.records import ENV_NAME_KEY, Sample, assistant_message
from telescope.environments.user_code import call_with_declared, load_function, required_parameters
from telescope.errors import UserError
from telescope.utils.text import did_you_mean

COMPARISONS = ("math", "exact", "regex")
GIVEN = ("prompts", "completions", "log_extra", "log_metric")
"""Arguments besides the columns. What TRL's `log_extra` gets is not recorded."""
HIDDEN = (ENV_NAME_KEY, ANSWERS_KEY, "prompt", "completion")
"""Keys of the metadata that are not passed. TRL passes the last two as prompts and completions."""


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
        weights=dict(zip(metrics, map(float, weights), strict=True)),  # 1.0 may be in quotation marks
    )


def refuse_missing_columns(name: str, function: Callable[..., Any], path: str, columns: list[str]) -> None:
    """Raises `UserError` if the function needs an argument that is not a column."""
    known = (*GIVEN, *columns)
    for needed in required_parameters(function):
        if needed in ("completion_ids", "trainer_state") and needed not in known:
            raise UserError(
                f"dataset: the reward {name} needs {needed!r} of TRL, which no reward gets here. Use the text of "
                "completions; overlong_penalty_factor subtracts from long ones by their tokens."
            )
        if needed not in known:
            raise UserError(
                f"dataset: the reward {name} needs {needed!r}, which is no column of {path}."
                f"{did_you_mean(needed, known)} It has: {', '.join(columns)}. Write it as {name}(prompts, completions, "
                "**columns), which returns a list of one number."
            )


def call_function(function: Callable[..., Any], text: str, sample: Sample, metrics: dict[str, float]) -> Any:
    """Returns a function's result for one completion, or an awaitable of it, for `read_reward`.

    The completion is a list of messages if the prompt is, as in TRL. `log_metric` adds to `metrics`.
    """
    completion = text if isinstance(sample.prompt, str) else [assistant_message(text)]
    arguments: dict[str, Any] = {key: [value] for key, value in sample.metadata.items() if key not in HIDDEN}
    arguments |= {"log_extra": lambda *_: None, "log_metric": metrics.__setitem__}
    arguments |= {"prompts": [sample.prompt], "completions": [completion]}
    return call_with_declared(function, **arguments)


def read_reward(name: str, function: Callable[..., Any] | None, returned: Any) -> float:
    """Returns the reward in a function's result for one completion. None in a list (not applicable) becomes 0."""
    value = returned[0] if isinstance(returned, list | tuple) and len(returned) == 1 else returned
    try:
        number = 0.0 if value is None and returned is not None else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        code = getattr(function, "__code__", None)
        place = f" at {code.co_filename}:{code.co_firstlineno}" if code else ""
        raise TypeError(
            f"the reward {name}{place} returned {str(returned)[:80]!r} for one completion, not a list of one number"
        )
    return number
