"""Agents that run the turn loop, beside calls of their own: it ends with the rollout and leaves nothing behind."""

import asyncio
from typing import Any

import pytest
from tests.integration.agents.conftest import Agent
from tests.integration.agents.test_agents import sampled_once

from telescope.environments.base import (
    ChatMessage,
    EvalMetricsResult,
    MultiTurnEnvironment,
    RewardResult,
    RolloutState,
    Sample,
    SingleTurnEnvironment,
)
from telescope.errors import DeadlineExceeded, InfrastructureError

QUESTION = [{"role": "user", "content": "Was it hard?"}]


class Guesses(Agent, MultiTurnEnvironment):
    """Guesses until an answer is right. `ended` counts the turns of rollouts that have ended."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ended: list[int] = []

    def env_response(self, messages: Any, state: Any) -> list[ChatMessage]:
        return [{"role": "user", "content": "Wrong."}]

    def is_done(self, state: Any) -> tuple[bool, str | None]:
        return state.trajectory[-1].text == "4", "right"

    def compute_reward(self, state: Any, eos_token: str = "") -> RewardResult:
        return RewardResult(1.0 / state.num_turns, {"turns": state.num_turns})

    def end_rollout(self, state: Any) -> None:
        self.ended.append(state.num_turns)


class Reviewed(Guesses):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        result = await super().rollout(sample, context)
        with context.chat("reviewer", reward=0.0) as reviewer:
            review = await reviewer.generate(QUESTION)
            reviewer.reward = float(review.text == "yes")
        return result


async def test_a_rollout_may_run_the_turn_loop_and_go_on(bench: Any) -> None:
    made = await bench(Reviewed, ["5", "4", "yes"])
    sample = await made.run()
    assert (sample.total_reward, sample.end_reason, sample.chat_rewards) == (0.5, "right", {"reviewer": 1.0})
    assert sample.reward.sample_metrics == {"agent/calls": 3, "agent/reward_reviewer": 1.0, "turns": 2.0}
    assert [(turn.text, turn.parent, turn.chat) for turn in sample.turns] == [
        ("5", None, ""), ("4", 0, ""), ("yes", None, "reviewer"),
    ]  # fmt: skip
    assert [s.chat for s in sample.sequences()] == ["", "reviewer"]
    sampled_once(sample, made.policy)


class Abandoned(Guesses):
    """In its first attempt something fails beside the loop."""

    attempts = 0

    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        self.attempts += 1
        if self.attempts == 1:
            await asyncio.gather(context.take_turns(), self.lose())
        await context.generate(QUESTION)
        return RewardResult(1.0)

    async def lose(self) -> None:
        await asyncio.sleep(0.1)
        raise InfrastructureError("the sandbox is gone")


async def test_a_turn_loop_ends_with_the_attempt_that_began_it(bench: Any) -> None:
    made = await bench(Abandoned, lambda prompt: "5")
    made.policy.before = lambda: asyncio.sleep(0.03)
    sample = await made.run()
    assert (sample.total_reward, sample.num_infrastructure_retries) == (1.0, 1)
    assert [turn.parent for turn in sample.turns] == [None]
    environment = made.environment
    assert len(environment.ended) == 1
    num_requests = len(made.policy.requests)
    await asyncio.sleep(0.1)
    assert len(made.policy.requests) == num_requests


class Beside(Guesses):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        result, *_ = await asyncio.gather(
            context.take_turns(), *(context.chat(f"chat {n}").generate(QUESTION) for n in range(4))
        )
        return result


@pytest.mark.parametrize("free", [True, False])
async def test_a_loop_beside_other_calls_leaves_every_slot_free(bench: Any, free: bool) -> None:
    made = await bench(Beside, lambda prompt: "4" if prompt.count("Wrong.") == 2 else "5")
    number = iter(range(100))
    made.policy.before = lambda: asyncio.sleep(0.01 * (next(number) % 3))
    sample = await made.run(free_lane_after_generation=free)
    assert sample.total_reward == pytest.approx(1 / 3)
    assert made.slots.num_leased == 0 and len(made.slots.leases) == 7


class Measured(Agent, SingleTurnEnvironment):
    def compute_reward(self, completion: str, sample: Sample, eos_token: str = "") -> RewardResult:
        return RewardResult(1.0)

    def compute_eval_metrics(self, completion: str, sample: Sample, eos_token: str = "") -> EvalMetricsResult:
        return EvalMetricsResult({"accuracy": 1.0})


class MeasuredAgent(Measured):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        return await super().rollout(sample, context)


async def test_an_eval_without_a_reward_has_none_through_an_agent_either(bench: Any) -> None:
    plain, agent = [await (await bench(cls, ["4"])).run(for_eval=True) for cls in (Measured, MeasuredAgent)]
    assert (plain.reward.total_reward, plain.reward.sample_metrics) == (None, {"accuracy": 1.0})
    assert (agent.reward.total_reward, agent.reward.sample_metrics) == (None, {"accuracy": 1.0, "agent/calls": 1})


class Cancelled(Guesses):
    """It is cancelled when its state has just been created."""

    cancel: Any = None

    async def create_initial_state(self, sample: Sample) -> RolloutState:  # type: ignore[override]
        asyncio.get_running_loop().call_soon(self.cancel)
        return RolloutState(sample, self.name)


async def test_a_state_that_was_created_ends_whenever_its_rollout_is_cancelled(bench: Any) -> None:
    made = await bench(Cancelled, ["4"])
    rollout = made.rollout()
    environment = made.environment
    environment.cancel = rollout.cancel
    assert (await rollout.run()).cancelled
    await made.environments.close()
    assert environment.ended == [0]


class Careless(Guesses):
    """Raises after its loop."""

    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        await context.take_turns()
        raise ValueError("no luck")


async def test_a_rollout_that_fails_after_its_loop_does_not_end_as_the_loop_did(bench: Any) -> None:
    sample = await (await bench(Careless, ["4"])).run()
    assert (sample.failure_kind, sample.end_reason) == ("environment", "rollout_error")


class Waiting(Guesses):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        return await context.take_turns()


async def test_a_request_slot_that_never_comes_is_an_error_of_the_run_for_agents_too(bench: Any) -> None:
    made = await bench(Waiting, ["4"])

    async def never() -> None:
        raise DeadlineExceeded("no inference slot came free")

    made.slots.wait = never
    with pytest.raises(DeadlineExceeded):
        await made.run()
