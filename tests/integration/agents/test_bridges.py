"""Bridges to other projects over the real worker: what they play is trained, and scored by their rules."""

import sys
from typing import Any

from tests.integration.agents.test_agents import sampled_once
from tests.integration.environments.test_process_agent import BRIDGE

from telescope.environments.process_agent import ProcessAgent
from telescope.environments.textarena.environment import TextArena


class TicTacToe(TextArena):
    task = "TicTacToe-v0"


async def test_self_play_trains_each_player_with_its_own_reward(bench: Any) -> None:
    made = await bench(TicTacToe, ["[0]", "[3]", "[1]", "[4]", "[2]"], size=2)
    sample = await made.run()
    assert sample.chat_rewards == {"player 0": 1.0, "player 1": -1.0}
    assert sample.reward.total_reward == 1.0
    assert [turn.text for turn in sample.turns] == ["[0]", "[3]", "[1]", "[4]", "[2]"]
    assert len(sample.sequences()) == 2
    sampled_once(sample, made.policy)


class Words(ProcessAgent):
    default_command = (sys.executable,)


async def test_a_process_of_its_own_reaches_the_policy_at_the_endpoint(bench: Any, tmp_path: Any) -> None:
    (tmp_path / "bridge.py").write_text(BRIDGE)
    made = await bench(type("Words", (Words,), {"bridge": tmp_path / "bridge.py"}), ["yxalag"])
    sample = await made.run()
    await made.environments.close()
    assert sample.reward.total_reward == 1.0
    assert [turn.text for turn in sample.turns] == ["yxalag"]
    sampled_once(sample, made.policy)
