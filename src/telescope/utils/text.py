"""A text of any origin as one line for a table, a record or a terminal.

Numbers of things in a sentence.
"""

from __future__ import annotations

import re

LONGEST = 300
"""Characters of a line; an address, a port and a fix fit."""

# A title that does not end takes the rest of its line, not what is said after it.
_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\r\n]*(?:\x07|\x1b\\|\x9c)?|\x1b[@-Z\\^_]"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """The text without the sequences that colour a terminal, and without other control characters but line ends."""
    lines = _ESCAPE.sub("", text).replace("\t", " ").splitlines()
    return "\n".join(_CONTROL.sub("", line) for line in lines)


def single_line(text: str, longest: int = LONGEST) -> str:
    """The first line that says something, plain, and cut where it is longer than `longest`."""
    line = next((line.strip() for line in plain(text).split("\n") if line.strip()), "")
    return line if len(line) <= longest else line[: longest - 1].rstrip() + "…"


def pluralize(number: int, noun: str) -> str:
    """`1 step`, `2 steps`: for nouns whose plural adds an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
