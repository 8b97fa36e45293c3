"""A run on a simulated clock: the real loops and slots over engines, environment and trainer that take time and fail.

Real here: orchestrator, rollouts, slots, the fake engine's model of running, pausing, aborting and updating. Made up:
how long each thing takes, and when servers exit. `Simulation.check` compares a run with its ledger.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from tests.fakes.backend import FakeBackend
from tests.fakes.engine import AnswerFunction, FakeEngineSettings, FakeRequest
from tests.fakes.run import VOCAB_SIZE
from tests.fakes.turns import ScriptedTurns
from tests.unit.orchestrator.fakes import StrictRecorder, pool_of
from tests.unit.rollout.fakes import generation, tick

from telescope.config import TelescopeConfig
from telescope.environments.types import Advance, EnvironmentInfo, PreparedPrompt, RewardRecord
from telescope.errors import EnvironmentFailure, InfrastructureError
from telescope.inference.base import GenerateRequest, Generation
from telescope.orchestrator.async_window import MAX_REQUEUES
from telescope.orchestrator.filters import SampleFilters
from telescope.orchestrator.groups import Group
from telescope.orchestrator.orchestrator import AfterStep, Orchestrator
from telescope.orchestrator.prompt_sampler import PromptSampler
from telescope.orchestrator.run_state import RunState
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.supervision import Supervisor
from telescope.rollout.exchange import Orders, Report, WorkerLost
from telescope.rollout.sample import Rollout, RolloutSettings
from telescope.rollout.trajectory import Trajectory, Turn
from telescope.rollout.worker import RolloutWorker
from telescope.trainer.batch import StepInput, StepResult

FATES = {
    *("kept", "discarded/max_async", "discarded/zero_advantage", "discarded/too_slow", "discarded/all_masked"),
    *("masked/environment", "masked/infrastructure", "cancelled", "retried", "lost"),
}
"""Possible outcomes of a sampled token, by metric name."""
OVERLAPPING_FATES = ("discarded/all/", "discarded/zero_advantage_", "returned/")
"""Beginnings of metrics that count tokens of other fates again."""


@dataclass(frozen=True)
class Pace:
    """How long things take, in seconds, and how often they fail (a share)."""

    train: tuple[float, float] = (1.0, 1.0)
    sync: float = 0.1
    score: tuple[float, float] = (0.0, 0.5)
    tokens: tuple[int, int] = (1, 20)
    tokens_per_second: float = 10.0
    turns: tuple[int, int] = (1, 1)
    environment_failures: float = 0.0
    engine_failures: float = 0.0
    own_aborts: float = 0.0
    """Share of requests that a server aborts, with their tokens so far."""
    lost_conversations: float = 0.0
    deaths: tuple[tuple[float, int, float], ...] = ()
    """(time, server, seconds of downtime)."""
    lost_workers: tuple[tuple[float, int], ...] = ()
    """(time, worker)."""
    delay: float = 0.01
    """Duration of a request that takes no time otherwise."""


INSTANT = Pace(train=(0.0, 0.0), sync=0.0, score=(0.0, 0.0), tokens_per_second=0.0, delay=0.0)


class SimulatedServer(FakeBackend):
    """One server: a fake engine with exits and restarts. `answer` is its answer; None samples it from the pace."""

    def __init__(self, index: int, pace: Pace, rng: random.Random, answer: AnswerFunction | None = None) -> None:
        super().__init__(index, FakeEngineSettings(tokens_per_second=pace.tokens_per_second), answer or self._drawn)
        self.alive = True
        self.requests: list[GenerateRequest] = []
        self.aborted: set[str] = set()
        self.num_tokens_answered = 0
        """Tokens in all answers that reached the driver."""
        self._pace = pace
        self._rng = rng

    def _drawn(self, request: FakeRequest) -> list[int]:
        return [self._rng.randrange(2, 100) for _ in range(self._rng.randint(*self._pace.tokens))]

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        if not self.alive or self._rng.random() < self._pace.engine_failures:
            await asyncio.sleep(self._pace.delay)
            raise InfrastructureError(f"server {self.server_index} is gone")
        if self._pace.own_aborts and self._rng.random() < self._pace.own_aborts:
            when = self._rng.uniform(0.0, 2.0)
            asyncio.get_running_loop().call_later(when, self.engine.abort, [request.request_id])
        generation = await super().generate(request)
        self.num_tokens_answered += len(generation.token_ids_N)
        return generation

    async def abort(self, request_ids: list[str]) -> None:
        await asyncio.sleep(self._pace.delay)
        self.aborted.update(request_ids)
        await super().abort(request_ids)

    def die(self) -> None:
        self.alive = False
        self.restart()


class SimulatedEnvironment(ScriptedTurns):
    """Item i is the prompt [i + 1] under every key; an answer is correct if its first token is odd.

    Takes simulated time, and fails as its pace says.
    """

    is_stuck = False

    def __init__(self, pace: Pace = INSTANT, rng: random.Random | None = None, num_items: int = 64) -> None:
        self.pace, self.rng, self.num_items = pace, rng or random.Random(0), num_items
        self.turns = pace.turns[1] > 1
        self.items: dict[str, int] = {}
        """Items of the open conversations."""
        self.prepared: list[tuple[str, int]] = []
        self.advanced: list[tuple[str, int, bool]] = []

    async def describe(self, key: str) -> EnvironmentInfo:
        return EnvironmentInfo(key, self.num_items)

    async def prepare(self, key: str, index: int) -> PreparedPrompt:
        self.prepared.append((key, index))
        await asyncio.sleep(self.pace.delay)
        return PreparedPrompt([index + 1], f"item {index}", [], f"uid {index}")

    async def advance(self, key: str, index: int, turn: Turn, *, for_eval: bool = False) -> Advance:
        turn.text = "text"
        self.advanced.append((key, index, for_eval))
        await asyncio.sleep(self.rng.uniform(*self.pace.score))
        if self.rng.random() < self.pace.environment_failures:
            raise EnvironmentFailure("the environment failed")
        correct = self.correct(index, turn.generation.token_ids_N)
        return Advance([], RewardRecord(correct, {"correct": correct}, {}, [], {}))

    def correct(self, index: int, token_ids: np.ndarray) -> float:
        return float(token_ids[0] % 2)

    async def begin(self, rollout: str, key: str, index: int) -> list[int]:
        assert rollout not in self.items, "a conversation is begun once"
        await asyncio.sleep(self.pace.delay)
        self.items[rollout] = index
        return [index + 1]

    async def respond(self, rollout: str, turn: Turn, **options: bool) -> Advance:
        if self.rng.random() < self.pace.lost_conversations:
            raise InfrastructureError("the process of the rollout ended")
        advanced = await self.advance("", self.items[rollout], turn, **options)
        if self.rng.randint(*self.pace.turns) > 1:
            return Advance([1], restarts=self.rng.random() < 0.2)
        return advanced

    def end(self, rollout: str) -> None:
        self.items.pop(rollout, None)


@dataclass
class SimulatedTrainer:
    """Takes simulated time and trains nothing; a sync updates every server that is up.

    `on_step` receives the batch of each step when the step begins.
    """

    pace: Pace
    rng: random.Random
    servers: list[SimulatedServer]
    data_size: int = 1
    packs: bool = True
    on_step: Callable[[list[StepInput]], None] = lambda inputs: None
    version: int = 0
    ages: list[list[int]] = field(default_factory=list)
    """For each step, the age of each token that was trained."""
    steps: list[list[str]] = field(default_factory=list)
    """For each step, the ids of its samples, sorted."""

    async def train_step(self, inputs: list[StepInput]) -> StepResult:
        self.on_step(inputs)
        batches = [b for rank in inputs for m in rank.minibatches for b in m.micro_batches]
        self.steps.append(sorted(sample for batch in batches for sample in batch.sample_ids))
        versions = np.concatenate([batch.version_T[batch.trained_T] for batch in batches])
        self.ages.append((self.version - versions).tolist())
        await asyncio.sleep(self.rng.uniform(*self.pace.train))
        return StepResult({"grad_norm": 1.0, "learning_rate": 1e-6}, [])

    async def sync(self) -> dict[str, float]:
        for server in self.servers:
            await server.pause()
        await asyncio.sleep(self.pace.sync)
        self.version += 1
        for server in self.servers:
            await server.finish_update(self.version)
            await server.resume()
        return {"weight_sync/servers": float(len(self.servers))}


class SimulatedWorker:
    """A rollout worker that may exit and comes back, as its actor does."""

    def __init__(self, simulation: Simulation, config: TelescopeConfig) -> None:
        self._simulation, self._config = simulation, config
        self._lost = asyncio.Event()
        self._start()

    def _start(self) -> None:
        grouped = not self._config.enable_individual_sample_lanes
        self.worker = RolloutWorker(self._simulation.environment, self._simulation.servers, grouped=grouped)
        self._begun: list[Rollout] = []
        _remember(self.worker, "_rollout", self._begun)
        _remember(self.worker, "_rollout", self._simulation.begun)

    async def exchange(self, orders: Orders, **options: Any) -> Report:
        call = asyncio.ensure_future(self.worker.exchange(orders, **options))
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait({call, lost}, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.is_set():
                raise WorkerLost("the rollout worker was killed")
            return call.result()
        finally:
            call.cancel()
            lost.cancel()

    async def restart(self) -> None:
        await self.worker.close()  # its connections end, so that its requests are aborted
        self._simulation.lost += self._begun
        await asyncio.sleep(0.5)
        self._lost.clear()
        self._start()

    def die(self) -> None:
        self._lost.set()


class Simulation:
    """One wired run. `run` checks the counts at its end.

    `answer` is every server's response to a request, `recorder` stores the rows, `max_requeues` limits how often a
    prompt whose group became too old is requeued. Items before `first_index` and those `held_out` are not trained.
    """

    def __init__(
        self,
        config: TelescopeConfig,
        pace: Pace,
        *,
        seed: int = 0,
        num_servers: int = 1,
        num_workers: int = 1,
        answer: AnswerFunction | None = None,
        recorder: StrictRecorder | None = None,
        max_requeues: int = MAX_REQUEUES,
        held_out: frozenset[str] = frozenset(),
        first_index: int = 0,
        start: RunState | None = None,
        after_step: AfterStep | None = None,
    ) -> None:
        rng = random.Random(seed)
        self.config, self.pace = config, pace
        self.servers = [SimulatedServer(index, pace, rng, answer) for index in range(num_servers)]
        self.environment: Any = SimulatedEnvironment(pace, rng)
        self.trainer = SimulatedTrainer(pace, rng, self.servers, version=start.step if start else 0)
        self.recorder: Any = recorder or StrictRecorder()
        self.status = RunStatus("simulation", config.number_of_steps)
        self.groups: list[Group] = []
        """All groups that were opened."""
        self.begun: list[Rollout] = []
        """All samples that began, lost ones included."""
        self.lost: list[Rollout] = []
        """Samples of lost workers, ended ones included."""
        self.workers = [SimulatedWorker(self, config) for _ in range(num_workers)]
        self.rollouts, self.slots = pool_of(config, self.workers, num_servers)
        self.rollouts.on_engine_failure = self._report
        size = self.environment.num_items
        self.orchestrator = Orchestrator(
            config=config,
            rollouts=self.rollouts,
            environment_keys=[entry.name for entry in config.environments],
            infos=[
                EnvironmentInfo(
                    entry.name, size, reward_min=entry.reward_min, reward_max=entry.reward_max,
                    is_multi_turn=pace.turns[1] > 1,
                )
                for entry in config.environments
            ],
            slots=self.slots,
            trainer=cast(Any, self.trainer),
            weights=cast(Any, self.trainer),
            recorder=cast(Any, self.recorder),
            status=self.status,
            filters=SampleFilters(config, vocab_size=VOCAB_SIZE),
            settings=RolloutSettings.from_config(config),
            sampler=PromptSampler(
                config.seed,
                [size] * len(config.environments),
                [entry.weight for entry in config.environments],
                [first_index] * len(config.environments),
            ),
            held_out_uids=held_out,
            start=start,
            after_step=after_step,
            max_requeues=max_requeues,
        )  # fmt: skip
        _remember(self.orchestrator, "_open_group", self.groups)

    def _report(self, server: int, error: InfrastructureError) -> None:
        if not self.servers[server].alive:
            self.slots.set_up(server, False)

    async def _kill_and_revive(self, when: float, index: int, away: float) -> None:
        await asyncio.sleep(when)
        server = self.servers[index]
        if not server.alive:
            return
        server.die()
        await asyncio.sleep(away)
        server.alive = True
        await server.finish_update(self.trainer.version)
        self.slots.set_up(index, True)

    async def run(self) -> None:
        supervisor = Supervisor()
        for death in self.pace.deaths:
            supervisor.spawn(self._kill_and_revive(*death), "death")
        for when, index in self.pace.lost_workers:
            asyncio.get_running_loop().call_later(when, self.workers[index % len(self.workers)].die)
        await supervisor.run_until(self.orchestrator.run(supervisor))
        self.check()

    def open_samples(self) -> list[Trajectory]:
        orchestrator = self.orchestrator
        ready = orchestrator._batch.groups if orchestrator._batch is not None else []
        groups = (*orchestrator._open.values(), *orchestrator._finished, *ready)
        return [sample for group in groups for sample in group.samples if sample.is_usable]

    def counted_tokens(self) -> dict[str, float]:
        """Tokens by outcome, over all steps and since the last one."""
        last = self.orchestrator._step_recorder._discards.take(0)
        counted: dict[str, float] = defaultdict(float)
        for name, value in (item for metrics in (*self.recorder.step_metrics, last) for item in metrics.items()):
            fate, _, quantity = name.rpartition("/")
            if quantity == "tokens" and not name.startswith(OVERLAPPING_FATES):
                counted[fate] += value
        return counted

    def check(self) -> None:
        ledger, config = self.orchestrator.ledger, self.config
        assert len(self.trainer.ages) == config.number_of_steps
        assert ledger.is_balanced()
        assert ledger.num_trained == config.number_of_steps * config.prompts_batch_size_for_trainer
        trained = [sample_id for step in self.trainer.steps for sample_id in step]
        assert len(set(trained)) == len(trained), "a sample was trained twice"
        trained_groups = Counter(row["group_id"] for row in self.recorder.of("groups"))
        assert set(trained_groups.values()) <= {1}, "the outcome of a group is written once"
        assert len(trained_groups) == ledger.num_opened - len(ledger.open)
        if config.max_off_policy_steps >= 0:
            assert max(age for step in self.trainer.ages for age in step) <= config.max_off_policy_steps
        assert self.slots.num_used == 0, self.slots.used
        lanes = [lane for worker in self.workers for lane in worker.worker.lanes.values()]
        assert not any(lane.num_waiting for lane in lanes)
        for server in self.servers:
            assert not server.engine.requests, "the engine has no requests left"
        assert not self.environment.items, "the environment keeps no state"
        self.check_tokens()
        ids = [row["sample_id"] for row in self.recorder.of("samples")]
        assert len(set(ids)) == len(ids), "a sample is written once"

    def check_tokens(self) -> None:
        """Checks that every received token has one outcome, or none yet.

        Tokens of a server that exited never reached the driver, which can only count those requests. Of those of a lost
        worker it counts what the last report had.
        """
        counted = self.counted_tokens()
        assert set(counted) <= FATES, "no other outcome has tokens"
        still_open = sum(sample.totals.num_completion_tokens for sample in self.open_samples())
        assert sum(counted.values()) + still_open == self.status.num_tokens_generated
        ended = {id(sample) for group in self.groups for sample in group.samples}
        lost = {id(rollout) for rollout in self.lost}
        received = self.status.num_tokens_generated
        unreported = 0
        for rollout in self.begun:
            if id(rollout.trajectory) in ended:
                continue
            if id(rollout) in lost:
                unreported += rollout.trajectory.num_sampled_tokens
            else:
                received += rollout.trajectory.num_sampled_tokens
        answered = sum(server.num_tokens_answered for server in self.servers)
        assert received <= answered <= received + unreported
        written = self.recorder.of("samples")
        known = sum((row.get("completion_tokens") or 0) + (row.get("wasted_tokens") or 0) for row in written)
        assert known <= answered, "no token is recorded twice"


class InMemoryRun(Simulation):
    """A run in no time at all, whose answers are three tokens. `run` checks nothing by itself."""

    def __init__(self, config: TelescopeConfig, **options: Any) -> None:
        super().__init__(config, INSTANT, answer=lambda request: [request.seed % 1000, 7, 7], **options)
        (self.engine,) = self.servers
        self.engine.loaded_version = self.trainer.version
        self.engine.restart()

    async def run(self) -> None:
        supervisor = Supervisor()
        async with asyncio.timeout(20):
            await supervisor.run_until(self.orchestrator.run(supervisor))


@dataclass
class FakeServer:
    """A server with its own weights: its client and its handle in one object, whose fields are the answers.

    It answers while `gate` is set. `fails` makes it fail its requests, `restarts` counts its processes, and `gone`
    makes its actor fail.
    """

    loaded_version: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    fails: bool = False
    gone: bool = False
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

    async def status(self) -> FakeServer:
        if self.gone:
            raise InfrastructureError("the actor's process is gone")
        return self

    async def dump_stacks(self) -> str:
        return ""

    async def health(self) -> bool:
        return not self.fails


def _remember(owner: Any, method: str, made: list[Any]) -> None:
    make = getattr(owner, method)

    def remembered(*arguments: Any) -> Any:
        made.append(make(*arguments))
        return made[-1]

    setattr(owner, method, remembered)
