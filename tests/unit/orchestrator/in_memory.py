"""A whole run in memory: the real loops over an engine, an environment and a trainer that are plain objects."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

from tests.fakes.run import VOCAB_SIZE
from tests.fakes.turns import ScriptedTurns
from tests.unit.orchestrator.fakes import StrictRecorder, workers_of
from tests.unit.rollout.fakes import generation, tick

from telescope.config import TelescopeConfig
from telescope.environments.types import Advance, EnvironmentInfo, PreparedPrompt, RewardRecord
from telescope.errors import InfrastructureError
from telescope.inference.base import GenerateRequest, Generation
from telescope.orchestrator.filters import SampleFilters
from telescope.orchestrator.orchestrator import AfterStep, Orchestrator, Services
from telescope.orchestrator.prompt_sampler import PromptSampler
from telescope.orchestrator.run_state import RunState
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.supervision import Supervisor
from telescope.rollout.sample import RolloutSettings
from telescope.trainer.batch import StepInput, StepResult


class NumberedItems(ScriptedTurns):
    """An environment whose item i is the prompt [i + 1]; the reward of an answer is whether its first token is odd.

    Every key serves the same items, so that their identities are equal whatever they are called.
    """

    is_stuck = False

    def __init__(self, num_items: int = 64) -> None:
        self.num_items = num_items
        self.prepared: list[tuple[str, int]] = []
        self.advanced: list[tuple[str, int, bool]] = []

    async def describe(self, key: str) -> EnvironmentInfo:
        return EnvironmentInfo(key, self.num_items)

    async def prepare(self, key: str, index: int) -> PreparedPrompt:
        self.prepared.append((key, index))
        await tick(1)
        return PreparedPrompt([index + 1], f"item {index}", [], f"uid {index}")

    async def advance(
        self, key: str, index: int, token_ids: list[int], stop_reason: str, *, for_eval: bool = False
    ) -> Advance:
        self.advanced.append((key, index, for_eval))
        await tick(1)
        value = float(token_ids[0] % 2)
        return Advance(True, [], "text", RewardRecord(value, {"correct": value}, {}, [], {}))


@dataclass
class CountingEngine:
    """Answers each request with tokens derived from its seed, at the trainer's version."""

    trainer: CountingTrainer
    requests: list[GenerateRequest] = field(default_factory=list)

    @property
    def loaded_version(self) -> int:
        return self.trainer.version

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        version = self.trainer.version
        await tick(2)
        assert request.seed is not None
        return generation([request.seed % 1000, 7, 7], version=version)

    async def abort(self, request_ids: list[str]) -> None:
        return


@dataclass
class FakeEngine:
    """A server of an eval, with its own weights: its client and its handle in one object.

    It answers while `gate` is set. `fails` makes it fail its requests, and `restarts` counts its processes.
    """

    loaded_version: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    fails: bool = False
    restarts: int = 0
    state: str = "ready"
    error: str | None = None
    start_seconds: float | None = None

    def __post_init__(self) -> None:
        self.gate.set()

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        version = self.loaded_version
        await tick(2)
        await self.gate.wait()
        if self.fails:
            raise InfrastructureError("connection refused")
        assert request.seed is not None
        return generation([request.seed % 1000, 7, 7], version=version)

    async def abort(self, request_ids: list[str]) -> None:
        return

    async def status(self) -> FakeEngine:
        return self

    async def dump_stacks(self) -> str:
        return ""

    async def health(self) -> bool:
        return not self.fails


@dataclass
class CountingTrainer:
    """Trains nothing and counts versions; `sync` sends them to the engine at once."""

    steps: list[list[str]] = field(default_factory=list)
    version: int = 0
    data_size: int = 1
    packs: bool = True

    async def train_step(self, inputs: list[StepInput]) -> StepResult:
        await tick(3)
        batches = [b for rank in inputs for m in rank.minibatches for b in m.micro_batches]
        self.steps.append(sorted(sample for batch in batches for sample in batch.sample_ids))
        return StepResult({"grad_norm": 1.0, "learning_rate": 1e-6}, [])

    async def sync(self) -> dict[str, float]:
        await tick(1)
        self.version += 1
        return {"weight_sync/servers": 1.0}


class InMemoryRun:
    """The wired components. `failures` are the reported engine failures."""

    def __init__(
        self,
        config: TelescopeConfig,
        *,
        held_out: frozenset[str] = frozenset(),
        first_index: int = 0,
        start: RunState | None = None,
        after_step: AfterStep | None = None,
    ) -> None:
        self.config = config
        self.environments = cast(Any, NumberedItems())
        self.trainer = CountingTrainer(version=start.step if start else 0)
        self.engine = CountingEngine(self.trainer)
        self.recorder = cast(Any, StrictRecorder())
        self.status = RunStatus("test", config.number_of_steps)
        self.failures: list[tuple[int, InfrastructureError]] = []
        self.rollouts, self.slots = workers_of(config, self.environments, [self.engine])
        self.rollouts.on_engine_failure = lambda server, error: self.failures.append((server, error))
        size = self.environments.num_items
        self.orchestrator = Orchestrator(
            config,
            Services(
                rollouts=self.rollouts,
                environment_keys=[entry.name for entry in config.environments],
                slots=self.slots,
                trainer=self.trainer,
                weights=self.trainer,
                recorder=self.recorder,
                filters=SampleFilters.from_config(config, vocab_size=VOCAB_SIZE),
                infos=[
                    EnvironmentInfo(entry.name, size, reward_min=entry.reward_min, reward_max=entry.reward_max)
                    for entry in config.environments
                ],
                after_step=after_step,
            ),
            PromptSampler(
                config.seed,
                [size] * len(config.environments),
                [entry.weight for entry in config.environments],
                [first_index] * len(config.environments),
            ),
            held_out,
            RolloutSettings.from_config(config),
            self.status,
            start,
        )

    async def run(self) -> None:
        """Train to the end within a few seconds, or raise what ended it."""
        supervisor = Supervisor()
        async with asyncio.timeout(20):
            await supervisor.run_until(self.orchestrator.run(supervisor))
