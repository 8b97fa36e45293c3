"""Warm-start examples of the calculator agent: conversations with tool calls.

Owns the choice of questions and of errors. Prompts, replies and the held-out split come from the environment.
Invariant: held-out questions never occur.
"""

from __future__ import annotations

import random
from typing import Any

from telescope.environments.calculator_agent.environment import CALL_CLOSE, CALL_OPEN, CalculatorAgentEnvironment
from telescope.environments.calculator_agent.questions import (
    Question,
    QuestionSettings,
    apply,
    draw_question,
    is_held_out,
)
from telescope.tiny_model.example import Example, Turn
from telescope.tiny_model.settings import TinyModelSettings

MARKUP = (CALL_OPEN, CALL_CLOSE)
"""Tokens that this task has beside those of every tiny model."""

_EARLY_ANSWER_SHARE = 0.25
"""Share of the wrong turns that answer where a call was due."""


class CalculatorExamples:
    """An endless sequence of conversations that follows from the settings' seed.

    Only a conversation that is right in every turn is worth anything here, so `wrong_share` is the mean number of wrong
    turns in a conversation: the more turns, the less often each of them goes wrong. A wrong turn asks for another
    operation or answers with another number; it keeps the form. What comes after goes on from what the calculator has
    really said.
    """

    def __init__(self, settings: TinyModelSettings) -> None:
        self._rng = random.Random(f"tiny model {settings.task} {settings.seed}")
        self._environment = CalculatorAgentEnvironment(prompt_style="short")
        self._settings = question_settings(settings)

    def draw(self, wrong_share: float) -> Example:
        """One conversation with `wrong_share` arbitrary turns on average."""
        question = self._draw()
        wrong_turn_share = wrong_share / (len(question.operators) + 1)
        turns: list[Turn] = []
        value = question.numbers[0]
        said: list[dict[str, Any]] = list(self._environment.get_initial_prompt(self._environment.sample_of(question)))
        for operator, number in zip(question.operators, question.numbers[1:], strict=True):
            asked, value = f"{value}{operator}{number}", apply(value, operator, number)
            if self._rng.random() < wrong_turn_share:
                other = self._draw()
                if self._rng.random() < _EARLY_ANSWER_SHARE:
                    return Example((*turns, Turn(said, _answer(other.answer))))
                asked, value = other.steps[0]
            turns.append(Turn(said, f"{CALL_OPEN}{asked}{CALL_CLOSE}"))
            said = [{"role": "tool", "content": str(value)}]
        wrong = self._rng.random() < wrong_turn_share
        return Example((*turns, Turn(said, _answer(self._draw().answer if wrong else value))))

    def _draw(self) -> Question:
        while True:
            question = draw_question(self._settings, self._rng)
            if not is_held_out(question):
                return question


def question_settings(settings: TinyModelSettings) -> QuestionSettings:
    """The questions that this model is made for."""
    return QuestionSettings(1, settings.num_numbers - 1, settings.max_number)


def _answer(number: int) -> str:
    return f"<answer>{number}</answer>"
