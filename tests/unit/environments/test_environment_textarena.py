"""`textarena:GAME`: games of the real package, by a scripted policy."""

import asyncio
import random
import re
import threading
import time

import pytest

from telescope.environments.context import Answer, Call, RefusedCall, RolloutContext
from telescope.environments.registry import get_environment
from telescope.environments.textarena.environment import TextArena
from telescope.errors import UserError

TIC_TAC_TOE = "textarena:TicTacToe-v0"


class Policy:
    """Services whose policy plays `moves[chat]` in turn, or the first number in brackets that it sees last."""

    api_key = "key"

    def __init__(self, **moves: list[str]) -> None:
        self.moves = {name.replace("_", " "): list(actions) for name, actions in moves.items()}
        self.calls: list[Call] = []

    async def complete(self, call: Call) -> Answer:
        self.calls.append(Call(messages=list(call.messages), chat=call.chat))
        if call.chat in self.moves:
            return Answer(f"I take {self.moves[call.chat].pop(0)}.", id=str(len(self.calls)))
        free = re.findall(r"\[\d\]", call.messages[-1]["content"].rpartition("Available Moves")[2])
        return Answer(free[0] if free else "[5]", id=str(len(self.calls)))


class Refusing(Policy):
    async def complete(self, call: Call) -> Answer:
        raise RefusedCall("the prompt is too long")


def first_free(seen: str) -> str:
    return re.findall(r"\[\d\]", seen.rpartition("Available Moves")[2])[0]


def make(name: str, **kwargs) -> TextArena:
    environment = get_environment(name, **{"size": 2, **kwargs})
    assert isinstance(environment, TextArena)
    return environment


async def play(environment: TextArena, policy: Policy, item: int = 0):
    context = RolloutContext(policy, time.monotonic() + 60)
    return context, await environment.rollout(environment.get_sample(item), context)


async def test_each_player_of_self_play_has_a_conversation_and_a_reward_of_its_own():
    policy = Policy(player_0=["[0]", "[1]", "[2]"], player_1=["[3]", "[4]"])
    context, result = await play(make(TIC_TAC_TOE), policy)
    assert {name: chat.reward for name, chat in context.chats.items()} == {"player 0": 1.0, "player 1": -1.0}
    assert (result.total_reward, result.sample_metrics["won"], result.sample_metrics["num_turns"]) == (1.0, 1.0, 5.0)
    last = policy.calls[-2]
    assert [message["role"] for message in last.messages] == ["user", "assistant", "user"]
    assert "You are Player 1" in last.messages[0]["content"]
    assert "[Player 0] I take [1]" in last.messages[2]["content"]
    assert "[Player 1] I take" not in last.messages[2]["content"]


async def test_an_opponent_plays_the_other_player_and_they_change():
    environment = make(TIC_TAC_TOE, opponent=f"{__name__}:first_free", seed=4)
    for item, reward in enumerate((1.0, -1.0)):
        policy = Policy(**{"": ["[8]", "[7]", "[6]"]})
        context, result = await play(environment, policy, item)
        assert (result.total_reward, result.sample_metrics["num_turns"], context.chats) == (reward, 5, {})
        assert f"You are Player {item}" in policy.calls[0].messages[0]["content"]


async def test_one_player_has_one_conversation_and_the_seed_decides_the_game():
    environment = make("textarena:GuessTheNumber-v0", size=8)
    games = [await play(environment, Policy(), item) for item in range(8)]
    again = [await play(environment, Policy(), item) for item in range(8)]
    assert [result for _, result in games] == [result for _, result in again]
    turns, rewards = ({r.sample_metrics["num_turns"] for _, r in games}, {r.total_reward for _, r in games})
    assert len(turns) + len(rewards) > 2
    assert not any(context.chats for context, _ in games)


async def test_the_shared_random_numbers_are_left_alone():
    random.seed(1)
    expected = random.random()
    random.seed(1)
    await play(make("textarena:PigDice-v0"), Policy(player_0=["[roll]"] * 99, player_1=["[hold]"] * 99))
    assert random.random() == expected


@pytest.mark.parametrize("policy", [Policy(player_0=["[9]", "[9]"]), Refusing()], ids=["invalid move", "does not fit"])
async def test_invalid_moves_and_answers_that_do_not_fit_lose(policy):
    _, result = await play(make(TIC_TAC_TOE), policy)
    assert (result.total_reward, result.sample_metrics["invalid"]) == (-1.0, 1.0)


async def test_a_game_that_takes_too_long_gives_nobody_a_reward():
    context, result = await play(make(TIC_TAC_TOE, max_turns=3), Policy())
    assert {chat.reward for chat in context.chats.values()} == {0.0}
    assert (result.total_reward, result.sample_metrics["finished"]) == (0.0, 0.0)


@pytest.mark.parametrize(("name", "kwargs", "message"), [
    ("textarena:TicTacTo-v0", {}, "Did you mean 'TicTacToe-v0'"),
    ("textarena", {}, "has no game ''"),
    ("textarena:GuessTheNumber-v0", {"opponent": f"{__name__}:first_free"}, "has one player"),
    (TIC_TAC_TOE, {"players": 3}, r"refuses players: 3, options: \{\}: The number of players has to be 2, received 3"),
    (
        "textarena:GuessTheNumber-v0",
        {"options": {"foo": 1}},
        "players: null, options: {'foo': 1}: .* argument 'foo'. Correct them.",
    ),
    (TIC_TAC_TOE, {"opponent": "nowhere:plays"}, "the opponent 'nowhere:plays' cannot be imported"),
])  # fmt: skip
def test_a_game_that_cannot_be_played_says_why_before_a_run(name, kwargs, message):
    with pytest.raises(UserError, match=message):
        len(get_environment(name, **kwargs))


def slow(seen: str) -> str:
    SEEN.append(threading.current_thread() is threading.main_thread())
    return first_free(seen)


async def asks(seen: str) -> str:
    await asyncio.sleep(0)
    return first_free(seen)


SEEN: list[bool] = []


@pytest.mark.parametrize("opponent", [f"{__name__}:slow", f"{__file__}:asks"])
async def test_an_opponent_is_async_or_does_not_block_the_event_loop(opponent):
    SEEN.clear()
    policy = Policy(**{"": ["[8]", "[7]", "[6]"]})
    _, result = await play(make(TIC_TAC_TOE, opponent=opponent, seed=4), policy)
    assert result.total_reward == 1.0 and not any(SEEN)
