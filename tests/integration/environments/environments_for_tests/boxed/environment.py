"""Runs each answer as a command in a sandbox. The answer `end` ends the process of the environment."""

import os

from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment
from telescope.sandbox import GenericSandboxPool, SandboxConfig, get_provider


class Boxed(SingleTurnEnvironment):
    resources_per = "process"

    def load_dataset(self, num_samples=-1):
        return [Sample(f"question {i}") for i in range(50)]

    async def prepare_resources(self):
        config = SandboxConfig(memory_mb=256, disk_size_gb=0.05)
        self.pool = GenericSandboxPool(get_provider(), config, pool_size=4)
        await self.pool.start()

    async def close_resources(self):
        await self.pool.shutdown()

    async def compute_reward(self, completion, sample, eos_token=""):
        sandbox = await self.pool.acquire(timeout=60)
        try:
            if completion == "end":
                os._exit(7)
            if completion == "lose":
                await self.pool.provider.destroy(sandbox)
            result = await self.pool.provider.execute(sandbox, completion, timeout=30)
        finally:
            await self.pool.release(sandbox)
        return RewardResult(float(result.exit_code == 0), sample_metrics={"pid": os.getpid()})
