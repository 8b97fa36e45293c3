"""Counts with nouns."""

from __future__ import annotations

import pytest

from telescope.utils.text import pluralize


@pytest.mark.parametrize(("number", "words"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1500, "1500 steps")])
def test_nouns_have_a_plural_except_after_one(number: int, words: str) -> None:
    assert pluralize(number, "step") == words
