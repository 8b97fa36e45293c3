"""Games of the package textarena: `textarena:TicTacToe-v0`.

The policy plays all players, each in a separate conversation with its own reward, or one player against an `opponent`.
Games draw from Python's shared random numbers; each rollout has its own random state, so a seed determines a game.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from telescope.environments.base import ChatMessage, Environment, RewardResult, Sample, shares
from telescope.environments.context import Chat, RefusedCall, RolloutContext
from telescope.environments.user_code import load_function, maybe_await
from telescope.errors import UserError
from telescope.utils.text import did_you_mean

REQUIRED_PACKAGES = ["textarena"]
TAKES_TASK = True


class TextArena(Environment):
    """A game of textarena, named after a colon: `textarena:TicTacToe-v0`.

    Item i is the game with the seed `seed` + i. `players` is by default the fewest that the game takes, and `options`
    are those of the game. One player has one conversation. With several the policy plays all of them, in conversations
    `player 0`, `player 1`, ... with the rewards that the game gives (self-play); the rollout's own is the first
    player's. An `opponent`, `package.module:function` or `file.py:function` from what it sees to its action, plays all
    players but one, and that one changes from item to item. It is async, or runs in a thread. A game that takes over
    `max_turns` actions ends without a reward. An answer that does not fit the context is an empty action.
    """

    task = ""
    metrics_ranges = shares("won", "invalid", "finished")

    def __init__(
        self,
        max_turns: int = 200,
        players: int | None = None,
        opponent: str | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.max_turns, self.players, self.options = max_turns, players or 0, options or {}
        self.opponent: Callable[[str], Any] | None = None
        if opponent:
            self.opponent = load_function(opponent, "textarena: the opponent")

    def load_dataset(self, num_samples: int = -1, size: int = 1000, seed: int = 0, **_: Any) -> list[Sample]:
        """Returns one item per seed, with the first player's observation."""
        from textarena.envs.registration import ENV_REGISTRY

        if f"{self.task}-raw" not in ENV_REGISTRY:
            hint = did_you_mean(self.task, [name for name in ENV_REGISTRY if not name.endswith("-raw")])
            games = "textarena.envs.registration.ENV_REGISTRY"
            raise UserError(f"textarena has no game {self.task!r}.{hint} {games} lists its games.")
        given = f"players: {self.players or 'null'}, options: {dict(self.options)}"
        for players in (self.players,) if self.players else range(1, 16):
            self.players = players
            try:
                Game(self, seed)
                break
            except (AssertionError, ValueError, TypeError) as error:  # of wrong players or options
                problem = " ".join(str(error).split())
        else:
            raise UserError(f"The game {self.task!r} refuses {given}: {problem}. Correct them.")
        if self.opponent is not None and self.players < 2:
            raise UserError(f"The game {self.task!r} has one player; leave out opponent.")
        seeds = range(seed, seed + (size if num_samples < 0 else min(num_samples, size)))
        return [Sample(Game(self, seed).look()[1], metadata={"seed": seed}) for seed in seeds]

    def cheats(self, sample: Sample) -> dict[str, str]:
        return {"empty answer": ""}  # the prompt names actions, so repeating it may be a move

    async def rollout(self, sample: Sample, context: RolloutContext) -> RewardResult:
        """Plays one game."""
        game = Game(self, sample.metadata["seed"])
        own = [sample.metadata["seed"] % self.players] if self.opponent else range(self.players)
        chats: dict[int, Chat] = {own[0]: context}
        if len(own) > 1:
            chats = {player: context.chat(f"player {player}") for player in own}
        histories: dict[int, list[ChatMessage]] = {player: [] for player in own}
        num_turns = 0
        while not game.is_done and num_turns < self.max_turns:
            num_turns += 1
            player, seen = game.look()
            if player in chats:
                game.act(await _answer(chats[player], histories[player], seen))
            elif self.opponent is not None:
                game.act(await maybe_await(await asyncio.to_thread(self.opponent, seen)))
        for player, chat in chats.items():
            chat.reward = game.rewards.get(player, 0.0)
        reward = game.rewards.get(own[0], 0.0)
        metrics = {
            "won": float(reward > 0),
            "invalid": float(any(game.info.get(player, {}).get("invalid_move", False) for player in own)),
            "finished": float(game.is_done),
            "num_turns": float(num_turns),
        }
        return RewardResult(reward, sample_metrics=metrics)


class Game:
    """One game in progress."""

    def __init__(self, environment: TextArena, seed: int) -> None:
        import textarena

        self.is_done = False
        self.rewards: dict[int, float] = {}
        self.info: dict[int, dict[str, Any]] = {}
        self._random = random.Random(seed).getstate()
        with self._own_random():
            self._game = textarena.make(f"{environment.task}-raw", **environment.options)
            self._game.reset(num_players=environment.players, seed=seed)

    def look(self) -> tuple[int, str]:
        """Returns the player whose turn it is, and that player's new observation."""
        with self._own_random():
            player, observations = self._game.get_observation()
        names = self._game.state.role_mapping
        shown = [
            text if kind.name in ("PROMPT", "GAME_BOARD") else f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in observations
            if not (sender == player and kind.name == "PLAYER_ACTION")
        ]
        return player, "\n\n".join(shown)

    def act(self, action: str) -> None:
        """Plays the action of the current player."""
        with self._own_random():
            self.is_done, _ = self._game.step(action)
        if self.is_done:
            rewards, self.info = self._game.close()
            self.rewards = {player: float(reward) for player, reward in (rewards or {}).items()}

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        before = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(before)


async def _answer(chat: Chat, history: list[ChatMessage], seen: str) -> str:
    """Adds the player's observation and the policy's answer to the conversation. Returns the answer."""
    try:
        answer = await chat.generate([*history, {"role": "user", "content": seen}])
    except RefusedCall:
        return ""
    history += [{"role": "user", "content": seen}, answer.message]
    return answer.text
