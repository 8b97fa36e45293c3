"""Runs of a driver over real rollout workers (Ray actors), whose engines are scripted: parts of `rollout_workers.py`.

Real: Ray, the workers with a tokenizer of 150,000 tokens and their environments, the pool, the loops, packing and the
recorder. The engines answer in the workers' own processes, without HTTP. The trainer counts.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
import ray
from fake_servers import VOCABULARY, save_tokenizer
from measure import (
    LagMeter,
    TimedSelector,
    cpu_seconds,
    cpu_seconds_of,
    lag_numbers,
    lag_of_turns,
    own_process,
    sleep_beside,
)  # fmt: skip
from scripted_actor import ScriptedActor

from telescope.cluster import rollout_group
from telescope.cluster.ray_cluster import Cluster, connect, disconnect
from telescope.cluster.reaper import Reaper
from telescope.cluster.rollout_group import NEWS_SECONDS, RolloutGroup
from telescope.config import TelescopeConfig
from telescope.environments.types import EnvironmentInfo, EnvironmentSpec
from telescope.orchestrator.filters import SampleFilters
from telescope.orchestrator.orchestrator import Orchestrator
from telescope.orchestrator.prompt_sampler import PromptSampler
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.supervision import Supervisor
from telescope.record.recorder import Recorder
from telescope.rollout.exchange import TRAINING
from telescope.rollout.pool import Lane, RolloutPool
from telescope.rollout.sample import RolloutSettings
from telescope.tiny_model.build import build_tokenizer
from telescope.trainer.batch import StepInput, StepResult

GROUP_SIZE = 8
NUM_SERVERS = 2
OPEN_GROUPS_PER_SLOT = 4
"""Window in groups per group's worth of request slots: wide enough that the slots limit what is in flight."""
FILL_SECONDS = 180.0
SERIES = EnvironmentSpec("puzzle_series", {"num_puzzles": 4})
DEMO = EnvironmentSpec(
    "countdown",
    {
        "prompt_style": "short", "format_reward": 0.0, "dataset": "generated", "operations": "+-",
        "min_numbers": 3, "max_numbers": 3, "max_number": 10,
    },
)  # fmt: skip


class CountingTrainer:
    """Trains and sends nothing."""

    data_size, packs = 1, True

    async def train_step(self, inputs: list[StepInput]) -> StepResult:
        return StepResult({"grad_norm": 1.0, "learning_rate": 1e-6}, [])

    async def sync(self) -> dict[str, float]:
        return {}


def orchestrator_of(
    config: TelescopeConfig, pool: RolloutPool, slots: Lane, info: EnvironmentInfo, key: str, recorder: Recorder
) -> Orchestrator:
    """Returns the loops of a run of one environment."""
    trainer: Any = CountingTrainer()
    sampler = PromptSampler(0, [info.num_samples], [1.0], [0])
    status = RunStatus("benchmark", config.number_of_steps)
    return Orchestrator(
        config, pool, [key], [info], slots, trainer, trainer, recorder, status, SampleFilters(config),
        RolloutSettings.from_config(config), sampler,
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run: its workers, samples in flight, tokens of an answer and the mean time that one takes."""

    workers: int
    in_flight: int
    spec: EnvironmentSpec = SERIES
    num_turns: int = 4
    num_tokens: int = 250
    seconds: float = 0.0
    steps: int = 1_000_000

    def config(self, model: Path) -> TelescopeConfig:
        groups = self.in_flight // GROUP_SIZE
        batch = max(16, groups // 8)
        return TelescopeConfig.model_validate(
            {
                "model": str(model), "environments": [{"name": self.spec.name, "kwargs": self.spec.kwargs}],
                "environments_path": [str(Path(__file__).parent / "environments")],
                "rollout_num_workers": self.workers, "rollout_cpus_per_worker": 0.01, "rollout_max_restarts": 1000,
                "group_size": GROUP_SIZE, "prompts_batch_size_for_trainer": batch, "number_of_steps": self.steps,
                "max_async_rollout": OPEN_GROUPS_PER_SLOT * groups // batch, "max_off_policy_steps": -1,
                "max_concurrent_prompts_per_server": groups // NUM_SERVERS, "inference_num_workers": NUM_SERVERS,
                "enable_individual_sample_lanes": True, "discard_group_zero_advantage": False, "max_tokens": 1000,
                "max_model_len": 4096, "seq_len": 8192, "use_wandb": False,
            }
        )  # fmt: skip


@dataclass
class Run:
    """A started run over real workers."""

    group: RolloutGroup
    slots: Lane
    orchestrator: Orchestrator
    recorder: Recorder
    folder: Path

    async def workers(self) -> list[dict[str, Any]]:
        return [dict(await handle.actor.process.remote()) for handle in self.group.handles]


@contextmanager
def ray_cluster(folder: Path) -> Iterator[Cluster]:
    """Starts Ray on this machine."""
    with Reaper() as reaper:
        config = Case(1, 64).config(folder)
        cluster = connect(config, folder, reaper.directory, local_cpus=2, local_gpus=0)
        try:
            yield cluster
        finally:
            disconnect(cluster, config)


@asynccontextmanager
async def started(case: Case, cluster: Cluster, model: Path) -> AsyncIterator[Run]:
    """Yields a run whose workers are connected."""
    config = case.config(model)
    with tempfile.TemporaryDirectory(prefix="telescope-workers-") as path, Recorder(path) as recorder:
        with patch.object(rollout_group, "RolloutActor", ScriptedActor):
            group = RolloutGroup(config, [case.spec], Path(path), cluster)
        try:
            await group.start()
            url = f"scripted:{case.num_tokens}:{VOCABULARY}:{case.seconds}"
            await group.connect([(url, "")] * NUM_SERVERS, lambda: [0] * NUM_SERVERS)
            pool = RolloutPool(
                group.handles,
                infos={case.spec.identity: group.infos[0]},
                seconds=NEWS_SECONDS,
                interval=group.report_interval,
            )
            slots = pool.open_lane(TRAINING, [case.in_flight // NUM_SERVERS] * NUM_SERVERS, GROUP_SIZE)
            for server in range(NUM_SERVERS):
                slots.set_up(server, True)
            loops = orchestrator_of(config, pool, slots, group.infos[0], case.spec.identity, recorder)
            yield Run(group, slots, loops, recorder, Path(path))
            await pool.close()
        finally:
            await group.stop()


async def under_load(
    case: Case, cluster: Cluster, model: Path, warm_up: float, seconds: float, selector: TimedSelector
) -> dict[str, Any]:
    """Runs a case as fast as it goes, and measures CPU of driver and workers, and lag of the driver's event loop."""
    async with started(case, cluster, model) as run:
        supervisor, lag = Supervisor(), LagMeter()
        training = asyncio.create_task(supervisor.run_until(run.orchestrator.run(supervisor)))
        try:
            deadline = time.monotonic() + FILL_SECONDS
            while case.seconds and run.slots.num_used < 0.95 * case.in_flight:
                await sleep_beside(training, 0.25)
                assert time.monotonic() < deadline, f"only {run.slots.num_used} samples in flight"
            await sleep_beside(training, warm_up)
            filling = lag.take()
            selector.take()
            pids, status = [worker["pid"] for worker in await run.workers()], run.orchestrator.status
            before, of_workers = cpu_seconds(), cpu_seconds_of(pids)
            samples, started_at, in_flight = status.num_samples_finished, time.monotonic(), []
            while (passed := time.monotonic() - started_at) < seconds:
                await sleep_beside(training, 0.25)
                in_flight.append(run.slots.num_used)
            used, of_workers = Counter(cpu_seconds()), cpu_seconds_of(pids) - of_workers
            used.subtract(before)
            samples, lags, (turns, turned) = status.num_samples_finished - samples, lag.take(), selector.take()
            lag.stop()
            memory = await run.workers()
        finally:
            training.cancel()
            await asyncio.wait([training])
    per_sample = {name: 1000 * value / samples for name, value in used.items()}
    return {
        "workers": case.workers,
        "in_flight": statistics.mean(in_flight),
        "turns_per_sample": case.num_turns,
        "samples_per_second": samples / passed,
        "turns_per_second": samples * case.num_turns / passed,
        "driver_ms": per_sample["driver"],
        "loop_ms": per_sample["thread:loop"],
        "worker_ms_per_turn": 1000 * of_workers / samples / case.num_turns,
        "driver_ms_per_turn": per_sample["driver"] / case.num_turns,
        **lag_numbers(lags, filling),
        "turns_p99_ms": 1000 * lag_of_turns(turns, turned, 0.99),
        "masked": status.num_masked_samples,
        "rss_mib": [round(worker["rss_mib"]) for worker in memory],
    }


async def kills(case: Case, cluster: Cluster, model: Path, interval: float) -> dict[str, Any]:
    """Kills a worker every `interval` seconds until a run of `case.steps` ends. Counts what that cost."""
    async with started(case, cluster, model) as run:
        supervisor, lost = Supervisor(), list[int]()

        async def kill() -> None:
            numbers = random.Random(0)
            while True:
                await asyncio.sleep(interval)
                handle = numbers.choice(run.group.handles)
                worker = run.orchestrator.rollouts.workers[handle.index]
                if worker.is_open and worker.lanes:
                    pid = (await handle.actor.process.remote())["pid"]
                    lost.append(sum(worker.lanes[TRAINING].used))
                    os.kill(pid, signal.SIGKILL)

        killing = asyncio.create_task(kill())
        started_at = time.monotonic()
        await supervisor.run_until(run.orchestrator.run(supervisor))
        passed = time.monotonic() - started_at
        killing.cancel()
        with suppress(asyncio.CancelledError):
            await killing
        run.recorder.close()
        groups, samples = (rows_of(run.folder / "tables" / name) for name in ("groups", "samples"))
        ledger, config = run.orchestrator.ledger, run.orchestrator.config
        trained = {row["group_id"] for row in groups if row["status"] == "kept"}
        of_trained = Counter(row["group_id"] for row in samples if row["group_id"] in trained)
        return {
            "workers": case.workers,
            "interval": interval,
            "seconds": passed,
            "kills": len(lost),
            "restarts": sum(handle.num_starts - 1 for handle in run.group.handles),
            "running_when_killed": sum(lost),
            "prompts_opened": ledger.num_opened,
            "prompts_trained": ledger.num_trained,
            "prompts_dropped": dict(ledger.dropped),
            "prompts_unfinished": len(ledger.open),
            "samples_of_trained": sum(of_trained.values()),
            "samples_run_again": sum(row["num_retries"] or 0 for row in samples),
            "masked": sum(row["status"] == "masked" for row in samples),
            "tokens_recorded": sum(row["completion_tokens"] or 0 for row in samples),
            "exact": ledger.is_balanced()
            and len(groups) == ledger.num_opened == len({row["group_id"] for row in groups})
            and len(trained) == ledger.num_trained == case.steps * config.prompts_batch_size_for_trainer
            and set(of_trained.values()) == {GROUP_SIZE}
            and len({row["sample_id"] for row in samples}) == len(samples),
        }


def rows_of(table: Path) -> list[dict[str, Any]]:
    """Returns all rows of a table."""
    return [row for file in sorted(table.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


async def starts(cluster: Cluster, model: Path, count: int) -> dict[str, Any]:
    """Starts a worker of the demo's environment `count` times. Returns times beyond a bare actor's, and memory."""

    @ray.remote(num_cpus=0.01)
    class Bare:
        def process(self) -> dict[str, float]:
            return own_process()

    bare, whole, memories = [], [], []
    config = Case(1, 64, DEMO).config(model)
    for _ in range(count):
        started_at = time.monotonic()
        actor = Bare.remote()  # type: ignore[attr-defined]
        of_ray = await actor.process.remote()
        bare.append((time.monotonic() - started_at, of_ray["cpu_seconds"]))
        ray.kill(actor)
        with tempfile.TemporaryDirectory(prefix="telescope-workers-") as folder:
            with patch.object(rollout_group, "RolloutActor", ScriptedActor):
                group = RolloutGroup(config, [DEMO], Path(folder), cluster)
            started_at = time.monotonic()
            await group.start()
            seconds = time.monotonic() - started_at
            actor = group.handles[0].actor
            whole.append((seconds, (await actor.process.remote())["cpu_seconds"]))
            await group.connect([("http://127.0.0.1:1", "secret")], lambda: [0])
            memories.append((of_ray, await actor.process.remote()))
            await group.stop()
    (ray_seconds, ray_cpu), (seconds, cpu) = (map(statistics.median, zip(*runs, strict=True)) for runs in (bare, whole))
    of_ray, memory = memories[-1]
    return {
        "seconds": seconds - ray_seconds,
        "cpu_seconds": cpu - ray_cpu,
        "ray_seconds": ray_seconds,
        "ray_cpu_seconds": ray_cpu,
        **{f"ray_{name}": of_ray[name] for name in ("rss_mib", "private_mib")},
        **{name: memory[name] for name in ("rss_mib", "private_mib", "heavy")},
    }


def measure(parts: list[str], quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Runs the parts over one Ray cluster. Returns their results."""
    found: dict[str, list[dict[str, Any]]] = {}
    if not parts:
        return found
    with tempfile.TemporaryDirectory(prefix="telescope-workers-") as path:
        model, demo = Path(path) / "model", Path(path) / "demo"
        save_tokenizer(model)
        build_tokenizer(["1 2 3 -> 4", "<answer>1+2-3</answer>"], 300).save_pretrained(demo)
        load: Any = functools.partial(under_load, warm_up=2.0 if quick else 10.0, seconds=5.0 if quick else 30.0)
        with ray_cluster(Path(path)) as cluster:
            if "start" in parts:
                found["start"] = [_run(starts(cluster, demo, 2 if quick else 5))]
            if "turns" in parts:
                cases = [Case(workers, 64 * workers) for workers in ((1,) if quick else (1, 2, 8))]
                found["turns"] = [_run(load, case, cluster, model) for case in cases]
            if "lag" in parts:
                coin = EnvironmentSpec("coin")
                case = Case(2, 1024, coin, 1, 1000, 5.0) if quick else Case(8, 16_384, coin, 1, 1000, 80.0)
                found["lag"] = [_run(load, case, cluster, model)]
            if "kills" in parts:
                case = Case(4, 256, EnvironmentSpec("coin"), 1, 1000, 2.0 if quick else 4.0, 15 if quick else 60)
                found["kills"] = [_run(kills(case, cluster, model, 5.0 if quick else 10.0))]
    return found


def _run(work: Any, *arguments: Any) -> dict[str, Any]:
    """Runs a coroutine, or a function with the selector of its event loop."""
    selector = TimedSelector()
    with asyncio.Runner(loop_factory=functools.partial(asyncio.SelectorEventLoop, selector)) as runner:
        result: dict[str, Any] = runner.run(work(*arguments, selector=selector) if arguments else work)
    return result
