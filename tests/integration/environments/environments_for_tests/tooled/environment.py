"""Tools that behave and tools that do not."""

import asyncio
import time

from telescope.environments.base import RewardResult, Sample
from telescope.environments.tool_env import ToolEnvironment
from telescope.errors import InfrastructureError


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


def look_up(key: str) -> str:
    """Ask a service that is down."""
    raise InfrastructureError(f"the service has no connection for {key}")


async def fetch(key: str) -> str:
    """Ask a service that goes down while it is asked."""
    await asyncio.sleep(0.01)
    return look_up(key)


class Tooled(ToolEnvironment):
    tool_timeout_seconds = 0.3

    def __init__(self, **kwargs):
        super().__init__(tools=[spin, doze, run_a_loop, look_up, fetch], **kwargs)

    def load_dataset(self, num_samples=-1):
        return [Sample(f"item {i}") for i in range(10)]

    def compute_reward(self, state, eos_token=""):
        return RewardResult(1.0, sample_metrics=self.get_tool_metrics(state))
