"""What the warm start shows a model that is to use a calculator: turns of conversations with it, most of them right.

Owns the choice of questions and of the turn that is taught. The task, the wording of prompts and replies and the split
that keeps held-out questions apart are the calculator agent's. Invariant: no held-out question is ever shown.
"""

from __future__ import annotations

import random
from typing import Any

from telescope.environments.base import ChatMessage
from telescope.environments.calculator_agent.environment import CALL_CLOSE, CALL_OPEN, CalculatorAgentEnvironment
from telescope.environments.calculator_agent.questions import Question, QuestionSettings, draw_question, is_held_out
from telescope.tiny_model.example import Example
from telescope.tiny_model.settings import TinyModelSettings

MARKUP = (CALL_OPEN, CALL_CLOSE)
"""Tokens that this task has beside those of every tiny model."""


class CalculatorExamples:
    """An endless sequence of examples that follows from the settings' seed.

    An example is one turn: the conversation before it, all of it right, and what to say next. A wrong one asks for
    another operation or answers with another number; it keeps the form.
    """

    def __init__(self, settings: TinyModelSettings) -> None:
        self._rng = random.Random(f"tiny model {settings.task} {settings.seed}")
        self._environment = CalculatorAgentEnvironment(prompt_style="short")
        self._settings = question_settings(settings)

    def draw(self, wrong_share: float) -> Example:
        """One turn, which is wrong with a probability of `wrong_share` over the number of turns plus one: for the
        conversation to be right all of them have to be."""
        rng = self._rng
        question = self._draw()
        turns = [f"{CALL_OPEN}{asked}{CALL_CLOSE}" for asked, _ in question.steps]
        turns.append(_answer(question.answer))
        taught = rng.randrange(len(turns))
        messages: list[ChatMessage] = self._environment.get_initial_prompt(self._environment.sample_of(question))
        for turn, (_, value) in zip(turns[:taught], question.steps, strict=False):
            messages.append({"role": "assistant", "content": turn})
            messages.append({"role": "tool", "content": str(value)})
        wrong = rng.random() < wrong_share / (len(turns) + 1)
        return Example(messages, self._arbitrary() if wrong else turns[taught])

    def _arbitrary(self) -> str:
        other = self._draw()
        if self._rng.random() < 0.5:
            return f"{CALL_OPEN}{other.steps[0][0]}{CALL_CLOSE}"
        return _answer(other.answer)

    def _draw(self) -> Question:
        while True:
            question = draw_question(self._settings, self._rng)
            if not is_held_out(question):
                return question


def question_settings(settings: TinyModelSettings) -> QuestionSettings:
    """The questions that this model is made for."""
    return QuestionSettings(1, settings.num_numbers - 1, settings.max_number)


def calculator_arguments(settings: TinyModelSettings) -> dict[str, Any]:
    """Arguments of the calculator agent that put the questions which this model was made for.

    `portion` is left to the caller: `train` to train, `heldout` to evaluate.
    """
    questions = question_settings(settings)
    return {
        "prompt_style": "short",
        "min_operations": questions.min_operations,
        "max_operations": questions.max_operations,
        "max_number": questions.max_number,
        "operations": questions.operations,
    }


def _answer(number: int) -> str:
    return f"<answer>{number}</answer>"
