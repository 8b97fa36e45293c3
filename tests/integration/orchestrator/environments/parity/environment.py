"""An environment whose reward is the parity of the sampled tokens, with faults on demand."""

import time
from typing import Any

from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment


class ParityEnvironment(SingleTurnEnvironment):
    """Reward 1 for an odd sum of bytes. `fault` is `raise` or `hang` at every `fault_every`-th item."""

    def __init__(self, fault: str = "", fault_every: int = 0, always: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fault = fault
        self.fault_every = fault_every
        self.always = always

    def load_dataset(self, num_samples: int = 64, **_: Any) -> list[Sample]:
        return [Sample(prompt=f"item {index}", metadata={"index": index}) for index in range(num_samples)]

    def compute_reward(self, completion: str, sample: Sample, eos_token: str = "") -> RewardResult:
        if self.fault_every and sample.metadata["index"] % self.fault_every == 0:
            if self.fault == "raise":
                raise KeyError("numbers")
            if self.fault == "hang":
                time.sleep(2)
        if self.always is not None:
            return RewardResult(self.always)
        odd = sum(completion.encode()) % 2
        return RewardResult(float(odd), sample_metrics={"correct": float(odd)})
