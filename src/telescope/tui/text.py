"""Texts of a run for a terminal: without control sequences, markup or characters that reorder a line."""

from __future__ import annotations

import math
import re
from typing import Any

from rich.text import Text

from telescope.utils.text import plain

LONGEST = 20_000
"""Characters of a text that are shown; a terminal lays out all of them."""

_BIDI = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
REPLACEMENT = "\ufffd"


def safe(text: str | None, style: str = "") -> Text:
    """Returns untrusted text as it can be shown. A long one is cut, and says so."""
    text = text or ""
    cut = len(text) - LONGEST
    shown = _BIDI.sub(REPLACEMENT, plain(text[:LONGEST]))
    made = Text(shown, style=style)
    if cut > 0:
        made.append(f"\n({cut:,} more characters)", "dim")
    return made


def one_line(text: str | None) -> str:
    """Returns the beginning of untrusted text as one line."""
    return " ".join(_BIDI.sub(REPLACEMENT, plain((text or "")[:400])).split())


def number(value: Any, digits: int = 4) -> str:
    """Returns a number with its significant digits, or a dash."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"
