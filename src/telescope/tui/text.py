"""Texts and numbers of a run for a terminal, without control sequences or markup."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Any

from rich.text import Text

from telescope.utils.text import plain

LONGEST = 20_000
"""Characters of a text that are shown; a terminal lays out all of them."""

_TEMPLATES = (
    (re.compile(r"<\|im_start\|>([a-z_]+)\n?"), "<|im_end|>"),
    (re.compile(r"<\|start_header_id\|>([a-z_]+)<\|end_header_id\|>\n{0,2}"), "<|eot_id|>"),
    (re.compile(r"<start_of_turn>([a-z_]+)\n?"), "<end_of_turn>"),
    (re.compile(r"<\|(system|user|assistant|observation)\|>\n?"), "<|endoftext|>"),
)
"""How chat templates begin and end a message. `conversation.ts` of the dashboard has the same."""
_BEGINNING = re.compile(r"<\|begin_of_text\|>|<bos>")


def safe(text: str | None, style: str = "") -> Text:
    """Returns untrusted text as it can be shown. A long one is cut, and says so."""
    text = text or ""
    made = Text(plain(text[:LONGEST]), style=style)
    return made.append(f"\n({len(text) - LONGEST:,} more characters)", "dim") if len(text) > LONGEST else made


def prompt_messages(prompt: str) -> list[tuple[str, str]]:
    """Returns role and text of the messages in a rendered prompt. A prompt of no known chat template is one message.

    The last, empty message of a prompt, which asks the model to answer, is left out.
    """
    for opening, close in _TEMPLATES:
        before, *found = opening.split(prompt)
        if found:
            messages = [("prompt", before)] if _BEGINNING.sub("", before).strip() else []
            messages += [
                (role, text.partition(close)[0].strip()) for role, text in zip(*[iter(found)] * 2, strict=True)
            ]
            return messages if messages[-1][1] else messages[:-1]
    return [("prompt", prompt)] if prompt else []


def without_end(text: str) -> str:
    """Returns the text of a turn without the token that ends it."""
    for _, close in _TEMPLATES:
        text = text.rstrip().removesuffix(close)
    return text


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
