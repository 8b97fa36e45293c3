"""A reward built from named functions.

    rubric = Rubric()
    rubric.add_reward(correct, weight=1.0, golden_answer="answer").add_metric(num_words, range_min=0, range_max=200)
    result = await rubric.score(completion=completion, sample=sample)

A function receives only the arguments that it declares, of `completion`, `sample`, `state` and `eos_token`. It returns
a number, or a number and the golden answer to record. A rubric has no state: it may score many samples concurrently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from telescope.environments.records import RewardResult, RolloutState, Sample
from telescope.environments.serialization import finite_number
from telescope.environments.user_code import call_with_declared, gather_or_cancel, maybe_await, required_parameters
from telescope.errors import UserError

ARGUMENTS = ("completion", "sample", "state", "eos_token")
"""What a function may declare."""


@dataclass(slots=True, frozen=True)
class _Term:
    """A function of the rubric. `weight` None: a metric, which does not count in the reward."""

    function: Callable[..., Any]
    name: str
    weight: float | None
    golden_answer: Any
    chart: dict[str, float]
    """The range for charts, in the form of `metrics_ranges`."""


class Rubric:
    """Weighted reward functions and metrics.

    The total reward is the sum of weight x value over the reward functions. Every value is recorded under the name of
    its function. `range_min`, `range_max` and `invert` (lower is better) only describe charts.
    """

    def __init__(self) -> None:
        self._terms: list[_Term] = []

    def add_reward(
        self,
        func: Callable[..., Any],
        weight: float | None = 1.0,
        *,
        name: str | None = None,
        golden_answer: Any = None,
        range_min: float | None = None,
        range_max: float | None = None,
        invert: bool = False,
    ) -> Rubric:
        """Adds a plain or async function to the total. Returns the rubric.

        Without `weight` it is a metric. `name` defaults to the function's name. If two functions have the same name,
        both count, and the last value is recorded. `golden_answer` is recorded under that name: an attribute of the
        sample (`"answer"`) or a key of its metadata stands for that value, anything else for itself.
        """
        name = str(name or getattr(func, "__name__", type(func).__name__))
        if unknown := [parameter for parameter in required_parameters(func) if parameter not in ARGUMENTS]:
            raise UserError(
                f"The rubric's {name!r} needs {unknown[0]!r}, but it can take {', '.join(ARGUMENTS)} alone. Take "
                "sample, which has prompt, answer and metadata."
            )
        if range_min is not None and range_max is not None and range_min > range_max:
            raise UserError(f"The rubric's {name!r} has range_min {range_min}, which is above range_max {range_max}.")
        chart = {key: value for key, value in (("min", range_min), ("max", range_max)) if value is not None}
        if invert:
            chart["invert"] = True
        self._terms.append(_Term(func, name, None if weight is None else float(weight), golden_answer, chart))
        return self

    def add_metric(self, func: Callable[..., Any], **options: Any) -> Rubric:
        """Adds a function that is recorded but does not count in the reward. Options as in `add_reward`."""
        return self.add_reward(func, None, **options)

    @property
    def metrics_ranges(self) -> dict[str, dict[str, float]]:
        """Returns the declared ranges by name, in the form of an environment's `metrics_ranges`."""
        return {term.name: dict(term.chart) for term in self._terms if term.chart}

    async def score(
        self,
        *,
        completion: Any = None,
        sample: Sample | None = None,
        state: RolloutState | None = None,
        eos_token: str = "",
        extra_sample_metrics: dict[str, float] | None = None,
        extra_golden_answers: dict[str, str | None] | None = None,
        extra_info_turns: list[dict[str, Any]] | None = None,
        extra_sample_tags: dict[str, str] | None = None,
    ) -> RewardResult:
        """Calls all functions and sums their values. Merges the extras into the result.

        Async functions are awaited together. Without `sample`, the sample is taken from `state`. Raises what a function
        raises, which fails the sample, and `TypeError` for a function that does not return a number.
        """
        if sample is None and state is not None:
            sample = state.sample
        arguments = dict(zip(ARGUMENTS, (completion, sample, state, eos_token), strict=True))
        values = [call_with_declared(term.function, **arguments) for term in self._terms]
        returned = await gather_or_cancel(map(maybe_await, values))

        counted: list[float] = []
        metrics: dict[str, float] = {}
        golden: dict[str, str | None] = {}
        for term, value in zip(self._terms, returned, strict=True):
            if (source := term.golden_answer) is not None:
                if sample is not None and isinstance(source, str):
                    source = vars(sample).get(source, sample.metadata.get(source, source))
                golden[term.name] = None if source is None else str(source)
            if isinstance(value, tuple) and len(value) == 2:
                value, answer = value
                golden[term.name] = None if answer is None else str(answer)
            metrics[term.name] = number = finite_number(value, f"the result of the rubric's {term.name!r}")
            counted.append((term.weight or 0.0) * number)
        return RewardResult(
            total_reward=math.fsum(counted),  # rounds once, so that a full reward reaches its maximum
            sample_metrics=metrics | (extra_sample_metrics or {}),
            golden_answers=golden | (extra_golden_answers or {}),
            info_turns=list(extra_info_turns or []),
            sample_tags=dict(extra_sample_tags or {}),
        )
