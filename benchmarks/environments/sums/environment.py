"""Sums of two numbers, for a released chat model: it knows how to add, and rarely answers in a checkable form."""

from __future__ import annotations

import random
import re
from typing import Any

from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment

HELD_OUT_SHARE = 0.2
EXAMPLE = [{"role": "user", "content": "What is 12 + 5?"}, {"role": "assistant", "content": "12 + 5 = 17"}]
"""Shows the form. Without it, one answer in a hundred has it."""


class SumsEnvironment(SingleTurnEnvironment):
    """Reward 1 if the last number of the answer is the sum."""

    reward_min, reward_max = 0.0, 1.0

    def load_dataset(
        self, num_samples: int = -1, portion: str = "train", max_number: int = 99, **_: Any
    ) -> list[Sample]:
        """Returns pairs of numbers from 1 to `max_number`; a pair and its reverse are both held out, or neither."""
        pairs = [(a, b) for a in range(1, max_number + 1) for b in range(1, a + 1)]
        random.Random(0).shuffle(pairs)
        num_held_out = int(HELD_OUT_SHARE * len(pairs))
        pairs = pairs[:num_held_out] if portion == "heldout" else pairs[num_held_out:]
        samples = [
            Sample([*EXAMPLE, {"role": "user", "content": f"What is {x} + {y}?"}], answer=str(x + y))
            for a, b in pairs
            for x, y in dict.fromkeys([(a, b), (b, a)])
        ]
        return samples if num_samples < 0 else samples[:num_samples]

    def compute_reward(self, completion: str, sample: Sample, eos_token: str = "") -> RewardResult:
        right = float(re.findall(r"\d+", completion)[-1:] == [sample.answer])
        return RewardResult(right, sample_metrics={"correct": right}, golden_answers={"correct": sample.answer})
