"""Tools that run commands in local sandboxes: one of a pool for each rollout, or one for each call."""

import asyncio

from telescope.environments.base import RewardResult, RolloutState, Sample
from telescope.environments.tool_env import ToolEnvironment
from telescope.sandbox import GenericSandboxPool, SandboxConfig, SandboxImagePullError, get_provider


async def shell(command: str, state: RolloutState) -> str:
    """Run a command in the sandbox of the rollout."""
    pool = state.custom["pool"]
    handle = state.custom["sandbox"] = state.custom.get("sandbox") or await pool.acquire()
    return (await pool.provider.execute(handle, command)).stdout


def once(command: str) -> str:
    """Run a command in a sandbox of its own."""
    provider = get_provider("local")

    async def run() -> str:
        handle = await provider.create(SandboxConfig())
        try:
            return (await provider.execute(handle, command)).stdout
        finally:
            await provider.destroy(handle)

    return asyncio.run(run())


class Unobtainable(type(get_provider("local"))):
    """A provider without images."""

    async def create(self, config):
        raise SandboxImagePullError(f"no image {config.image!r}")


async def pull(image: str) -> str:
    """Create a sandbox from an image that does not exist."""
    try:
        await Unobtainable().create(SandboxConfig(image))
    except SandboxImagePullError as error:
        return str(error)
    return "never"


class SandboxedTools(ToolEnvironment):
    tool_timeout_seconds = 10.0

    def __init__(self, **kwargs):
        super().__init__(tools=[shell, once, pull], max_turns=2, **kwargs)
        self.pool = GenericSandboxPool(get_provider("local"), SandboxConfig(), 2)

    async def prepare_resources(self):
        await self.pool.start()

    async def close_resources(self):
        await self.pool.shutdown()

    def load_dataset(self, num_samples=-1):
        return [Sample(f"question {i}") for i in range(10)]

    def create_initial_state(self, sample):
        state = super().create_initial_state(sample)
        state.custom["pool"] = self.pool
        return state

    async def end_rollout(self, state):
        if handle := state.custom.get("sandbox"):
            await self.pool.release(handle)

    def compute_reward(self, state, eos_token=""):
        return RewardResult(1.0)
