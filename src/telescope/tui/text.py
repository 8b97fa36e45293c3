"""Formats texts and numbers of a run for a terminal, without control sequences or markup."""

import math
from datetime import timedelta
from typing import Any

from rich.text import Text

from telescope.utils.text import plain

LONGEST = 20_000
"""Characters of a text that are shown. A terminal lays out all of them."""


def safe(text: str | None, style: str = "") -> Text:
    """Returns untrusted text in a form that can be shown. A long text is cut, with a note."""
    text = text or ""
    made = Text(plain(text[:LONGEST]), style=style)
    return made.append(f"\n({len(text) - LONGEST:,} more characters)", "dim") if len(text) > LONGEST else made


def number(value: Any, digits: int = 4) -> str:
    """Returns a number with its significant digits, or a dash."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def clock(seconds: float | None) -> str:
    """Formats `1:02:03`, `2:03`, or a dash if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    text = str(timedelta(seconds=max(int(seconds), 0)))
    return text.removeprefix("0:").removeprefix("0") if seconds < 3600 else text
