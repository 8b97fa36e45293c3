"""A whole run without Ray, torch or vLLM, for tests and benchmarks.

Real: the loops, request slots, the server pool, environment processes, the record, and the HTTP clients. Fake: the
trainer, which counts, and the weight sync, which takes every server through an update without weights. The caller
provides the servers: `tests.fakes.server` in this process or in others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tests.fakes.backend import NO_WEIGHTS

from telescope.config import TelescopeConfig
from telescope.environments.types import EnvironmentInfo, EnvironmentSpec
from telescope.errors import InfrastructureError
from telescope.evals.entries import environment_keys
from telescope.inference.base import EngineBackend
from telescope.orchestrator.evaluation import Evaluation
from telescope.orchestrator.orchestrator import Orchestrator
from telescope.orchestrator.run_components import RunComponents
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.servers import ServerPool
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.supervision import Supervisor
from telescope.orchestrator.training import make_orchestrator
from telescope.record.recorder import Recorder
from telescope.rollout.environments import LoadedEnvironments
from telescope.rollout.exchange import Orders, Report
from telescope.rollout.loaded_environment import LoadedEnvironment
from telescope.rollout.pool import Lane, RolloutPool
from telescope.rollout.rendering import Renderer, RendererSpec
from telescope.rollout.worker import RolloutWorker
from telescope.trainer.batch import StepInput, StepResult

VOCAB_SIZE = 1000
"""Vocabulary size for `filter_gibberish`."""


@dataclass
class FakeTrainer:
    """Counts steps. `fail_at` raises in that step, `seconds` is the duration of one, `keep` stores its inputs."""

    data_size: int = 1
    packs: bool = True
    seconds: float = 0.0
    fail_at: int | None = None
    keep: bool = True
    steps: list[list[StepInput]] = field(default_factory=list)
    queue: asyncio.Lock = field(default_factory=asyncio.Lock)
    version: int = 0

    async def train_step(self, inputs: list[StepInput]) -> StepResult:
        async with self.queue:
            await asyncio.sleep(self.seconds)
            if self.fail_at == self.version:
                raise ArithmeticError("the loss is not a number")
            if self.keep:
                self.steps.append(inputs)
            self.version += 1
        return StepResult({"grad_norm": 1.0, "learning_rate": 1e-6}, [])

    def sample_ids(self, step: int) -> list[str]:
        """Returns the sample ids that a step trained, sorted."""
        batches = [b for rank in self.steps[step] for m in rank.minibatches for b in m.micro_batches]
        return sorted(sample for batch in batches for sample in batch.sample_ids)

    def oldest_version(self, step: int) -> int:
        """Returns the oldest policy version among the tokens that a step trained."""
        batches = [b for rank in self.steps[step] for m in rank.minibatches for b in m.micro_batches]
        return int(min(batch.version_T[batch.trained_T].min() for batch in batches if batch.trained_T.any()))


@dataclass
class FakeWeightSync:
    """Runs vLLM's update sequence on every server that is up, without weights."""

    trainer: FakeTrainer
    servers: ServerPool | None = None
    fail_at: int | None = None

    async def sync(self) -> dict[str, float]:
        assert self.servers is not None
        if self.fail_at == self.trainer.version:
            raise RuntimeError("the sync broke")
        for index in self.servers.synced:
            try:
                await self._update(self.servers.clients[index])
            except InfrastructureError as error:
                self.servers.close(index, error)
        return {"weight_sync/servers": float(len(self.servers.synced))}

    async def sync_one(self, server: int, on_loaded: Callable[[], None], *, fresh: bool) -> None:
        assert self.servers is not None
        async with self.trainer.queue:
            if self.servers.clients[server].loaded_version != self.trainer.version or (fresh and self.trainer.version):
                await self._update(self.servers.clients[server])
            on_loaded()

    async def _update(self, client: EngineBackend) -> None:
        await client.pause()
        await client.start_update()
        await client.update_weights(NO_WEIGHTS)
        await client.finish_update(self.trainer.version)
        await client.resume()


@dataclass
class FakeRun:
    """The wired components of a run."""

    config: TelescopeConfig
    orchestrator: Orchestrator
    trainer: FakeTrainer
    weights: FakeWeightSync
    servers: ServerPool
    slots: Lane
    status: RunStatus
    recorder: Recorder
    environments: LoadedEnvironments
    worker: LocalWorker
    evaluation: Evaluation

    async def run(self, timeout: float = 300.0) -> None:
        """Trains to the end, or raises the run's error. AssertionError with the run's state after `timeout` seconds."""
        supervisor = Supervisor()
        self.evaluation.spawn = supervisor.spawn
        supervisor.spawn(self.servers.watch(), "server watch")
        try:
            async with asyncio.timeout(timeout):
                await supervisor.run_until(self.orchestrator.run(supervisor))
        except TimeoutError:
            state = (self.status.components, self.slots.used, self.orchestrator.version, self.orchestrator.ledger)
            raise AssertionError(f"the run did not end within {timeout:g} s: {state}") from None


def load_environments(
    config: TelescopeConfig, specs: Sequence[EnvironmentSpec]
) -> tuple[LoadedEnvironments, list[EnvironmentInfo]]:
    """Loads environments in this process."""
    renderer = Renderer(RendererSpec(tokenizer_path=config.model))
    loaded = [LoadedEnvironment(spec, renderer, list(config.environments_path)) for spec in specs]
    infos = [each.describe() for each in loaded]
    return LoadedEnvironments(loaded, timeout_seconds=config.environment_timeout_seconds), infos


class LocalWorker:
    """A rollout worker in this process. A restart abandons threads that are stuck in user code."""

    def __init__(self, config: TelescopeConfig, environments: LoadedEnvironments, engines: list[EngineBackend]) -> None:
        self.config, self.environments, self.engines = config, environments, engines
        self.num_restarts = 0
        self._worker = self._start()

    def _start(self) -> RolloutWorker:
        return RolloutWorker(self.environments, self.engines, grouped=not self.config.enable_individual_sample_lanes)

    async def exchange(self, orders: Orders, *, seconds: float | None = None, interval: float = 0.0) -> Report:
        return await self._worker.exchange(orders, seconds=seconds, interval=interval)

    async def restart(self) -> None:
        self.num_restarts += 1
        await self.close()
        self.environments._thread.is_stuck = False
        self._worker = self._start()

    async def close(self) -> None:
        await self._worker.close()


@asynccontextmanager
async def fake_run(
    config: TelescopeConfig,
    run_dir: Path,
    handles: Sequence[Any],
    clients: list[EngineBackend],
    *,
    trainer: FakeTrainer | None = None,
    flush_seconds: float = 2.0,
) -> AsyncIterator[FakeRun]:
    """Wires a run over running servers, yields it, and closes its components.

    The clients remain the caller's.
    """
    trainer = trainer or FakeTrainer()
    async with AsyncExitStack() as stack:
        keys = environment_keys(config)
        environments, infos = load_environments(config, keys.specs)
        stack.push_async_callback(environments.close)
        worker = LocalWorker(config, environments, clients)
        stack.push_async_callback(worker.close)
        rollouts = RolloutPool([worker], infos=dict(zip([spec.identity for spec in keys.specs], infos, strict=True)))
        stack.push_async_callback(rollouts.close)
        weights = FakeWeightSync(trainer)
        status = RunStatus("fake", config.number_of_steps)
        parts = await RunComponents.plan(config, keys, rollouts)
        parts.open_servers(handles, clients, status)
        parts.trainer, parts.weights = cast(Any, trainer), cast(Any, weights)
        weights.servers, parts.servers.bring_weights = parts.servers, weights.sync_one
        directory = RunDirectory(run_dir, config, [])
        directory.recorder = stack.enter_context(Recorder(run_dir, flush_seconds=flush_seconds))
        evaluation = Evaluation(
            parts.evals, config, rollouts, parts.servers, parts.settings, directory.recorder,
            status, lambda coroutine, name: asyncio.create_task(coroutine, name=name),
        )  # fmt: skip
        orchestrator = await make_orchestrator(
            parts, evaluation, directory, status, after_step=lambda step, state: evaluation.start_due(step)
        )
        yield FakeRun(
            config, orchestrator, trainer, weights, parts.servers, parts.servers.slots, status, directory.recorder,
            environments, worker, evaluation,
        )  # fmt: skip
