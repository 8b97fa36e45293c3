"""Calls reward functions with TRL's signature: `f(prompts, completions, **columns) -> list[float]`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from telescope.environments.math_problems import ANSWERS_KEY
from telescope.environments.records import ENV_NAME_KEY, Sample, assistant_message
from telescope.environments.user_code import call_with_declared
from telescope.errors import UserError
from telescope.utils.text import did_you_mean

GIVEN = ("prompts", "completions", "log_extra", "log_metric")
"""Arguments besides the columns. What TRL's `log_extra` gets is not recorded."""
HIDDEN = (ENV_NAME_KEY, ANSWERS_KEY, "prompt", "completion")
"""Keys of the metadata that are not passed. TRL passes the last two as prompts and completions."""


def refuse_missing_columns(name: str, function: Callable[..., Any], path: str, columns: list[str]) -> None:
    """Raises `UserError` if the function needs an argument that is not a column."""
    for parameter in inspect.signature(function).parameters.values():
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL,
        )  # fmt: skip
        if needed and parameter.name not in (*GIVEN, *columns):
            if parameter.name in ("completion_ids", "trainer_state"):
                raise UserError(
                    f"dataset: the reward {name} needs {parameter.name!r} of TRL, which no reward gets here. Use the "
                    "text of completions; overlong_penalty_factor subtracts from long ones by their tokens."
                )
            raise UserError(
                f"dataset: the reward {name} needs {parameter.name!r}, which is no column of {path}."
                f"{did_you_mean(parameter.name, (*GIVEN, *columns))} It has: {', '.join(columns)}. Write it as "
                f"{name}(prompts, completions, **columns), which returns a list of one number."
            )


def call_function(function: Callable[..., Any], text: str, sample: Sample, metrics: dict[str, float]) -> Any:
    """Returns a function's result for one completion, or an awaitable of it, for `read_reward`.

    The completion is a list of messages if the prompt is, as in TRL. `log_metric` adds to `metrics`.
    """
    completion = text if isinstance(sample.prompt, str) else [assistant_message(text)]
    arguments: dict[str, Any] = {key: [value] for key, value in sample.metadata.items() if key not in HIDDEN}
    arguments |= {"log_extra": _ignore, "log_metric": metrics.__setitem__}
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


def _ignore(*_: Any) -> None:
    """Replaces the function with which TRL's rewards add columns to a table of completions."""
