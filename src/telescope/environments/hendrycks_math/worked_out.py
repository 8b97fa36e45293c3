r"""Rejects answers that repeat the question instead of solving it.

`\binom{8}{4}` equals 70, so math-verify accepts it as the answer to $\binom{8}{4}$; a model learns to exploit that
within a few hundred steps. So an answer must also be as simplified as the expected one. Pure functions of three texts,
which look at notation and compute nothing:

- Where a number is expected (an integer, a decimal, a fraction, a percentage), the answer must be a number.
- A named operation (a sum, a logarithm, a sine, a factorial) may be in the answer only if one of its kind is in the
  expected answer.
- A formula of the problem, or a side of one, is no answer, unless the expected one is written in the same way.
"""

from __future__ import annotations

import re

from telescope.environments.math_notation import MAX_CHARACTERS, has_paired_braces, normalize_answer, to_latex

_KINDS = (
    ("sin", "cos", "tan", "cot", "sec", "csc"),
    ("arcsin", "arccos", "arctan"),
    ("log", "ln", "lg"),
    ("binom", "choose"),
    ("lfloor", "lceil", "floor", "ceil"),
    ("gcd", "lcm"),
    ("max", "min"),
    ("mod", "bmod", "pmod"),
    ("det",),
    ("sum",),
    ("prod",),
    ("int", "iint", "oint"),
    ("lim",),
)
"""LaTeX commands of operations, grouped by kind."""
_KIND_OF = {name: kind[0] for kind in _KINDS for name in kind}
_NAMED = re.compile(r"\\(?:operatorname\*?\s*\{\s*)?([a-z]+)")

_SPACING = re.compile(r"\\[,;:! ]|[\s~$]+")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}(?:\^\{?[0-9]\}?)?")
_SIGNS = re.compile(r"\^\{?\\circ\}?|\\?%|\\\$|\\degree|[A-Za-z ]+$")
"""Signs around a number: degrees, percent, dollars, a unit."""
_DIGITS = r"(?:[0-9]+(?:\{?,\}?[0-9]{3})*(?:\.[0-9]*)?|\.[0-9]+)"
_DECIMAL = re.compile(r"(?:[A-Za-z]=)?[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")
_SLASHED = re.compile(r"(?<![0-9A-Za-z.^_})])([0-9]+)/([0-9]+)(?![0-9.^!])")
"""A fraction of two whole numbers that is not part of a longer term."""
_BRACED = re.compile(r"\{([0-9])\}|(?<=[\^_])\{([A-Za-z])\}")
"""A digit, exponent or index in braces, which means the same without them."""
_SEPARATOR = re.compile(r"[,;]|(?<![\\A-Za-z])(?:or|and)(?![A-Za-z])")
"""What separates several answers."""
_PART = rf"(?:\{{[-+]?{_DIGITS}\}}|[0-9])"
_NUMBER = re.compile(
    rf"[-+]?(?:{_DIGITS}"  # 12, 1,000, 0.5
    rf"|{_DIGITS}?\\frac{_PART}{_PART}|{_DIGITS}/{_DIGITS}"  # a fraction, a mixed number
    rf"|[0-9]*\.[0-9]*\\overline\{{[0-9]+\}}"  # a repeating decimal
    rf"|(?:{_DIGITS}(?:\\times|\\cdot))?10\^(?:\{{-?[0-9]+\}}|[0-9])"  # a power of ten
    r"|[0-9A-Z]+_(?:\{[0-9]+\}|[0-9]))"  # in a base
)
_BETWEEN_FORMULAS = re.compile(r"(?<!\\)\$+|\\[][()]")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?![A-Za-z])")
_RELATIONS = re.compile(r"=|<|>|\\(?:leq?|geq?|neq?|equiv|approx)(?![A-Za-z])")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_HAS_WORK = re.compile(r"[-+*/^!.,_=<>]|\\(?!(?:text|pi|circ|infty)(?![A-Za-z]))[A-Za-z]")
"""Signs of an operation or of another notation; a text without them cannot be simplified."""


def is_worked_out(answer: str, expected: str, problem: str) -> bool:
    """Returns whether `answer` is a result, not a restatement of `problem`."""
    if len(answer) > MAX_CHARACTERS:
        return answer == expected
    if "=" not in expected:
        answer = _last_side(to_latex(answer))
    answer_text, expected_text = _plain(normalize_answer(answer)), _plain(normalize_answer(expected))
    if _DECIMAL.fullmatch(answer_text) and _DECIMAL.fullmatch(expected_text):
        return True  # 1,000 for 1000 is no formula of the problem, even if the problem has it
    if answer_text == expected_text:
        return _plain(to_latex(answer)) == _plain(to_latex(expected)) or not _is_copied(answer, problem)
    if _kinds(normalize_answer(answer)) - _kinds(normalize_answer(expected)):
        return False
    is_equation = re.search(r"[A-Za-z].*[-+]|[-+].*[A-Za-z]", expected_text.rpartition("=")[0])  # 2x+3y-5=0, not x=5
    if _is_number(expected_text) and not is_equation and not _is_number(answer_text):
        return False
    return not _is_copied(answer, problem)


def _last_side(text: str) -> str:
    r"""Returns the result of an equation, such as 70 of `C = \binom{8}{4} = 70`. Other texts are returned unchanged."""
    left, _, right = text.rpartition("=")
    return right if right.strip() and has_paired_braces(right) and not _SEPARATOR.search(left) else text


def _is_copied(answer: str, problem: str) -> bool:
    """Returns whether the answer is a formula of the problem, or one side of it."""
    answer_text = _plain(to_latex(answer))
    sides = {_unwrapped(side) for side in (answer_text, _RELATIONS.split(answer_text)[-1])}
    return bool(_HAS_WORK.search(answer_text) and sides & _expressions(to_latex(problem)))


def _plain(text: str) -> str:
    """Returns the text without spaces and dollar signs, with one notation of products, fractions and exponents."""
    text = _SPACING.sub("", text.replace("\\$", "").replace("\\cdot", "\\times"))
    return _BRACED.sub(r"\1\2", _SLASHED.sub(r"\\frac{\1}{\2}", text))


def _kinds(text: str) -> set[str]:
    kinds = {_KIND_OF[name] for name in _NAMED.findall(text) if name in _KIND_OF}
    return kinds | {"!"} if "!" in text.replace("\\!", "") else kinds  # \! is a space


def _is_number(text: str) -> bool:
    """Returns whether the text is a number, possibly with a unit, `x =` before it, or its rounded value behind it."""
    text = _TEXT.sub("", text).partition(r"\approx")[0].rpartition("=")[2]
    text = _SIGNS.sub("", text)
    text = _unwrapped(text.replace("\\{", "{").replace("\\}", "}"))
    text = re.sub(r"\\frac([0-9])([0-9])(?![0-9])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"^(-?)\\frac\{(-?)([0-9]+)\}", r"\1\\frac{\3}", text)
    return _NUMBER.fullmatch(text) is not None


def _unwrapped(text: str) -> str:
    """Returns the text without brackets that enclose all of it."""
    while len(text) > 2 and text[0] in _CLOSING and text[-1] == _CLOSING[text[0]]:
        inside = text[1:-1]
        opens, closes = inside.find(text[0]), inside.find(text[-1])
        if closes > -1 and (opens == -1 or closes < opens):
            break  # the first bracket closes before the end: (x+1)(x-1)
        text = inside
    return text


def _expressions(problem: str) -> set[str]:
    """Returns formulas, and texts between words, both whole and split at relations."""
    found: set[str] = set()
    for piece in _BETWEEN_FORMULAS.split(problem):
        for part in (piece, *_WORDS.split(piece)):
            plain = _plain(part)
            found.update(_unwrapped(text.strip(".,;:?")) for text in (plain, *_RELATIONS.split(plain)))
    return found
