"""Generated Countdown puzzles, and the split into training and held-out puzzles.

The sequence is a pure function of the settings and the seed. Whether a puzzle is held out depends only on its numbers
(in any order) and its target, so no choice of seed or size puts a held-out puzzle into a training set.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

HELD_OUT_PERCENT = 20
"""Share of all puzzles that is held out. Three digits with + and - still give over 500 held-out prompts."""

_GIVE_UP_AFTER = 20_000
"""Consecutive attempts without a new puzzle after which no more are expected."""


@dataclass(slots=True, frozen=True)
class Puzzle:
    """Numbers in the order of the prompt, the target, and one expression that reaches it."""

    numbers: tuple[int, ...]
    target: int
    solution: str


@dataclass(slots=True, frozen=True)
class PuzzleSettings:
    """Difficulty of the puzzles. All bounds are inclusive."""

    min_numbers: int = 3
    max_numbers: int = 4
    min_number: int = 1
    max_number: int = 99
    min_target: int = 1
    max_target: int = 100
    operations: str = "+-*/"


def is_held_out(numbers: tuple[int, ...] | list[int], target: int) -> bool:
    """Returns whether the puzzle belongs to the held-out fifth. The order of the numbers does not matter."""
    identity = f"countdown:{','.join(map(str, sorted(numbers)))}={target}"
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def generate_puzzles(settings: PuzzleSettings, seed: int, portion: str = "all") -> Iterator[Puzzle]:
    """Yields distinct solvable puzzles of `portion` (all, train, heldout), until no new ones are found."""
    rng = random.Random(f"countdown {seed}")
    seen: set[tuple[tuple[int, ...], int]] = set()
    misses = 0
    while misses < _GIVE_UP_AFTER:
        misses += 1
        puzzle = _random_puzzle(settings, rng)
        if puzzle is None:
            continue
        key = (puzzle.numbers, puzzle.target)
        if key in seen or not in_portion(puzzle.numbers, puzzle.target, portion):
            continue
        seen.add(key)
        misses = 0
        yield puzzle


def in_portion(numbers: tuple[int, ...] | list[int], target: int, portion: str) -> bool:
    """Returns whether the puzzle belongs to `portion`: all, train or heldout."""
    return portion == "all" or is_held_out(numbers, target) == (portion == "heldout")


@dataclass(slots=True)
class _Term:
    value: Fraction
    text: str
    weakest: str
    """The operator that was applied last, which determines where parentheses are needed."""


def _random_puzzle(settings: PuzzleSettings, rng: random.Random) -> Puzzle | None:
    """Combines random numbers in pairs and random order. None when the result is not a valid target."""
    count = rng.randint(settings.min_numbers, settings.max_numbers)
    numbers = tuple(rng.randint(settings.min_number, settings.max_number) for _ in range(count))
    terms = [_Term(Fraction(number), str(number), "") for number in numbers]
    while len(terms) > 1:
        left = terms.pop(rng.randrange(len(terms)))
        right = terms.pop(rng.randrange(len(terms)))
        operator = rng.choice(settings.operations)
        if operator == "/" and (right.value == 0 or (left.value / right.value).denominator != 1):
            return None  # every intermediate result is a whole number, as in the usual puzzles
        terms.append(_combine(left, operator, right))
    result = terms[0]
    if not settings.min_target <= result.value <= settings.max_target:
        return None
    return Puzzle(numbers, int(result.value), result.text)


def _combine(left: _Term, operator: str, right: _Term) -> _Term:
    if operator == "+":
        value = left.value + right.value
    elif operator == "-":
        value = left.value - right.value
    elif operator == "*":
        value = left.value * right.value
    else:
        value = left.value / right.value
    left_text, right_text = left.text, right.text
    if operator in "*/" and left.weakest in ("+", "-"):
        left_text = f"({left_text})"
    if (operator in "-*/" and right.weakest in ("+", "-")) or (operator == "/" and right.weakest):
        right_text = f"({right_text})"
    return _Term(value, f"{left_text}{operator}{right_text}", operator)
