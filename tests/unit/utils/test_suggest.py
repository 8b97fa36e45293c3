"""One did-you-mean serves all names."""

import ast
from pathlib import Path

import pytest

import telescope
from telescope.utils.text import did_you_mean, is_misspelled, nearest_name

FIELDS = ["learning_rate", "warmup_steps", "weight_decay", "model"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("learning_rat", "learning_rate"),
        ("warmup", "warmup_steps"),
        ("LEARNING-RATE", FIELDS[0]),
    ],
)
def test_a_mistyped_name_leads_to_the_nearest_known_one(typed: str, meant: str) -> None:
    assert nearest_name(typed, FIELDS) == meant
    assert did_you_mean(typed, FIELDS) == f" Did you mean '{meant}'?"


@pytest.mark.parametrize("typed", ["zzz", "", "bs"])
def test_a_name_that_resembles_none_gets_no_suggestion(typed: str) -> None:
    assert did_you_mean(typed, FIELDS) == ""


@pytest.mark.parametrize(
    ("typed", "misspelled"),
    [
        ("learning_rat", True), ("Weight_Decay", True), ("warmup_stesp", True), ("modes", True),
        ("warmup", False), ("lr", False), ("cooldown_steps", False), ("", False),
    ],
)  # fmt: skip
def test_a_misspelling_is_nearer_than_a_suggestion(typed: str, misspelled: bool) -> None:
    assert is_misspelled(typed, FIELDS) == misspelled


def test_another_word_in_a_name_is_no_misspelling() -> None:
    assert not is_misspelled("max_difficulty", ["min_difficulty"])


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
