"""Generates Countdown puzzles, splits them into training and held-out ones, and evaluates answers.

The sequence is a pure function of the settings and the seed. Whether a puzzle is held out depends only on its numbers
(in any order) and its target, so no choice of seed or size puts a held-out puzzle into a training set.

Expressions are parsed and evaluated exactly and safely, for any text, without Python's own parser. The grammar is
integers, `+ - * /`, parentheses and spaces, without powers, signs, names and floats. Work is bounded: the text is
short, numbers have few digits, nesting is shallow, and the result of n operations on numbers of d digits has at most
(n + 1) * d digits.
"""

from __future__ import annotations

import hashlib
import operator
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
}  # fmt: skip
HELD_OUT_PERCENT = 20
"""Share of all puzzles that is held out. Three digits with + and - still give over 500 held-out prompts."""

_GIVE_UP_AFTER = 20_000
"""Consecutive attempts without a new puzzle after which no more are expected."""


@dataclass(slots=True, frozen=True)
class Puzzle:
    """Numbers in the prompt's order, target, and one expression that reaches it."""

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
    """Yields distinct solvable puzzles of `portion` (all, train, heldout). Ends when no new ones are found."""
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
        sign = rng.choice(settings.operations)
        if sign == "/" and (right.value == 0 or (left.value / right.value).denominator != 1):
            return None  # every intermediate result is a whole number, as in the usual puzzles
        terms.append(_combine(left, sign, right))
    result = terms[0]
    if not settings.min_target <= result.value <= settings.max_target:
        return None
    return Puzzle(numbers, int(result.value), result.text)


def _combine(left: _Term, sign: str, right: _Term) -> _Term:
    value = OPERATIONS[sign](left.value, right.value)
    left_text, right_text = left.text, right.text
    if sign in "*/" and left.weakest in ("+", "-"):
        left_text = f"({left_text})"
    if (sign in "-*/" and right.weakest in ("+", "-")) or (sign == "/" and right.weakest):
        right_text = f"({right_text})"
    return _Term(value, f"{left_text}{sign}{right_text}", sign)


MAX_CHARACTERS = 512
"""Longest expression. Six numbers of two digits, with spaces and parentheses, take about 50."""
MAX_DIGITS = 9
MAX_NUMBERS = 32
MAX_DEPTH = 32
"""Deepest nesting of parentheses, which bounds the recursion."""

_TOKEN = re.compile(r"[0-9]+|[-+*/()]")
_ALLOWED = re.compile(r"[-+*/() \t\n0-9]*")
_TYPOGRAPHY = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-"})  # the signs of printed mathematics


class ExpressionError(ValueError):
    """The text is not an expression of this grammar, or too large."""


@dataclass(slots=True, frozen=True)
class Expression:
    """A parsed expression: numbers in order, operators, and postfix form."""

    numbers: tuple[int, ...]
    operators: frozenset[str]
    postfix: tuple[int | str, ...]

    def value(self) -> Fraction:
        """The exact value. Raises `ZeroDivisionError`."""
        stack: list[Fraction] = []
        for item in self.postfix:
            if isinstance(item, int):
                stack.append(Fraction(item))
                continue
            right, left = stack.pop(), stack.pop()
            stack.append(OPERATIONS[item](left, right))
        return stack[0]


def parse(text: str) -> Expression:
    """Parses an expression. Raises `ExpressionError` with the reason."""
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"longer than {MAX_CHARACTERS} characters")
    text = text.translate(_TYPOGRAPHY)
    if not _ALLOWED.fullmatch(text):
        raise ExpressionError("contains something other than digits, + - * / and parentheses")
    return _Parser(_TOKEN.findall(text)).parse()


class _Parser:
    """Recursive descent parser with the usual precedence, left-associative."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.depth = 0
        self.numbers: list[int] = []
        self.postfix: list[int | str] = []

    def parse(self) -> Expression:
        self._sum()
        if self.position != len(self.tokens):
            raise ExpressionError(f"{self.tokens[self.position]!r} where the expression should end")
        operators = frozenset(item for item in self.postfix if isinstance(item, str))
        return Expression(tuple(self.numbers), operators, tuple(self.postfix))

    def _next_is(self, characters: str) -> bool:
        return self.position < len(self.tokens) and self.tokens[self.position] in characters

    def _sum(self) -> None:
        self._product()
        while self._next_is("+-"):
            sign = self._take()
            self._product()
            self.postfix.append(sign)

    def _product(self) -> None:
        self._atom()
        while self._next_is("*/"):
            sign = self._take()
            self._atom()
            self.postfix.append(sign)

    def _atom(self) -> None:
        if self.position == len(self.tokens):
            raise ExpressionError("ends where a number is expected")
        token = self._take()
        if token == "(":
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise ExpressionError(f"nested deeper than {MAX_DEPTH}")
            self._sum()
            if not self._next_is(")"):
                raise ExpressionError("a parenthesis that is not closed")
            self._take()
            self.depth -= 1
        elif token.isdigit():
            if len(token) > MAX_DIGITS:
                raise ExpressionError(f"a number of more than {MAX_DIGITS} digits")
            if len(self.numbers) == MAX_NUMBERS:
                raise ExpressionError(f"more than {MAX_NUMBERS} numbers")
            self.numbers.append(int(token))
            self.postfix.append(int(token))
        else:
            raise ExpressionError(f"{token!r} where a number is expected")

    def _take(self) -> str:
        token = self.tokens[self.position]
        self.position += 1
        return token
