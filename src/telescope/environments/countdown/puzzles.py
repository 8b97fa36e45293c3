"""Generates Countdown puzzles, splits them into training and held-out ones, and evaluates answers.

The sequence is a pure function of the settings and the seed. Whether a puzzle is held out depends only on its numbers
(in any order) and its target, so no choice of seed or size puts a held-out puzzle into a training set.

Expressions are parsed and evaluated exactly and safely, for any text: Python parses a text of digits, `+ - * /`,
parentheses and spaces, and nothing is executed. Powers, signs, names and floats are refused. Work is bounded: the text
is short, numbers have few digits, nesting is shallow, and the result of n operations on numbers of d digits has at most
(n + 1) * d digits.
"""

from __future__ import annotations

import ast
import hashlib
import operator
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, permutations
from typing import Any, Literal, TypeVar, cast

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
}  # fmt: skip
HELD_OUT_PERCENT = 20
"""Share of all puzzles that is held out. Three digits with + and - still give over 500 held-out prompts."""

_GIVE_UP_AFTER = 20_000
"""Consecutive attempts without a new item after which no more are expected."""

T = TypeVar("T")

Puzzle = tuple[tuple[int, ...], int]
"""Numbers in the prompt's order, and the target."""

Portion = Literal["all", "train", "heldout"]


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
    return in_held_out_fifth(f"countdown:{','.join(map(str, sorted(numbers)))}={target}")


def in_held_out_fifth(identity: str) -> bool:
    """Returns whether an item with this identity is held out."""
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def generate_puzzles(settings: PuzzleSettings, seed: int, portion: Portion = "all") -> Iterator[Puzzle]:
    """Yields distinct solvable puzzles of `portion`. Ends when no new ones are found."""
    rng = random.Random(f"countdown {seed}")
    return distinct(lambda: _random_puzzle(settings, rng), lambda puzzle: in_portion(*puzzle, portion))


def distinct(draw: Callable[[], T | None], admits: Callable[[T], bool]) -> Iterator[T]:
    """Yields distinct items that `draw` returns and `admits` accepts. Ends when no new ones are found."""
    seen: set[T] = set()
    misses = 0
    while misses < _GIVE_UP_AFTER:
        misses += 1
        item = draw()
        if item is not None and item not in seen and admits(item):
            seen.add(item)
            misses = 0
            yield item


def in_portion(numbers: tuple[int, ...] | list[int], target: int, portion: Portion) -> bool:
    return portion == "all" or is_held_out(numbers, target) == (portion == "heldout")


@dataclass(slots=True)
class _Term:
    value: int
    text: str
    weakest: str
    """The operator that was applied last, which determines where parentheses are needed."""


def _random_puzzle(settings: PuzzleSettings, rng: random.Random) -> Puzzle | None:
    """Combines random numbers in random pairs and order. None when the result is not a valid target."""
    count = rng.randint(settings.min_numbers, settings.max_numbers)
    numbers = tuple(rng.randint(settings.min_number, settings.max_number) for _ in range(count))
    terms = [_Term(number, str(number), "") for number in numbers]
    while len(terms) > 1:
        left = terms.pop(rng.randrange(len(terms)))
        right = terms.pop(rng.randrange(len(terms)))
        sign = rng.choice(settings.operations)
        if sign == "/" and (right.value == 0 or left.value % right.value):
            return None  # every intermediate result is a whole number, as in the usual puzzles
        terms.append(_combine(left, sign, right))
    target = terms[0].value
    return (numbers, target) if settings.min_target <= target <= settings.max_target else None


def solve(numbers: Sequence[int], target: int, operations: str) -> str | None:
    """Returns an expression that reaches the target with whole numbers. None if there is none."""

    def search(terms: list[_Term]) -> str | None:
        if len(terms) == 1:
            return terms[0].text if terms[0].value == target else None
        for left, right in permutations(range(len(terms)), 2):
            rest = [term for place, term in enumerate(terms) if place not in (left, right)]
            for sign in operations:
                if sign == "/" and (not terms[right].value or terms[left].value % terms[right].value):
                    continue
                if found := search([*rest, _combine(terms[left], sign, terms[right])]):
                    return found
        return None

    return search([_Term(number, str(number), "") for number in numbers])


def _combine(left: _Term, sign: str, right: _Term) -> _Term:
    value = left.value // right.value if sign == "/" else OPERATIONS[sign](left.value, right.value)
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
_ALLOWED = re.compile(r"[-+*/() \t\n0-9]*")
_TYPOGRAPHY = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "\t": " ", "\n": " "})
"""Replaces the signs of printed mathematics, and white space."""
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


class ExpressionError(ValueError):
    """The text is not an expression of this grammar, or is too large."""


@dataclass(slots=True, frozen=True)
class Expression:
    """A parsed expression: numbers in order, operators, and its tree of constants and binary operations."""

    numbers: tuple[int, ...]
    operators: frozenset[str]
    tree: ast.expr

    def value(self) -> Fraction:
        """Returns the exact value. Raises `ZeroDivisionError`."""

        def value_of(node: Any) -> Fraction:
            if isinstance(node, ast.Constant):
                return Fraction(cast("int", node.value))
            return OPERATIONS[_SIGNS[type(node.op)]](value_of(node.left), value_of(node.right))

        return value_of(self.tree)


def parse(text: str) -> Expression:
    """Parses an expression. Raises `ExpressionError` with the reason."""
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"longer than {MAX_CHARACTERS} characters")
    text = text.translate(_TYPOGRAPHY).strip()
    if not _ALLOWED.fullmatch(text):
        raise ExpressionError("contains something other than digits, + - * / and parentheses")
    numbers = re.findall("[0-9]+", text)
    if len(numbers) > MAX_NUMBERS or max(map(len, numbers), default=0) > MAX_DIGITS:
        raise ExpressionError(f"has more than {MAX_NUMBERS} numbers, or one of more than {MAX_DIGITS} digits")
    if max(accumulate((character == "(") - (character == ")") for character in text), default=0) > MAX_DEPTH:
        raise ExpressionError(f"nested deeper than {MAX_DEPTH}")
    try:
        tree = ast.parse(re.sub("[0-9]+", lambda digits: str(int(digits[0])), text), mode="eval").body
    except SyntaxError as error:
        raise ExpressionError(f"cannot be read: {error.msg}") from None
    operators = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
            operators.add(_SIGNS[type(node.op)])
        elif not isinstance(node, ast.Constant | ast.operator):
            raise ExpressionError("has something other than numbers with one of + - * / between two of them")
    return Expression(tuple(map(int, numbers)), frozenset(operators), tree)
