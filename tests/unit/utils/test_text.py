"""Words of messages: suggestions, single lines, plurals."""

import ast
from pathlib import Path

import pytest

import telescope
from telescope.utils.text import LONGEST, did_you_mean, is_misspelled, nearest_name, plain, pluralize, single_line

FIELDS = ["learning_rate", "warmup_steps", "weight_decay", "model"]


@pytest.mark.parametrize(("typed", "meant"), [
    ("learning_rat", "learning_rate"), ("warmup", "warmup_steps"), ("LEARNING-RATE", "learning_rate"),
    ("zzz", None), ("", None), ("bs", None),
])  # fmt: skip
def test_a_mistyped_name_leads_to_the_nearest_known_one_if_it_resembles_one(typed: str, meant: str | None) -> None:
    assert nearest_name(typed, FIELDS) == meant
    assert did_you_mean(typed, FIELDS) == (f" Did you mean '{meant}'?" if meant else "")


@pytest.mark.parametrize(("typed", "misspelled"), [
    ("learning_rat", True), ("Weight_Decay", True), ("warmup_stesp", True), ("modes", True), ("warmup", False),
    ("lr", False), ("cooldown_steps", False), ("", False), ("max_difficulty", False),
])  # fmt: skip
def test_a_misspelling_is_nearer_than_a_suggestion(typed: str, misspelled: bool) -> None:
    assert is_misspelled(typed, [*FIELDS, "min_difficulty"]) == misspelled


def test_no_other_module_compares_spellings() -> None:
    package = Path(telescope.__file__).parent
    users = []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
            from_difflib = isinstance(node, ast.ImportFrom) and node.module == "difflib"
            if "difflib" in names or (from_difflib and names != {"unified_diff"}):
                users.append(str(path.relative_to(package)))
    assert users == ["utils/text.py"]


@pytest.mark.parametrize(("text", "line"), [
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
])  # fmt: skip
def test_the_first_visible_line_is_kept_plain_and_short(text: str, line: str) -> None:
    assert single_line(text) == line


def test_plain_keeps_the_lines() -> None:
    assert plain("\x1b[1;31ma\x1b[0m\n\nb") == "a\n\nb"


@pytest.mark.parametrize(("number", "words"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1500, "1500 steps")])
def test_nouns_have_a_plural_except_after_one(number: int, words: str) -> None:
    assert pluralize(number, "step") == words
