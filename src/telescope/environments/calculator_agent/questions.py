"""Generates arithmetic questions, their steps, and the held-out split.

A question is computed from left to right: `12+7*3` means (12 + 7) * 3. Intermediate results are whole numbers and not
negative. The sequence is a pure function of the settings and the seed; whether a question is held out depends on the
question alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from telescope.environments.countdown.puzzles import OPERATIONS, Portion, distinct, in_held_out_fifth

LARGEST_RESULT = 999_999_999
"""Largest number that the calculator accepts."""


@dataclass(slots=True, frozen=True)
class Question:
    """The numbers of a question and the operators between them."""

    numbers: tuple[int, ...]
    operators: tuple[str, ...]

    @property
    def text(self) -> str:
        """Returns the question without spaces."""
        pairs = zip(self.operators, self.numbers[1:], strict=True)
        return str(self.numbers[0]) + "".join(f"{operator}{number}" for operator, number in pairs)

    @property
    def steps(self) -> list[tuple[str, int]]:
        """Returns the calculator calls, one operation each, with their results."""
        steps: list[tuple[str, int]] = []
        value = self.numbers[0]
        for operator, number in zip(self.operators, self.numbers[1:], strict=True):
            expression = f"{value}{operator}{number}"
            value = apply(value, operator, number)
            steps.append((expression, value))
        return steps

    @property
    def answer(self) -> int:
        return self.steps[-1][1]


@dataclass(slots=True, frozen=True)
class QuestionSettings:
    """Difficulty of the questions. All bounds are inclusive."""

    min_operations: int = 1
    max_operations: int = 2
    max_number: int = 20
    operations: str = "+-*"


def apply(left: int, operator: str, right: int) -> int:
    return int(OPERATIONS[operator](left, right))


def draw_question(settings: QuestionSettings, rng: random.Random) -> Question:
    """Returns a random question without negative intermediate results."""
    count = rng.randint(settings.min_operations, settings.max_operations)
    numbers = [rng.randint(1, settings.max_number)]
    operators: list[str] = []
    value = numbers[0]
    for _ in range(count):
        operator, number = rng.choice(settings.operations), rng.randint(1, settings.max_number)
        if operator == "-" and number > value:
            operator = "+" if "+" in settings.operations else "-"
            number = number if operator == "+" else rng.randint(0, value)
        operators.append(operator)
        numbers.append(number)
        value = apply(value, operator, number)
    return Question(tuple(numbers), tuple(operators))


def is_held_out(question: Question) -> bool:
    """Returns whether the question belongs to the held-out fifth."""
    return in_held_out_fifth(f"calculator_agent:{question.text}")


def generate_questions(settings: QuestionSettings, seed: int, portion: Portion = "all") -> Iterator[Question]:
    """Yields distinct questions of `portion`. Ends when no new ones are found."""
    rng = random.Random(f"calculator_agent {seed}")

    def admits(question: Question) -> bool:
        is_small = max(value for _, value in question.steps) <= LARGEST_RESULT
        return is_small and (portion == "all" or is_held_out(question) == (portion == "heldout"))

    return distinct(lambda: draw_question(settings, rng), admits)
