"""Parses and evaluates arithmetic expressions exactly and safely, for any text.

Python's own parser and evaluator are not used. The grammar is integers, `+ - * /`, parentheses and spaces, without
powers, signs, names and floats. Work is bounded: the text is short, numbers have few digits, nesting is shallow, and
the result of n operations on numbers of d digits has at most (n + 1) * d digits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

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
    """A parsed expression: its numbers from left to right, its operators, and its postfix form."""

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
            if item == "+":
                stack.append(left + right)
            elif item == "-":
                stack.append(left - right)
            elif item == "*":
                stack.append(left * right)
            else:
                stack.append(left / right)
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
            operator = self._take()
            self._product()
            self.postfix.append(operator)

    def _product(self) -> None:
        self._atom()
        while self._next_is("*/"):
            operator = self._take()
            self._atom()
            self.postfix.append(operator)

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
