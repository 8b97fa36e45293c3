"""A whole run without Ray, torch or vLLM: the real loops, lanes, environment processes and HTTP client, against a fake
engine that speaks vLLM's interface and a fake trainer that counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from telescope.config import TelescopeConfig
from telescope.environments.pool import EnvironmentPool
from telescope.environments.records import RendererSpec
from telescope.errors import InfrastructureError
from telescope.inference.client import EngineClient
from telescope.inference.fake_engine import FakeEngineSettings
from telescope.inference.fake_server import FakeEngineServer
from telescope.orchestrator.draws import DrawSequence
from telescope.orchestrator.evaluation import environment_keys
from telescope.orchestrator.lanes import LanePool, make_lanes
from telescope.orchestrator.orchestrator import Orchestrator, Services
from telescope.orchestrator.servers import ServerPool
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.supervise import Supervisor
from telescope.record.recorder import Recorder
from telescope.rollout.sample import RolloutSettings
from telescope.trainer.batch import StepInput, StepResult

ENVIRONMENTS = Path(__file__).parent / "environments"


@dataclass
class FakeTrainer:
    """Keeps what it was given; `fail_at` raises in that step, `seconds` is how long a step takes."""

    seconds: float = 0.0
    fail_at: int | None = None
    steps: list[list[StepInput]] = field(default_factory=list)
    queue: asyncio.Lock = field(default_factory=asyncio.Lock)
    version: int = 0

    async def train_step(self, inputs: list[StepInput]) -> StepResult:
        async with self.queue:
            await asyncio.sleep(self.seconds)
            if self.fail_at == len(self.steps):
                raise ArithmeticError("the loss is not a number")
            self.steps.append(inputs)
            self.version += 1
        return StepResult({"grad_norm": 1.0, "learning_rate": 1e-6}, [])

    def sample_ids(self, step: int) -> list[str]:
        """Every sample that a step trained, in order of its id."""
        batches = [b for rank in self.steps[step] for m in rank.minibatches for b in m.micro_batches]
        return sorted(sample for batch in batches for sample in batch.sample_ids)

    def oldest_version(self, step: int) -> int:
        batches = [b for rank in self.steps[step] for m in rank.minibatches for b in m.micro_batches]
        return int(min(batch.version_T[batch.trained_T].min() for batch in batches if batch.trained_T.any()))


@dataclass
class FakeWeightSync:
    """Runs vLLM's update sequence on every server that is up, without a byte of weights."""

    trainer: FakeTrainer
    servers: ServerPool | None = None
    fail_at: int | None = None

    async def sync(self) -> dict[str, float]:
        assert self.servers is not None
        if self.fail_at == self.trainer.version:
            raise RuntimeError("the sync broke")
        for index in self.servers.up:
            try:
                await self._update(self.servers.clients[index])
            except InfrastructureError as error:
                self.servers.report_failure(index, error)
        return {"weight_sync/servers": float(len(self.servers.up))}

    async def sync_one(self, index: int, on_held: Any) -> None:
        assert self.servers is not None
        async with self.trainer.queue:
            if self.trainer.version:
                await self._update(self.servers.clients[index])
            on_held()

    async def _update(self, client: EngineClient) -> None:
        await client.pause()
        await client.start_update()
        await client.update_weights({})
        await client.finish_update(self.trainer.version)
        await client.resume()


class StepLog:
    """Keeps what W&B would get."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        assert step == len(self.metrics)
        self.metrics.append(metrics)


@dataclass
class FakeHandle:
    """The supervisor of a fake server: restarts it `delay` seconds after `kill`."""

    server: FakeEngineServer
    delay: float = 0.2
    restarts: int = 0
    state: str = "ready"
    last_log_lines: list[str] = field(default_factory=list)
    error: str | None = None

    async def status(self) -> FakeHandle:
        return self

    async def dump_stacks(self) -> str:
        return ""

    async def kill(self) -> None:
        """What kill -9 of the process looks like from here, and the restart that follows."""
        self.state = "restarting"
        self.server.die()
        await asyncio.sleep(self.delay)
        await self.server.start()
        self.restarts += 1
        self.state = "ready"


@dataclass
class Harness:
    """The parts of a run under test."""

    config: TelescopeConfig
    orchestrator: Orchestrator
    trainer: FakeTrainer
    weights: FakeWeightSync
    servers: ServerPool
    fakes: list[FakeEngineServer]
    handles: list[FakeHandle]
    lanes: LanePool
    status: RunStatus
    step_log: StepLog
    recorder: Recorder
    environments: EnvironmentPool

    async def run(self, timeout: float = 30) -> None:
        """Train to the end, or raise what ended it."""
        supervisor = Supervisor()
        supervisor.spawn(self.servers.watch(), "server watch")
        try:
            async with asyncio.timeout(timeout):
                await supervisor.run_until(self.orchestrator.run(supervisor))
        except TimeoutError:
            state = (self.status.parts, self.lanes.describe(), self.orchestrator.window, self.orchestrator.ledger)
            raise AssertionError(f"the run did not end within {timeout:g} s: {state}") from None


def config_for(tokenizer: Path, **fields: Any) -> TelescopeConfig:
    """A small config; `environment` are the kwargs of the parity environment."""
    kwargs = fields.pop("environment", {})
    defaults: dict[str, Any] = {
        "model": str(tokenizer),
        "environments": [{"name": "parity", "kwargs": kwargs}],
        "environments_path": [str(ENVIRONMENTS)],
        "environment_timeout_seconds": 3.0,
        "environment_workers": 1,
        "group_size": 4,
        "prompts_batch_size_for_trainer": 4,
        "number_of_steps": 5,
        "trainer_num_workers": 2,
        "inference_num_workers": 1,
        "max_tokens": 32,
        "max_model_len": 128,
        "seq_len": 512,
        "max_concurrent_prompts_per_server": 8,
        "use_wandb": False,
    }
    return TelescopeConfig.model_validate({**defaults, **fields})


@asynccontextmanager
async def harness(
    tokenizer: Path,
    run_dir: Path,
    *,
    engine: FakeEngineSettings | None = None,
    trainer: FakeTrainer | None = None,
    **fields: Any,
) -> AsyncIterator[Harness]:
    """Start the parts, hand them over, end them."""
    config = config_for(tokenizer, **fields)
    settings = engine or FakeEngineSettings(mean_tokens=6, length_sigma=0.4, vocabulary=300, end_token=None)
    async with AsyncExitStack() as stack:
        keys = environment_keys(config)
        environments = EnvironmentPool(
            keys.specs,
            renderer=RendererSpec(tokenizer_path=config.model),
            num_workers=config.environment_workers or 1,
            timeout_seconds=config.environment_timeout_seconds,
            environments_path=list(config.environments_path),
        )
        stack.push_async_callback(environments.close)
        await environments.start()
        fakes = [
            await stack.enter_async_context(FakeEngineServer(settings)) for _ in range(config.inference_num_workers)
        ]
        clients = [EngineClient(fake.url, fake.secret, index) for index, fake in enumerate(fakes)]
        for client in clients:
            stack.push_async_callback(client.close)
        trainer = trainer or FakeTrainer()
        weights = FakeWeightSync(trainer)
        status = RunStatus("test", config.number_of_steps)
        lanes = make_lanes(
            individual=config.enable_individual_sample_lanes,
            num_servers=len(fakes),
            groups_per_server=config.max_concurrent_prompts_per_server,
            group_size=config.group_size,
        )
        handles = [FakeHandle(fake) for fake in fakes]
        servers = ServerPool(handles, clients, lanes, status, start_timeout=10, bring_weights=weights.sync_one)
        weights.servers = servers
        for index in range(len(fakes)):
            servers.open(index)
        recorder = stack.enter_context(Recorder(run_dir, flush_seconds=0.2))
        step_log = StepLog()
        info = await environments.describe(keys.training[0])
        orchestrator = Orchestrator(
            config,
            Services(
                environments=environments,
                environment_keys=keys.training,
                lanes=lanes,
                engines=clients,
                trainer=trainer,
                weights=weights,
                recorder=recorder,
                step_log=step_log,
                report_engine_failure=servers.report_failure,
            ),
            DrawSequence(config.seed, [info.num_samples], [1.0], [0]),
            frozenset(),
            RolloutSettings.from_config(config),
            status,
        )
        yield Harness(
            config, orchestrator, trainer, weights, servers, fakes, handles, lanes, status, step_log, recorder, environments
        )  # fmt: skip
