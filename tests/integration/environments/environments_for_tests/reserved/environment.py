"""An environment with resources, which writes down in which process they were prepared and closed."""

import asyncio
import os
from pathlib import Path

from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment


class Reserved(SingleTurnEnvironment):
    def __init__(self, notes, error_at_first=None, seconds=0.0, **kwargs):
        super().__init__(**kwargs)
        self.notes = Path(notes)
        self.error_at_first = error_at_first
        self.seconds = seconds
        self.here = 0

    def load_dataset(self, num_samples=-1):
        return [Sample(f"item {i}") for i in range(50)]

    async def prepare_resources(self):
        await asyncio.sleep(self.seconds)
        self.note("try")
        if self.error_at_first and self.notes.read_text().count("try") == 1:
            raise self.error_at_first
        self.here += 1
        self.note("prepared")

    async def close_resources(self):
        await asyncio.sleep(0.01)
        self.note("closed")

    def note(self, word):
        with self.notes.open("a") as notes:
            notes.write(f"{word} {os.getpid()}\n")

    async def compute_reward(self, completion, sample, eos_token=""):
        if completion == "end":
            os._exit(7)
        return RewardResult(1.0, sample_metrics={"pid": os.getpid(), "here": self.here})
