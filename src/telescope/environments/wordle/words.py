"""Secret words: common English words of five letters (`words.json`), or TextArena's list, where it is installed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from telescope.errors import UserError

_OWN_WORDS = Path(__file__).parent / "words.json"


@cache
def secret_words(source: str) -> tuple[str, ...]:
    """The words to guess, sorted. `source` is `own` or `textarena`.

    Raises `UserError` when TextArena, or the word list that it downloads at its first use, cannot be had.
    """
    if source == "own":
        return tuple(json.loads(_OWN_WORDS.read_text(encoding="utf-8")))
    try:
        from textarena.envs.Wordle.env import WordleEnv

        words = WordleEnv(word_length=5).word_list
    except Exception as error:
        raise UserError(
            f"wordle: the words of textarena cannot be had ({type(error).__name__}: {error}). Install it with: "
            "pip install textarena, and let it download its lists once; or use word_source: own."
        ) from error
    return tuple(sorted({word.lower() for word in words if len(word) == 5 and word.isascii() and word.isalpha()}))
