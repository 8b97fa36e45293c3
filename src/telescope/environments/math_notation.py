r"""Brings mathematical answers into one notation before they are judged or compared.

People and models write a number as `\mathbf{5}`, `\(5\)`, `5°`, `5E0` or `5 m/s`. `to_latex` removes markup that only
changes the appearance. `normalize_answer` also removes the unit and rewrites numbers. Notations that math-verify reads
itself are left alone.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

MAX_CHARACTERS = 1_000
"""Longest answer that is compared."""

_GREEK = [letter for letter in map(chr, range(913, 970)) if unicodedata.name(letter, "").startswith("GREEK")]
_NAMES = {letter: unicodedata.name(letter).split()[-1].replace("LAMDA", "LAMBDA") for letter in _GREEK}
_SYMBOLS = str.maketrans({
    **{letter: f"\\{name.capitalize() if letter.isupper() else name.lower()} " for letter, name in _NAMES.items()},
    **{letter: f"\\mathbb{{{unicodedata.normalize('NFKC', letter)}}}" for letter in "\u211d\u2124\u2115\u211a\u2102"},
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-"), **dict.fromkeys("\u00f7\u2215\u2044", "/"),
    **dict.fromkeys("\u00b0\u00ba\u02da", "^\\circ "), **dict.fromkeys("\u00b7\u22c5\u2219", "\\cdot "),
    "\u2103": "^\\circ C", "\u2109": "^\\circ F", "\u2032": "'", "\u2033": "''",
    "\u00d7": "\\times ", "\u222a": "\\cup ", "∩": "\\cap ", "∞": "\\infty ", "≠": "\\ne ",
    **dict.fromkeys("≤⩽", "\\le "), **dict.fromkeys("≥⩾", "\\ge "), "。": ".", "、": ", ", "或": " or ",
    "±": "\\pm ", "∓": "\\mp ", "≈": "\\approx ", "∅": "\\emptyset ", "∈": "\\in ", "…": "...",
})  # fmt: skip
_INDEX = r"[0-9a-z]|\{[0-9a-z+-]+\}"
_COMPOSED = re.compile(r"[²³¹\u2070-\u207f]+|[\u2080-\u208e]+|[¼-¾\u2150-\u215e\u2189]")
_REWRITTEN = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"√\s*(\([^()]*\)|\{[^{}]*\}|[0-9.]+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"\\(?:displaystyle|textstyle|bf|rm|it|quad|qquad)(?![A-Za-z])|\\left(?![A-Za-z])|\\right(?![A-Za-z])", " "),
        (r"\\(?:mathbf|boldsymbol|bm|pmb|mathit|mathsf|mathtt)(?=\s*\{)", ""),
        (r"\\[dtc](frac|binom)(?![A-Za-z])", r"\\\1"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\operatorname\s*\{\s*((?:arc)?(?:sin|cos|tan|cot|sec|csc|c?tg)|ln|log|lg|exp)\s*\}", r"\\\1 "),
        (r"\\(arc)?tg(?![A-Za-z])", r"\\\1tan"),
        (r"\\(arc)?ctg(?![A-Za-z])", r"\\\1cot"),
        (r"\\lg(?![A-Za-z])", r"\\log"),
        (r"\\mathrm\s*\{\s*([ei])\s*\}", r" \1"),
        (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (rf"(?<![A-Za-z\\])C_({_INDEX})\s*\^({_INDEX})", r"\\binom{\1}{\2}"),  # the notation of Chinese schools
        (r"\\(sin|cos|tan)\s*\^\s*(?:\{\s*-1\s*\}|-1)", r"\\arc\1"),
        (r"\\(leq?|geq?)slant(?![A-Za-z])", r"\\\1"),
        (r"\\mid(?![A-Za-z])", "|"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![\\A-Za-z])(ln|log|sin|cos|tan|exp)(?=\s*\()", r"\\\1"),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"(?<=[\w)\]}])\s*\*\*\s*(?=[\w({-]|\\[A-Za-z({])", "^"),  # Python's power
        (r"\^(-?[0-9]{2,}|-[0-9])", r"^{\1}"),
        (r"(?<=[0-9])i(?![A-Za-z])", " i"),  # math-verify reads the i of 4i as another letter than that of {4}i
        (r"(?<=[0-9])(?:\\[,;:! ]|~)+(?=[0-9]{3}(?![0-9]))", ""),  # between thousands
        (r"(?<=[0-9])(?:\\[,;:! ]|[\s~])+(?=\\?%)", ""),
    )
]
_ENCLOSING = [pair.split(" ") for pair in ("$$ $$", "$ $", "\\( \\)", "\\[ \\]", "** **", "` `", '" "', "{ }")]
_COMMAND = re.compile(
    r"\\(?:boxed|fbox|text|textbf|textit|textrm|textnormal|mathrm|mbox|operatorname)\s*\{(.*)\}", re.S
)
_EDGES = re.compile(
    r"^(?:\\[,;:! ]|[\s~])+|(?:\\[,;:! ]|[\s~])+$"
    r"|(?<![\\.])[.,;:]+$|(?:\\[lc]?dots|\.{3})$"  # the end of a sentence; digits that continue
    r"|^(?:\\approx|\\sim|~)(?![A-Za-z])"
)
_CURRENCY = re.compile(r"^([-+]?)\s*(?:\\\$|[$€£¥₹])\s*(?=[-+]?[0-9.])|(?<=[0-9])\s*(?:\\\$|[$€£¥₹¢])$")

_SHORT_UNIT = (
    r"(?:cm|mm|km|nm|ft|in|yd|mi|kg|mg|lbs?|oz|ms|hr|ml|mL|kJ|kW|Hz|Pa|cc|sq|cu|of|mph|kph|kmh|deg|rad|min|sec|st|nd|rd|th"
    r"|[mgshlLNJWVAKCF])(?![^\W\d_])"
)
_EXPONENT = r"(?:\^?\{?-?[0-9]\}?)?"
_CHANGING = (
    r"(?i:than|more|less|factorial|squared|cubed|negative|below|above|root|half|halves|(?:hundred|thousand|million"
    r"|billion|trillion|dozen|third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?)"
)
_CHANGING_ELSEWHERE = (
    r"[^\W\d_]{0,8}(?:[十百万萬亿億兆半만억]|千(?![克米瓦焦卡])|分之|тыс|миллион|миллиард|млн|млрд|полов)"
)
"""The same in Chinese, Japanese, Korean and Russian: 千克 is a kilogram, and 万 ten thousand."""
CHANGING_WORD = re.compile(rf"(?<![\\A-Za-z]){_CHANGING}(?![A-Za-z])|(?<=[0-9}}])\s{{0,2}}{_CHANGING_ELSEWHERE}")
"""A word that changes the number beside it."""
_FOREIGN = r"[^\W\d_A-Za-z]"
"""A letter that is in no formula: Greek ones are commands by then."""
_UNIT = (
    rf"(?!(?:{_CHANGING}|and|or|not|mod|choose|times|plus|minus|over|base|sqrt|sin|cos|tan|log|exp)(?![A-Za-z]))"
    rf"(?!{_CHANGING_ELSEWHERE})(?>{_SHORT_UNIT}|[^\W\d_]{{3,}}|{_FOREIGN}[^\W\d_]*){_EXPONENT}"
)
"""The group is atomic: each of many words has one way to match, so that the time does not double with each."""
_VALUE = r"((?:[^A-Za-z\\]|(?<=[0-9])[eE](?=[-+]?[0-9])|\\[A-Za-z]+|\\[^A-Za-z])*?[0-9}%])"
"""A number: it has letters only in commands, and an exponent."""
_WITH_UNIT = re.compile(
    rf"{_VALUE}(?:(?:\s|\\[,;: ]|~)+|(?={_SHORT_UNIT}|{_FOREIGN}))"
    rf"({_UNIT}(?:(?:\s*(?:[/*]|\\cdot)\s*|\.?\s+|-){_UNIT})*)"
)
_WORDS_OF_NUMBER = re.compile(
    r"(?:(?<=[0-9}])(?:\\[,;: ]|[\s~])*|(?<=/)\s*|(?<=\\cdot)\s*)\\(?:text|mathrm|mbox)\s*\{([^{}]*[^\W\d_][^{}]*)\}"
)
_DEGREES = re.compile(
    rf"{_VALUE}\s*(?:\^\s*\{{?\s*\\circ\s*\}}?|\\degree)\s*(?:[CFK]|\\(?:text|mathrm)\{{\s*[CFK]\s*\}})?"
)
_LABEL = re.compile(
    r"(?:the\s+)?(?:final\s+)?(?:answer|ans|total|result)\s+is\b\s*|(?!not|except)[a-z]{3,}\s*[:=]\s*"
    r"|(?:option|choice)\s+(?=\(?[A-Z]\)?$)",
    re.IGNORECASE,
)
"""Text that may precede a final answer: "The answer is 72", "Total: 72", "Option B"."""
_FOR_INTEGERS = re.compile(
    r"(?:\\[,;:! ]|[\s,(~])+([A-Za-z])\s*\\in\s*(?:\\mathbb\s*)?\{?([NZ])\}?(?:[_^]\{?([*+])\}?)?\}?\s*\)?$"
)
r"""The end of `2k\pi, k \in \mathbb{Z}`, of which math-verify reads no expression."""
_SCIENTIFIC = re.compile(r"([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))[eE]\+?(-?[0-9]{1,4})")
_POWER_OF_TEN = re.compile(r"(?<=[0-9])\s*(?:[xX*]|\\cdot)\s*(?=10\s*\^)")
_MIXED = re.compile(r"([-+]?[0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)")
_MIXED_PERCENT = re.compile(r"([0-9]+)\s*\\frac\s*(?:\{([0-9]+)\}|([0-9]))\s*(?:\{([0-9]+)\}|([0-9]))\s*(\\?%)")
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(?:(?: |\{?,\}?)[0-9]{3})+(?:\.[0-9]+)?")
_REPEATING = re.compile(
    r"([-+]?)([0-9]*)\.([0-9]*)(?:\\(?:overline|bar|dot)\s*(?:\{([0-9]+)\}|([0-9]))|\(([0-9]+)\))"
)  # 0.1\overline{6}

_SET_BUILDER = re.compile(r"\\\{\s*([a-z])\s*(?:\\in\s*(?:\\mathbb\s*\{?R\}?|R)\s*)?[|:](.*)\\\}")
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|(?<![\\A-Za-z])or(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])")
_COMPARISON = re.compile(r"([<>]|\\(?:leq?|geq?|lt|gt)(?![A-Za-z]))")
_RELATION = re.compile(r"[<>]|\\(?:leq?|geq?|lt|gt|neq?|in)(?![A-Za-z])")
_TWO_ROOTS = re.compile(r"(?!\\\{|\()([^,]*\{[^,]*)\\pm(?![A-Za-z])([^,]*)")
"""Values that differ in a sign within a formula: math-verify only reads a sign between two values."""


def to_latex(text: str) -> str:
    """Returns the text in LaTeX without surrounding markup, styles and punctuation. Numbers keep their form."""
    text = unicodedata.normalize("NFKC", _COMPOSED.sub(_in_latex, text).translate(_SYMBOLS))
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    before = None
    while text != before:
        before, text = text, _EDGES.sub("", text)
        for opening, closing in _ENCLOSING:
            inside = text[len(opening) : -len(closing)]
            if (
                len(text) > len(opening) + len(closing)
                and text == opening + inside + closing
                and has_paired_braces(inside)
                and (closing == "}" or closing not in inside.replace("\\$", ""))
            ):
                text = inside
        if (command := _COMMAND.fullmatch(text)) and has_paired_braces(command[1]):
            text = command[1]
        if text == before:
            text = _CURRENCY.sub(r"\1", text)
    return text


def normalize_answer(text: str) -> str:
    """Returns `to_latex` with numbers written out, and without the unit."""
    if len(text) > MAX_CHARACTERS:
        return text
    text, _ = split_integers(text)
    if label := _LABEL.match(text):
        return normalize_answer(text[label.end() :])
    name, equals, value = text.rpartition("=")
    if equals and re.fullmatch(r"\s*[A-Za-z]\s*", name):
        return f"{name}={normalize_answer(value)}"  # x = 5
    text = _WORDS_OF_NUMBER.sub(r" \1", text)
    if match := _WITH_UNIT.fullmatch(text):
        text = match[1].strip()
    text = _as_intervals(text)
    if text.count(r"\pm") == 1 and (match := _TWO_ROOTS.fullmatch(text)):
        return f"{match[1]}+{match[2]}, {match[1]}-{match[2]}"
    text = _POWER_OF_TEN.sub(r"\\times ", text)
    if match := _DEGREES.fullmatch(text):
        text = match[1]
    if match := _SCIENTIFIC.fullmatch(text):
        return rf"{match[1]} \times 10^{{{int(match[2])}}}"
    if match := _MIXED.fullmatch(text):
        return rf"{match[1]}\frac{{{match[2]}}}{{{match[3]}}}"
    if match := _MIXED_PERCENT.fullmatch(text):  # math-verify ignores its whole number
        whole, numerator, denominator, sign = filter(None, match.groups())
        return rf"\frac{{{int(whole) * int(denominator) + int(numerator)}}}{{{denominator}}}{sign}"
    if match := _REPEATING.fullmatch(text):
        sign, whole, fixed, *periods = match.groups()
        period = next(filter(None, periods))
        fixed_digits, shift = int(f"0{whole}{fixed}"), 10 ** len(fixed)
        number = Fraction(int(f"0{whole}{fixed}{period}") - fixed_digits, shift * (10 ** len(period) - 1))
        return rf"{sign}\frac{{{number.numerator}}}{{{number.denominator}}}"
    return re.sub(r"[ ,{}]", "", text) if _GROUPED.fullmatch(text) else text


def split_integers(text: str) -> tuple[str, str]:
    r"""Returns `2k\pi` and `Z` for `2k\pi, k \in \mathbb{Z}`, and other texts in LaTeX with an empty second text.

    `1 < x < 5, x \in \mathbb{Z}` is whole: its end changes what the rest means.
    """
    if len(text) > MAX_CHARACTERS or (end := _FOR_INTEGERS.search(text := to_latex(text))) is None:
        return text, ""
    term = text[: end.start()]
    if _RELATION.search(term) or end[1] not in re.sub(r"\\[A-Za-z]+", "", term):
        return text, ""
    integers = end[2] + (end[3] or "")
    return term, "N+" if integers in ("N*", "Z+") else integers


def _as_intervals(text: str) -> str:
    r"""Writes `\{x | 1 < x < 3\}` and `x < 1 or x > 3` as intervals, and returns other texts unchanged.

    math-verify reads neither. A range without an alternative, `1 < x < 3`, is left to it.
    """
    is_set = _SET_BUILDER.fullmatch(text)
    ranges = [_COMPARISON.split(part) for part in _OR.split(is_set[2] if is_set else text)]
    if len(ranges) == 1 and not is_set:
        return text
    variable = is_set[1] if is_set else next(filter(re.compile("[a-z]").fullmatch, map(str.strip, ranges[0])), "")
    intervals = []
    for values, signs in ((list(map(str.strip, sides[::2])), sides[1::2]) for sides in ranges):
        is_greater = {sign.startswith((">", "\\g")) for sign in signs}
        if True in is_greater:
            values, signs = values[::-1], signs[::-1]
        place = values.index(variable) if variable in values else -1
        if (len(values), place) not in ((2, 0), (2, 1), (3, 1)) or len(is_greater) != 1:
            return text
        low = ("[" if "e" in signs[place - 1] else "(") + values[place - 1] if place else r"(-\infty"
        high = values[place + 1] + ("]" if "e" in signs[place] else ")") if values[place + 1 :] else r"\infty)"
        intervals.append(f"{low}, {high}")
    return r" \cup ".join(intervals)


def _in_latex(run: re.Match[str]) -> str:
    """Writes Unicode exponents, indices and fractions in LaTeX."""
    plain = unicodedata.normalize("NFKC", run[0]).replace("\u2212", "-")
    if "\u2044" in plain:
        numerator, _, denominator = plain.partition("\u2044")
        return rf"\frac{{{numerator}}}{{{denominator}}}"
    return f"{'_' if unicodedata.decomposition(run[0][0]).startswith('<sub>') else '^'}{{{plain}}}"


def has_paired_braces(text: str) -> bool:
    """Returns whether every unescaped brace of the text has its partner."""
    depth = 0
    for token in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth < 0:
            return False
    return depth == 0
