"""Formats text and counts for tables, records and messages."""

from __future__ import annotations

import re

LONGEST = 300
"""Characters of a line; an address, a port and a fix fit."""

# A title sequence without an end extends to the end of its line.
_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\r\n]*(?:\x07|\x1b\\|\x9c)?|\x1b[@-Z\\^_]"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Removes terminal escape sequences and all control characters except line ends."""
    lines = _ESCAPE.sub("", text).replace("\t", " ").splitlines()
    return "\n".join(_CONTROL.sub("", line) for line in lines)


def single_line(text: str) -> str:
    """Returns the first visible line, without control characters, at most `LONGEST` long."""
    line = next((line.strip() for line in plain(text).split("\n") if line.strip()), "")
    return line if len(line) <= LONGEST else line[: LONGEST - 1].rstrip() + "…"


def pluralize(number: int, noun: str) -> str:
    """Returns `1 step` or `2 steps`, for nouns whose plural adds an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
