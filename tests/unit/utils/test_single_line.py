"""One line of any text."""

from __future__ import annotations

import pytest

from telescope.utils.text import LONGEST, plain, single_line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ValueError: a bug", "ValueError: a bug"),
        ("", ""),
        ("\n  \n  first\nsecond", "first"),
        ("\x1b[36mray::InferenceActor.start()\x1b[39m (pid=1)\n  File", "ray::InferenceActor.start() (pid=1)"),
        ("\x1b]0;title\x07a\tb\x00\r\nc", "a b"),
        ("\x1b]0;a title without an end\nValueError: a bug", "ValueError: a bug"),
        ("\x9b31mred\x9b0m \x9d0;title\x9cand\x90 plain", "red and plain"),
        ("\u202efdp.exe\u2066", "fdp.exe"),
        ("x" * LONGEST, "x" * LONGEST),
        ("x" * 5000, "x" * (LONGEST - 1) + "\u2026"),
    ],
)
def test_the_first_visible_line_is_kept_plain_and_short(text: str, line: str) -> None:
    assert single_line(text) == line


def test_plain_keeps_the_lines() -> None:
    assert plain("\x1b[1;31ma\x1b[0m\n\nb") == "a\n\nb"
