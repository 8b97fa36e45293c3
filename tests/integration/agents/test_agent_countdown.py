"""The four shipped agents ask the policy again after a wrong answer, and train what was sampled."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.agents.test_agents import sampled_once

from telescope.environments.agent_countdown.environment import AgentCountdownEnvironment

PUZZLES = {
    "dataset": "generated", "operations": "+", "min_numbers": 2, "max_numbers": 2, "max_target": 200,
    "format_reward": 0.0,
}  # fmt: skip
CHATS = {"checker": ["", "checker"]}
JOINS = {"checker": [None, None], "compacting": [None, "compaction"]}


class Puzzles(AgentCountdownEnvironment):
    """Asks for one sum, which the second answer solves."""

    def answers(self) -> Iterator[str]:
        yield "<answer>1+1</answer>"
        yield f"<answer>{'+'.join(map(str, self.get_sample(0).metadata['numbers']))}</answer>"


@pytest.mark.sandbox
@pytest.mark.parametrize("agent", ["sdk", "checker", "compacting", "sandboxed"])
async def test_a_second_answer_solves_the_puzzle(bench: Any, agent: str) -> None:
    kwargs = {**PUZZLES, "agent": agent, "pool_size": 1, "memory_mb": 256, "disk_size_gb": 0.05}
    made = await bench(Puzzles, Puzzles(**kwargs).answers(), **kwargs)
    # The second prompt of a conversation has 84 tokens.
    sample = await made.run(max_context=80 if agent == "compacting" else 4096)
    assert sample.failure_message is None
    assert [turn.chat for turn in sample.turns] == CHATS.get(agent, ["", ""])
    assert [turn.divergence for turn in sample.turns] == JOINS.get(agent, [None, None])
    correct = sample.chat_rewards["checker"] if agent == "checker" else sample.reward.sample_metrics["correct"]
    assert correct == 1.0
    sampled_once(sample, made.policy)
