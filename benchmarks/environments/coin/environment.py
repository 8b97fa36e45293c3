"""A minimal environment with a gradient: the reward depends on the answer's length in characters."""

from typing import Any

from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment

WORDS = "the target is reached from these numbers with plus and minus and each of them is used at most once "


class CoinEnvironment(SingleTurnEnvironment):
    """Reward 1 for an answer of odd length, so that a group's rewards differ."""

    def load_dataset(self, num_samples: int = 4096, **_: Any) -> list[Sample]:
        return [Sample(prompt=f"item {index}: {WORDS * 4}") for index in range(num_samples)]

    def compute_reward(self, completion: str, sample: Sample, eos_token: str = "") -> RewardResult:
        odd = float(len(completion) % 2)
        return RewardResult(odd, sample_metrics={"correct": odd})
