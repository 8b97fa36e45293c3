"""Wordle: guess a secret word of five letters. The response colors the letters of a guess.

The words are our own list (`words.json`) or TextArena's. The rules and the feedback (G, Y, X) are the same as in
TextArena's Wordle, without its module-level state. A guess is the only word in square brackets in an answer. An answer
with no such word, with several, or with another number of letters uses up a turn and reveals nothing.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from telescope.environments.base import ChatMessage, MultiTurnEnvironment, RewardResult, RolloutState, Sample, shares
from telescope.environments.parsers import strip_think_tags

REQUIRED_PACKAGES: list[str] = []
OPTIONAL_PACKAGES = ["textarena"]

WORD_LENGTH = 5
GAME_KEY = "wordle"
"""Key of `state.custom` with the game."""

PROMPT = (
    "You are playing Wordle. A secret word of five letters has been chosen. You have {turns} attempts to guess it.\n"
    "In each attempt write one word in square brackets, as in [word]. The response shows for each letter:\n"
    "G: it is in the word, in this place\nY: it is in the word, in another place\nX: it is not in the word\n"
    "Make your first guess."
)

_BRACKETED = re.compile(r"\[\s*([A-Za-z]{1,32})\s*\]")


@dataclass(slots=True)
class Game:
    """The progress of one game."""

    guesses: list[tuple[str, str]] = field(default_factory=list)
    """Each valid guess and its colors."""
    num_invalid: int = 0
    solved: bool = False


class WordleEnvironment(MultiTurnEnvironment):
    """Guess a word of five letters.

    `word_source` is `own` (a list that ships with Telescope) or `textarena` (its list, if the package is installed).
    `require_known_words` refuses guesses that are not on the list. `seed` determines the order of the secret words. The
    reward is 1 for the word, else `partial_reward` times the share of letters in place of the best guess (letters in
    another place count half).
    """

    reward_min, reward_max = 0.0, 1.0
    metrics_ranges = shares("solved", "best_share")

    def __init__(
        self,
        max_turns: int = 6,
        word_source: Literal["own", "textarena"] = "own",
        require_known_words: bool = False,
        partial_reward: Annotated[float, Field(ge=0, lt=1)] = 0.2,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_turns=max_turns, **kwargs)
        self.word_source = word_source
        self.require_known_words = require_known_words
        self.partial_reward = float(partial_reward)

    def load_dataset(self, num_samples: int = -1, seed: int = 0, **_: Any) -> list[Sample]:
        """Returns one item per secret word, shuffled by `seed`. If samples outnumber words, the list repeats."""
        words = list(secret_words(self.word_source))
        random.Random(f"wordle {seed}").shuffle(words)
        count = len(words) if num_samples < 0 else num_samples
        prompt = PROMPT.format(turns=self.max_turns)
        return [Sample(prompt, answer=words[i % len(words)], metadata={"round": i // len(words)}) for i in range(count)]

    def solution(self, sample: Sample) -> list[str]:
        return [f"[{sample.answer}]"]

    def create_initial_state(self, sample: Sample) -> RolloutState:
        state = super().create_initial_state(sample)
        state.custom[GAME_KEY] = Game()
        return state

    def env_response(self, messages: list[ChatMessage], state: RolloutState) -> list[ChatMessage]:
        game: Game = state.custom[GAME_KEY]
        left = self.max_turns - state.num_turns
        rest = f"You have {left} {'attempt' if left == 1 else 'attempts'} left."
        word, problem = self._read_guess(state.trajectory[-1].text, game)
        if word is None:
            game.num_invalid += 1
            return [{"role": "user", "content": f"{problem} {rest}"}]
        colors = color(word, state.sample.answer)
        game.guesses.append((word, colors))
        game.solved = word == state.sample.answer
        return [{"role": "user", "content": f"{' '.join(word.upper())}\n{' '.join(colors)}\n{rest}"}]

    def is_done(self, state: RolloutState) -> tuple[bool, str | None]:
        if state.custom[GAME_KEY].solved:
            return True, "solved"
        return super().is_done(state)

    def compute_reward(self, state: RolloutState, eos_token: str = "") -> RewardResult:
        game: Game = state.custom[GAME_KEY]
        shares = [(colors.count("G") + colors.count("Y") / 2) / WORD_LENGTH for _, colors in game.guesses]
        best = max(shares, default=0.0)
        return RewardResult(
            total_reward=1.0 if game.solved else self.partial_reward * best,
            sample_metrics={
                "solved": float(game.solved),
                "best_share": best,
                "num_guesses": float(len(game.guesses)),
                "num_invalid": float(game.num_invalid),
            },
            golden_answers={"word": state.sample.answer},
            info_turns=[{"guess": word, "feedback": colors} for word, colors in game.guesses],
        )

    def _read_guess(self, completion: str, game: Game) -> tuple[str | None, str | None]:
        """Returns the guess, or None and what is wrong with it."""
        words = {word.lower() for word in _BRACKETED.findall(strip_think_tags(completion))}
        if len(words) != 1:
            return None, "Write exactly one word in square brackets, as in [word]."
        word = words.pop()
        if len(word) != WORD_LENGTH:
            return None, f"The word must have {WORD_LENGTH} letters."
        if any(word == guess for guess, _ in game.guesses):
            return None, f"You have guessed {word} before."
        if self.require_known_words and word not in secret_words(self.word_source):
            return None, f"{word} is not a known word."
        return word, None


def color(guess: str, secret: str) -> str:
    """Returns G, Y or X for each letter. A secret letter colors only one letter of the guess, those in place first."""
    left = [s for g, s in zip(guess, secret, strict=True) if g != s]
    colors = []
    for g, s in zip(guess, secret, strict=True):
        if g == s:
            colors.append("G")
        elif g in left:
            left.remove(g)
            colors.append("Y")
        else:
            colors.append("X")
    return "".join(colors)


_OWN_WORDS = Path(__file__).parent / "words.json"


@cache
def secret_words(source: str) -> tuple[str, ...]:
    """Returns the words to guess, sorted. `textarena` downloads its list at its first use."""
    if source == "own":
        return tuple(json.loads(_OWN_WORDS.read_text(encoding="utf-8")))
    from textarena.envs.Wordle.env import WordleEnv

    words = WordleEnv(word_length=5).word_list
    return tuple(sorted({word.lower() for word in words if len(word) == 5 and word.isascii() and word.isalpha()}))
