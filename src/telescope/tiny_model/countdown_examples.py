"""Warm-start examples of Countdown: prompts with answers.

Some answers are right, some only have the right format. `examples_of` returns the examples of any task. Owns the choice
of puzzles and the wording of answers. Prompts and the held-out split come from the environment. Invariant: held-out
puzzles never occur.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from telescope.environments.countdown.environment import CountdownEnvironment
from telescope.environments.countdown.puzzles import is_held_out
from telescope.tiny_model.calculator_examples import MARKUP, CalculatorExamples
from telescope.tiny_model.example import Example, Examples, Turn
from telescope.tiny_model.settings import TinyModelSettings


def examples_of(settings: TinyModelSettings) -> Examples:
    """The examples of the settings' task."""
    return CalculatorExamples(settings) if settings.task == "calculator_agent" else ExampleSource(settings)


def markup_of(settings: TinyModelSettings) -> tuple[str, ...]:
    """Tokens that the settings' task has of its own."""
    return MARKUP if settings.task == "calculator_agent" else ()


class ExampleSource:
    """An endless sequence of examples that follows from the settings' seed.

    The puzzles of a conversation have nothing to do with one another. The first is put by the user; the later ones by
    the user too or, in every second conversation, by a tool.

    A right answer adds some of the numbers and then subtracts the others, each in the order of the prompt, so that
    every choice of signs has one spelling; of several choices that reach the target the first in a fixed order is
    taught. A wrong one has arbitrary signs, and so is right now and then; `wrong_share` is that of answers.
    """

    def __init__(self, settings: TinyModelSettings) -> None:
        self._settings = settings
        self._rng = random.Random(f"tiny model {settings.seed}")
        self._signs = [
            signs for signs in itertools.product((1, -1), repeat=settings.num_numbers) if any(s > 0 for s in signs)
        ]
        self._environment = CountdownEnvironment(**countdown_arguments(settings))

    def draw(self, wrong_share: float) -> Example:
        """One conversation, each of whose answers is arbitrary with probability `wrong_share`."""
        rng = self._rng
        turns: list[Turn] = []
        later_role = rng.choice(("user", "tool")) if self._settings.num_turns > 1 else "user"
        for _ in range(self._settings.num_turns):
            numbers, target = self._draw_puzzle()
            right = next(signs for signs in self._signs if _value(signs, numbers) == target)
            shown = rng.choice(self._signs) if rng.random() < wrong_share else right
            messages = self._environment.build_messages(self._environment.question(numbers, target))
            if turns:
                messages[-1]["role"] = later_role
            turns.append(Turn(messages, f"<answer>{_spell(shown, numbers)}</answer>"))
        return Example(tuple(turns))

    def _draw_puzzle(self) -> tuple[tuple[int, ...], int]:
        rng = self._rng
        while True:
            numbers = tuple(rng.randint(1, self._settings.max_number) for _ in range(self._settings.num_numbers))
            target = _value(rng.choice(self._signs), numbers)
            if target >= 1 and not is_held_out(numbers, target):
                return numbers, target


def countdown_arguments(settings: TinyModelSettings) -> dict[str, Any]:
    """Arguments of the countdown environment that select this model's puzzles.

    `portion` is left to the caller: `train` to train, `heldout` to evaluate.
    """
    return {
        "dataset": "generated",
        "prompt_style": "short",
        "operations": "+-",
        "min_numbers": settings.num_numbers,
        "max_numbers": settings.num_numbers,
        "min_number": 1,
        "max_number": settings.max_number,
    }


def _value(signs: tuple[int, ...], numbers: tuple[int, ...]) -> int:
    return sum(sign * number for sign, number in zip(signs, numbers, strict=True))


def _spell(signs: tuple[int, ...], numbers: tuple[int, ...]) -> str:
    added = [str(number) for sign, number in zip(signs, numbers, strict=True) if sign > 0]
    subtracted = [f"-{number}" for sign, number in zip(signs, numbers, strict=True) if sign < 0]
    return "+".join(added) + "".join(subtracted)
