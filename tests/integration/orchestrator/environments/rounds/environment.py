"""A conversation of `max_turns` rounds whose reward depends on the sampled tokens alone: the share of odd answers."""

from typing import Any

from telescope.environments.base import ChatMessage, MultiTurnEnvironment, RewardResult, RolloutState, Sample


class RoundsEnvironment(MultiTurnEnvironment):
    continues_after_truncation = True

    def __init__(self, max_turns: int = 3, **kwargs: Any) -> None:
        super().__init__(max_turns=max_turns, **kwargs)

    def load_dataset(self, num_samples: int = 64, **_: Any) -> list[Sample]:
        return [Sample(prompt=f"item {index}") for index in range(num_samples)]

    def env_response(self, messages: list[ChatMessage], state: RolloutState) -> list[ChatMessage]:
        return [{"role": "user", "content": f"round {state.num_turns}"}]

    def compute_reward(self, state: RolloutState, eos_token: str = "") -> RewardResult:
        odd = [sum(step.completion_token_ids) % 2 for step in state.trajectory]
        return RewardResult(sum(odd) / len(odd))
