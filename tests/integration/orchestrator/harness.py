"""Runs of the real loops (`tests.fakes.run`) over fake engines in the test's own process, which tests
may kill, with a small environment that fails on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.engine import FakeEngineSettings
from tests.fakes.run import FakeRun, FakeTrainer, fake_run
from tests.fakes.server import FakeEngineServer

from telescope.config import TelescopeConfig
from telescope.inference.client import EngineClient

ENVIRONMENTS = Path(__file__).parent / "environments"


@dataclass
class FakeHandle:
    """The supervisor of a fake server: restarts it `delay` seconds after `kill`."""

    server: FakeEngineServer
    delay: float = 0.2
    restarts: int = 0
    state: str = "ready"
    last_log_lines: list[str] = field(default_factory=list)
    start_seconds: float | None = 0.0
    error: str | None = None

    async def status(self) -> FakeHandle:
        return self

    async def dump_stacks(self) -> str:
        return ""

    async def kill(self) -> None:
        """Simulates kill -9 of the process, and the restart that follows."""
        self.state = "restarting"
        self.server.die()
        await asyncio.sleep(self.delay)
        await self.server.start()
        self.restarts += 1
        self.state = "ready"


@dataclass
class Harness(FakeRun):
    """A run under test, and the fake servers that it talks to."""

    fakes: list[FakeEngineServer]
    handles: list[FakeHandle]


@dataclass
class Ground:
    """Shared by all runs: a tokenizer."""

    tokenizer: Path


def config_for(tokenizer: Path, **fields: Any) -> TelescopeConfig:
    """A small config; `environment` are the kwargs of the parity environment."""
    kwargs = fields.pop("environment", {})
    defaults: dict[str, Any] = {
        "model": str(tokenizer), "environments": [{"name": "parity", "kwargs": kwargs}],
        "environments_path": [str(ENVIRONMENTS)], "environment_timeout_seconds": 3.0, "environment_workers": 1,
        "group_size": 4, "prompts_batch_size_for_trainer": 4, "number_of_steps": 5, "trainer_num_workers": 2,
        "inference_num_workers": 1, "inference_start_timeout_seconds": 10.0, "max_tokens": 32, "max_model_len": 128,
        "seq_len": 512, "max_concurrent_prompts_per_server": 8, "use_wandb": False,
    }  # fmt: skip
    return TelescopeConfig.model_validate({**defaults, **fields})


@asynccontextmanager
async def harness(
    ground: Ground,
    run_dir: Path,
    *,
    engine: FakeEngineSettings | None = None,
    trainer: FakeTrainer | None = None,
    **fields: Any,
) -> AsyncIterator[Harness]:
    """Starts the components and ends them after the block."""
    config = config_for(ground.tokenizer, **fields)
    settings = engine or FakeEngineSettings(mean_tokens=6, length_sigma=0.4, vocabulary=300, end_token=None)
    async with AsyncExitStack() as stack:
        fakes = [
            await stack.enter_async_context(FakeEngineServer(settings)) for _ in range(config.inference_num_workers)
        ]
        clients = [EngineClient(fake.url, fake.secret, index) for index, fake in enumerate(fakes)]
        for client in clients:
            stack.push_async_callback(client.close)
        handles = [FakeHandle(fake) for fake in fakes]
        run = await stack.enter_async_context(
            fake_run(config, run_dir, handles, clients, trainer=trainer, flush_seconds=0.2)
        )
        yield Harness(**vars(run), fakes=fakes, handles=handles)
