"""As `reserved`, but every process has resources of its own."""

import asyncio
import os
from pathlib import Path

from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment


class ReservedByEach(SingleTurnEnvironment):
    resources_per = "process"

    def __init__(self, notes, seconds=0.01, **kwargs):
        super().__init__(**kwargs)
        self.notes = Path(notes)
        self.seconds = seconds

    def load_dataset(self, num_samples=-1):
        return [Sample(f"item {i}") for i in range(50)]

    async def prepare_resources(self):
        await asyncio.sleep(self.seconds)
        with self.notes.open("a") as notes:
            notes.write(f"prepared {os.getpid()}\n")

    def compute_reward(self, completion, sample, eos_token=""):
        return RewardResult(1.0, sample_metrics={"pid": os.getpid()})
