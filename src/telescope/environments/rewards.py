"""A reward put together from named functions.

    rubric = Rubric()
    rubric.add_reward(correct, weight=1.0, golden_answer="answer", range_min=0.0, range_max=1.0)
    rubric.add_metric(num_words)
    result = await rubric.score(completion=completion, sample=sample)

Each function receives, of what `score` is given, only the arguments that it declares, and returns a number. Owns no
environment and no state; one rubric serves any number of samples at once.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from telescope.environments.base import RewardResult
from telescope.errors import UserError


@dataclass(slots=True, frozen=True)
class _Term:
    """A function of the rubric. `weight` None: a metric, which is recorded and not rewarded."""

    function: Callable[..., Any]
    name: str
    weight: float | None
    golden_answer: str | None
    range_min: float | None
    range_max: float | None
    invert: bool
    parameters: frozenset[str]
    takes_all: bool

    def selected(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments that the function declares."""
        if self.takes_all:
            return given
        return {name: value for name, value in given.items() if name in self.parameters}

    def normalised(self, value: float) -> float:
        """The value mapped from its range to 0..1 (and clipped), 1 being best; unchanged without a range."""
        if self.range_min is None or self.range_max is None:
            return -value if self.invert else value
        share = (value - self.range_min) / (self.range_max - self.range_min)
        share = min(1.0, max(0.0, share))
        return 1.0 - share if self.invert else share


class Rubric:
    """Weighted rewards and metrics.

    The total reward is the sum of weight x value over all rewards, where a value with a range (`range_min`,
    `range_max`) is first mapped to 0..1 and clipped there, and `invert` makes small values the good ones. Metrics, and
    rewards too, are recorded as the functions returned them.
    """

    def __init__(self) -> None:
        self._terms: list[_Term] = []

    def add_reward(
        self,
        func: Callable[..., Any],
        weight: float = 1.0,
        *,
        name: str | None = None,
        golden_answer: str | None = None,
        range_min: float | None = None,
        range_max: float | None = None,
        invert: bool = False,
    ) -> None:
        """Add a function, plain or async, to the total. `name` defaults to the function's own.

        `golden_answer` names what is recorded as the right answer under this name: `answer` (the sample's) or a key of
        the sample's metadata.
        """
        self._add(func, float(weight), name, golden_answer, range_min, range_max, invert)

    def add_metric(
        self,
        func: Callable[..., Any],
        *,
        name: str | None = None,
        golden_answer: str | None = None,
        range_min: float | None = None,
        range_max: float | None = None,
        invert: bool = False,
    ) -> None:
        """Add a function that is recorded and not rewarded; `invert` records its negative, or its share of the range
        that is missing."""
        self._add(func, None, name, golden_answer, range_min, range_max, invert)

    @property
    def metrics_ranges(self) -> dict[str, dict[str, float]]:
        """Declared ranges by name, as an environment's `metrics_ranges` has them."""
        ranges: dict[str, dict[str, float]] = {}
        for term in self._terms:
            bounds = {"min": term.range_min, "max": term.range_max}
            known = {key: value for key, value in bounds.items() if value is not None}
            if known:
                ranges[term.name] = known
        return ranges

    async def score(self, **arguments: Any) -> RewardResult:
        """Call every function with its share of `arguments` and add up. Async functions are awaited together.

        Give at least `sample`, from which golden answers are taken, and whatever the functions ask for (`completion`,
        `state`, ...). Raises what they raise, and `TypeError` for one that returns no number.
        """
        missing = {term.name: self._missing(term, arguments) for term in self._terms}
        for name, lacking in missing.items():
            if lacking:
                raise TypeError(f"the rubric's function {name!r} asks for {', '.join(lacking)}, which was not given")
        returned = [term.function(**term.selected(arguments)) for term in self._terms]
        waiting = [position for position, value in enumerate(returned) if inspect.isawaitable(value)]
        awaited = await asyncio.gather(*(returned[position] for position in waiting))
        for position, value in zip(waiting, awaited, strict=True):
            returned[position] = value

        total = 0.0
        metrics: dict[str, float] = {}
        golden: dict[str, str | None] = {}
        for term, value in zip(self._terms, returned, strict=True):
            number = _number(value, term.name)
            metrics[term.name] = number
            if term.weight is not None:
                total += term.weight * term.normalised(number)
            elif term.invert:
                metrics[term.name] = term.normalised(number)
            if term.golden_answer is not None:
                golden[term.name] = _golden(arguments.get("sample"), term.golden_answer)
        return RewardResult(total_reward=total, sample_metrics=metrics, golden_answers=golden)

    def _add(
        self,
        func: Callable[..., Any],
        weight: float | None,
        name: str | None,
        golden_answer: str | None,
        range_min: float | None,
        range_max: float | None,
        invert: bool,
    ) -> None:
        called = str(name or getattr(func, "__name__", type(func).__name__))
        if any(term.name == called for term in self._terms):
            raise UserError(f"The rubric has two functions called {called!r}. Give one of them another name.")
        if range_min is not None and range_max is not None and range_min >= range_max:
            raise UserError(f"The rubric's {called!r} has range_min {range_min}, which is not below {range_max}.")
        parameters = inspect.signature(func).parameters.values()
        names = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._terms.append(_Term(func, called, weight, golden_answer, range_min, range_max, invert, names, takes_all))

    def _missing(self, term: _Term, given: dict[str, Any]) -> list[str]:
        parameters = inspect.signature(term.function).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return [p.name for p in parameters if p.kind in kinds and p.default is p.empty and p.name not in given]


def _number(value: Any, name: str) -> float:
    if isinstance(value, str) or value is None:
        raise TypeError(f"the rubric's function {name!r} returned {value!r}, not a number")
    return float(value)


def _golden(sample: Any, source: str) -> str | None:
    if sample is None:
        return None
    if source == "answer":
        return str(sample.answer)
    value = sample.metadata.get(source)
    return None if value is None else str(value)
