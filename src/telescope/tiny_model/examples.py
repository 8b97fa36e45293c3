"""What the warm start shows the model: Countdown prompts with answers, some right and some only in the right form.

Owns the choice of problems and answers. Does not own the wording of prompts or the task, which are the countdown
environment's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from telescope.tiny_model.settings import TinyModelSettings


@dataclass(frozen=True, slots=True)
class Example:
    """One chat: what the user asks and what the assistant is taught to say."""

    messages: list[dict[str, str]]
    answer: str


def _evaluate(signs: list[int], numbers: list[int]) -> int:
    return sum(sign * number for sign, number in zip(signs, numbers, strict=True))


def _write(signs: list[int], numbers: list[int]) -> str:
    """Added numbers in the order given, then the subtracted ones: one spelling for each set of signs."""
    added = [number for sign, number in zip(signs, numbers, strict=True) if sign > 0]
    taken = [number for sign, number in zip(signs, numbers, strict=True) if sign < 0]
    return " + ".join(str(number) for number in added) + "".join(f" - {number}" for number in taken)


def _draw_signs(rng: random.Random, count: int) -> list[int]:
    while True:
        signs = [rng.choice((1, -1)) for _ in range(count)]
        if any(sign > 0 for sign in signs):
            return signs


def draw_example(rng: random.Random, settings: TinyModelSettings) -> Example:
    """One example; wrong on purpose with probability `wrong_share`."""
    while True:
        numbers = [rng.randint(1, settings.max_number) for _ in range(settings.num_numbers)]
        signs = _draw_signs(rng, settings.num_numbers)
        target = _evaluate(signs, numbers)
        if target > 0:
            break
    shown = signs if rng.random() >= settings.wrong_share else _draw_signs(rng, settings.num_numbers)
    question = f"Numbers: {' '.join(str(number) for number in numbers)}\nTarget: {target}"
    return Example(
        messages=[{"role": "user", "content": question}], answer=f"<answer>{_write(shown, numbers)}</answer>"
    )
