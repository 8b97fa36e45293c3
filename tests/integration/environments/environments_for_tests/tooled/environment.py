"""Tools that behave and tools that do not."""

import asyncio
import time

from telescope.environments.base import RewardResult, Sample
from telescope.environments.tool_env import ToolEnvironment


def spin() -> str:
    """Never return."""
    while True:
        time.sleep(0.01)


async def doze(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "slept"


def run_a_loop() -> str:
    """Synchronous code may run its own event loop."""
    asyncio.run(asyncio.sleep(0.001))
    return "ran"


class Tooled(ToolEnvironment):
    tool_timeout_seconds = 0.3

    def __init__(self, **kwargs):
        super().__init__(tools=[spin, doze, run_a_loop], **kwargs)

    def load_dataset(self, num_samples=-1):
        return [Sample(f"item {i}") for i in range(10)]

    def compute_reward(self, state, eos_token=""):
        return RewardResult(1.0, sample_metrics=self.get_tool_metrics(state))
