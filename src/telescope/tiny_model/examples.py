"""Warm-start conversations of the calculator agent and of Countdown, with the answer to learn in each turn.

Some answers are right, others only have the right format. Prompts, replies and the held-out split come from the
environments. Invariant: held-out questions and puzzles never occur.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

from telescope.environments.calculator_agent import questions
from telescope.environments.calculator_agent.environment import CALL_CLOSE, CALL_OPEN, CalculatorAgentEnvironment
from telescope.environments.calculator_agent.questions import Question, QuestionSettings
from telescope.environments.countdown.environment import CountdownEnvironment
from telescope.environments.countdown.puzzles import is_held_out
from telescope.tiny_model.cache import TinyModelSettings


@dataclass(frozen=True, slots=True)
class Turn:
    """The messages since the last answer, and the answer to learn."""

    messages: list[dict[str, Any]]
    answer: str


Example = tuple[Turn, ...]
"""One conversation. The context of a turn contains the earlier answers, right or wrong."""

_EARLY_ANSWER_SHARE = 0.25
"""Share of the wrong turns that answer instead of calling the calculator."""


class CalculatorExamples:
    """An endless sequence of calculator conversations, determined by the settings' seed.

    Only a conversation that is right in every turn is useful, so `wrong_share` is the mean number of wrong turns per
    conversation: the more turns, the less often each is wrong. A wrong turn asks for another operation or answers with
    another number, in the right form. Later turns continue from what the calculator really returned.
    """

    def __init__(self, settings: TinyModelSettings) -> None:
        self._rng = random.Random(f"tiny model {settings.task} {settings.seed}")
        self._environment = CalculatorAgentEnvironment(prompt_style="short")
        self._settings = question_settings(settings)

    def draw(self, wrong_share: float) -> Example:
        """Returns one conversation with `wrong_share` arbitrary turns on average."""
        question = self._draw()
        wrong_turn_share = wrong_share / (len(question.operators) + 1)
        turns: list[Turn] = []
        value = question.numbers[0]
        said: list[dict[str, Any]] = list(self._environment.get_initial_prompt(self._environment.sample_of(question)))
        for operator, number in zip(question.operators, question.numbers[1:], strict=True):
            asked, value = f"{value}{operator}{number}", questions.apply(value, operator, number)
            if self._rng.random() < wrong_turn_share:
                other = self._draw()
                if self._rng.random() < _EARLY_ANSWER_SHARE:
                    return (*turns, Turn(said, _answer(other.answer)))
                asked, value = other.steps[0]
            turns.append(Turn(said, f"{CALL_OPEN}{asked}{CALL_CLOSE}"))
            said = [{"role": "tool", "content": str(value)}]
        wrong = self._rng.random() < wrong_turn_share
        return (*turns, Turn(said, _answer(self._draw().answer if wrong else value)))

    def _draw(self) -> Question:
        while True:
            question = questions.draw_question(self._settings, self._rng)
            if not questions.is_held_out(question):
                return question


def question_settings(settings: TinyModelSettings) -> QuestionSettings:
    return QuestionSettings(1, settings.num_numbers - 1, settings.max_number)


def _answer(number: int) -> str:
    return f"<answer>{number}</answer>"


def examples_of(settings: TinyModelSettings) -> CalculatorExamples | ExampleSource:
    return CalculatorExamples(settings) if settings.task == "calculator_agent" else ExampleSource(settings)


def markup_of(settings: TinyModelSettings) -> tuple[str, ...]:
    """Returns the tokens that only the settings' task needs."""
    return () if settings.task == "countdown" else (CALL_OPEN, CALL_CLOSE)


class ExampleSource:
    """An endless sequence of examples, determined by the settings' seed.

    The puzzles of a conversation are unrelated. The user puts the first; the later ones come from the user too or, in
    every second conversation, from a tool. A right answer adds some of the numbers and then subtracts the others, both
    in the order of the prompt, so every choice of signs has one spelling. If several choices reach the target, the
    first in a fixed order is taught. A wrong answer has arbitrary signs, and so is sometimes right; `wrong_share` is
    the share of wrong answers. In the task `mixed`, half of the conversations come from the calculator.
    """

    def __init__(self, settings: TinyModelSettings) -> None:
        self._settings = settings
        self._rng = random.Random(f"tiny model {settings.seed}")
        self._signs = [
            signs for signs in itertools.product((1, -1), repeat=settings.num_numbers) if any(s > 0 for s in signs)
        ]
        self._environment = CountdownEnvironment(**countdown_arguments(settings))
        self._calculator = CalculatorExamples(settings)

    def draw(self, wrong_share: float) -> Example:
        """Returns one conversation, each of whose answers is arbitrary with probability `wrong_share`."""
        rng = self._rng
        if self._settings.task == "mixed" and rng.random() < 0.5:
            return self._calculator.draw(wrong_share)
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
        return tuple(turns)

    def _draw_puzzle(self) -> tuple[tuple[int, ...], int]:
        rng = self._rng
        while True:
            numbers = tuple(rng.randint(1, self._settings.max_number) for _ in range(self._settings.num_numbers))
            target = _value(rng.choice(self._signs), numbers)
            if target >= 1 and not is_held_out(numbers, target):
                return numbers, target


def countdown_arguments(settings: TinyModelSettings) -> dict[str, Any]:
    """Returns the countdown environment's arguments that select this model's puzzles.

    The caller chooses `portion`: `train` to train, `heldout` to evaluate.
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
