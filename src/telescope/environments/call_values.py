"""Reads the arguments of tool calls from text: JSON, Gemma's form of it, and elements with one value each.

Nothing raises for any text; what is wrong is returned.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_CALL_CHARACTERS = 100_000
"""Longest call that is read."""

_STRING_OR_BRACKET = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"""|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|[()\[\]{}]', re.DOTALL
)
_GEMMA_STRING_OR_BRACKET = re.compile(r'<\|"\|>.*?<\|"\|>|[()\[\]{}]', re.DOTALL)
_GEMMA_TEXT_OR_KEY = re.compile(
    r'<\|"\|>(?P<text>.*?)<\|"\|>|(?<=[{,\s])(?P<key>[^\s<>{}\[\],:"]++)(?=\s*:)', re.DOTALL
)
_DECODER = json.JSONDecoder(strict=False)
"""Not strict, because models write line breaks inside strings."""


def decode(text: str, position: int) -> tuple[Any, int, str | None]:
    """Returns the JSON value at a position, its end, and what is wrong with it."""
    position = len(text) - len(text[position:].lstrip())
    piece = text[position : position + MAX_CALL_CHARACTERS]
    try:
        value, end = _DECODER.raw_decode(piece)
        return value, position + end, None
    except RecursionError:
        problem = "it is nested too deeply"
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        problem = str(error)
    too_long = position + MAX_CALL_CHARACTERS < len(text)
    return None, position, f"it is longer than {MAX_CALL_CHARACTERS} characters" if too_long else problem


def decode_gemma(text: str, position: int) -> tuple[Any, int, str | None]:
    """Returns what `decode` does, for an object with bare keys and `<|"|>` around texts."""
    end = closing_bracket(text, position + 1, _GEMMA_STRING_OR_BRACKET)
    if end == -1 or not text.startswith("{", position):
        return None, position, "it is not inside of braces"
    as_json = _GEMMA_TEXT_OR_KEY.sub(lambda found: json.dumps(found[found.lastindex or 0]), text[position:end])
    value, _, problem = decode(as_json, 0)
    return value, end, problem


def text_behind(text: str) -> str | None:
    """Returns what is wrong with the text after a value."""
    return f"there is text behind it: {text.strip()[:40]!r}" if text.strip() else None


def closing_bracket(text: str, position: int, strings_or_brackets: re.Pattern[str] = _STRING_OR_BRACKET) -> int:
    """Returns the end of the call whose arguments start at `position`, or -1 if it does not end."""
    depth = 1
    for token in strings_or_brackets.finditer(text, position, position + MAX_CALL_CHARACTERS):
        if token[0] in "([{":
            depth += 1
        elif token[0] in ")]}":
            depth -= 1
            if depth == 0:
                return token.end()
    return -1


def value_of_element(text: str, schema: Any) -> Any:
    """Returns an argument written as an element: text where the schema allows text, else its JSON value."""
    kinds = set(_types(schema))
    if text.strip().lower() in ("null", "none") and "null" in kinds:
        return None
    if "string" in kinds:
        return text
    value, end, problem = decode(text, 0)
    if not problem and not text_behind(text[end:]):
        return value
    if kinds & {"array", "object"}:  # a model may write ['a'] as in Python
        with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            value = ast.literal_eval(text.strip())
            return value if isinstance(value, list | dict) else text
    return text


def _types(schema: Any) -> Iterator[str]:
    """Yields the JSON types that a schema allows at its top level."""
    if isinstance(schema, Mapping):
        own = schema.get("type") or ()
        yield from [own] if isinstance(own, str) else own
        for each in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
            yield from _types(each)
