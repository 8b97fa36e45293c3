"""Random rewards, for runs in which only speed counts."""

import zlib
from typing import Any

from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment

WORDS = "the target is reached from these numbers with plus and minus and each of them is used at most once "


class RandomRewardEnvironment(SingleTurnEnvironment):
    """A reward from 0 to 1 by the answer's text, so that a group's rewards differ."""

    def load_dataset(self, num_samples: int = 4096, repeats: int = 4, **_: Any) -> list[Sample]:
        """Returns prompts of about 20 tokens for each of `repeats`."""
        return [Sample(prompt=f"item {index}: {WORDS * repeats}") for index in range(num_samples)]

    def compute_reward(self, completion: str, sample: Sample, eos_token: str = "") -> RewardResult:
        reward = zlib.crc32(completion.encode()) / 2**32
        return RewardResult(reward, sample_metrics={"reward": reward})
