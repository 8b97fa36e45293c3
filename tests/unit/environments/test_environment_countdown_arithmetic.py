"""Expressions are parsed and evaluated exactly, and any other text is refused."""

import contextlib
import re
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from telescope.environments.countdown.puzzles import ExpressionError, parse


@pytest.mark.parametrize(("text", "value"), [
    ("3", 3),
    ("3 + 7 - 12", -2),
    ("2+3*4", 14),
    ("(2+3)*4", 20),
    ("8-3-2", 3),
    ("16/4/2", 2),
    ("1/3*3", 1),
    ("7/2", Fraction(7, 2)),
    ("(1/3 + 1/6) * 2", 1),
    ("3 \u00d7 4 \u00f7 2 \u2212 1", 5),
    ("\n( 4 )\t", 4),
    ("(1/49)*49", 1),  # 0.9999999999999999 in floats
])  # fmt: skip
def test_arithmetic_is_exact_with_the_usual_precedence(text, value):
    assert parse(text).value() == value


@pytest.mark.parametrize("text", [
    "",
    " ",
    "()",
    "95**97**99",
    "2**3",
    "2^3",
    "7//2",
    "7%2",
    "-3+5",
    "+3",
    "3+-5",
    "3--5",
    "~3",
    "1 2",
    "3 + 7 = 10",
    "1.5+1",
    "1e9",
    "1_000",
    "0x10",
    "3j",
    "(1+2",
    "1+2)",
    "(1)(2)",
    "1+",
    "*1",
    "abs(3)",
    "__import__('os')",
    "3 if 1 else 2",
    "[1]",
    "3,4",
    "3#4",
    "3\\\n+4",
    "\uff13+\uff17",  # full-width digits
    "\u0663+\u0667",  # Arabic-Indic digits
    "3\u00b2",  # superscript two
    "3\u00a0+4",  # no-break space
    "3\x00+4",
    "9" * 10,
    "1" * 100_000,
    "(" * 33 + "1" + ")" * 33,
    "(" * 100_000,
    "+".join(["1"] * 33),
    "1+" * 100_000 + "1",
])  # fmt: skip
def test_everything_outside_the_grammar_is_refused(text):
    with pytest.raises(ExpressionError):
        parse(text)


@given(st.text(max_size=600) | st.text(alphabet="0123456789+-*/() ", max_size=520))
def test_any_text_is_parsed_or_refused(text):
    with contextlib.suppress(ExpressionError, ZeroDivisionError):
        expression = parse(text)
        value = expression.value()
        digits = 9 * len(expression.numbers)
        assert value.numerator.bit_length() + value.denominator.bit_length() <= 8 * digits + 64


_EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.builds("({}{}{})".format, inner, st.sampled_from("+-*/"), inner),
    max_leaves=8,
)


@given(_EXPRESSIONS)
@example("1/(2-2)")
def test_values_agree_with_exact_rational_arithmetic(text):
    over_fractions = re.sub(r"(\d+)", r"Fraction(\1)", text)
    try:
        expected = eval(over_fractions)  # of an expression that this test made
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            parse(text).value()
        return
    assert parse(text).value() == expected
