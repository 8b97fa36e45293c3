"""One Ray, one vLLM server and one trainer of two ranks for all tests that use `stack`.

Each test begins with the model's first weights: `Stack.run` restarts the trainer and syncs. Tests that only read share
`long_run`.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.e2e.train_command import steps_of

from telescope.cluster.reaper import Reaper
from telescope.config import TelescopeConfig, load_config
from telescope.evals.runner import EvalResult, PlannedEval
from telescope.orchestrator.checkpoints import Checkpoint, CheckpointFolder
from telescope.orchestrator.evaluation import Evaluation
from telescope.orchestrator.orchestrator import Orchestrator
from telescope.orchestrator.run import collect_gauges
from telescope.orchestrator.run_components import RunComponents, start_components
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.run_state import RunState
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.supervision import Interrupt, Supervisor
from telescope.orchestrator.training import Training
from telescope.record.reader import Run
from telescope.rollout.sample import RolloutSettings

DEMO = Path(__file__).parents[3] / "configs" / "examples" / "demo_countdown.yaml"

ENVIRONMENTS = Path(__file__).parents[3] / "benchmarks" / "environments"
OWN_ENVIRONMENTS = Path(__file__).parent / "environments"


@dataclass
class Outcome:
    """What one run of the loops left behind."""

    orchestrator: Orchestrator
    status: RunStatus
    record: Run

    def steps(self) -> list[dict[str, Any]]:
        return steps_of(self.record)

    def samples(self, **conditions: Any) -> list[dict[str, Any]]:
        texts = self.record.sql("select sample_id, prompt_text, completion_text from samples").to_dicts()
        text_of = {row["sample_id"]: row for row in texts}
        rows = [{**row, **text_of[row["sample_id"]]} for row in self.record.table("samples").to_pylist()]
        return [row for row in rows if all(row[name] == value for name, value in conditions.items())]


@dataclass
class Stack:
    """The started parts, and running the loops on them with other settings."""

    parts: RunComponents
    folder: Path
    num_runs: int = 0

    async def run(
        self,
        timeout: float = 240,
        environment: str = "countdown",
        after_steps: Sequence[tuple[int, float, Callable[[], object]]] = (),
        checkpoint: Checkpoint | None = None,
        **changes: Any,
    ) -> Outcome:
        """Trains on an environment, with `changes` of the config's loop settings.

        It begins with the first weights, or continues from a checkpoint. `after_steps` are numbers of steps, seconds,
        and what to do so long after so many are done.
        """
        if checkpoint is None:
            await self.parts.trainer.restart()
        else:
            async with self.parts.trainer.queue:
                await self.parts.trainer.load_checkpoint(checkpoint.step, checkpoint.path)
        await self.parts.weights.sync()
        entries = self.parts.config.environments
        position = [entry.name for entry in entries].index(environment)
        config = self.parts.config.replace(environments=[entries[position]], evals=[], **changes)
        keys = replace(self.parts.keys, training=[self.parts.keys.training[position]], evals=[])
        parts = replace(self.parts, config=config, keys=keys, settings=RolloutSettings.from_config(config))
        self.num_runs += 1
        directory = RunDirectory(self.folder / f"run-{self.num_runs}", config, [])
        directory.path.mkdir()
        status = RunStatus("e2e", config.number_of_steps)
        async with AsyncExitStack() as exit_stack:
            exit_stack.enter_context(directory.open_record(console=True))
            evaluation = evaluation_on(parts, [], directory, status)
            supervisor = Supervisor()
            supervisor.spawn(self.parts.servers.watch(), "server watch")
            supervisor.spawn(collect_gauges(parts, directory.recorder, exit_stack), "collectors")
            training = Training(
                parts, evaluation, directory, status, CheckpointFolder.for_run(config, directory.path),
                Interrupt(status),
            ).run(checkpoint.state if checkpoint else RunState())  # fmt: skip
            async with asyncio.timeout(timeout), asyncio.TaskGroup() as group:
                for action in after_steps:
                    group.create_task(act_after_step(status, *action))
                orchestrator = await supervisor.run_until(training)
        return Outcome(orchestrator, status, Run(directory.path))

    async def evaluate(self) -> EvalResult:
        """The config's held-out eval, with the weights that the engine holds now."""
        config = self.parts.config
        directory = RunDirectory(self.folder / f"eval-{self.num_runs}", config, [])
        directory.path.mkdir()
        with directory.open_record(console=True):
            evaluation = evaluation_on(self.parts, self.parts.evals, directory, RunStatus("e2e", 1))
            results = await evaluation.run_all(self.parts.trainer.version)
        shutil.rmtree(directory.path)
        return results[0]


def evaluation_on(
    parts: RunComponents, plans: list[PlannedEval], directory: RunDirectory, status: RunStatus
) -> Evaluation:
    return Evaluation(
        plans, parts.config, parts.rollouts, parts.servers, parts.settings, directory.recorder,
        status, lambda coroutine, name: asyncio.create_task(coroutine, name=name),
    )  # fmt: skip


async def act_after_step(status: RunStatus, step: int, seconds: float, action: Callable[[], object]) -> None:
    while status.step < step:  # noqa: ASYNC110  # a status has no event
        await asyncio.sleep(0.05)
    await asyncio.sleep(seconds)
    action()


@dataclass
class LongRun:
    """A run with the demo's settings, and held-out accuracies before and after it."""

    outcome: Outcome
    before: EvalResult
    after: EvalResult


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def long_run(stack: Stack) -> LongRun:
    """Long enough to learn."""
    await stack.parts.trainer.restart()
    await stack.parts.weights.sync()
    before = await stack.evaluate()
    outcome = await stack.run(number_of_steps=30)
    return LongRun(outcome, before, await stack.evaluate())


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Ray, vLLM and the trainer, started once."""
    folder = tmp_path_factory.mktemp("e2e")
    flags = [
        f"--model={tiny_model}",
        f"--run_dir={folder / 'parts'}",
        "--inference_base_port=18500",
        "--use_wandb=false",
        "--system_metrics_collection_interval_seconds=0.25",
        # Shorter than a user's, for the test of an engine that hangs, in the middle of a weight sync or not.
        "--inference_hang_timeout_seconds=30",
        "--weight_sync_timeout_seconds=60",
    ]
    flags.append("--max_model_len=256")  # room for two of vLLM's KV blocks: the test of the prefix cache needs one
    flags.append(f"--environments_path=[{ENVIRONMENTS},{OWN_ENVIRONMENTS}]")
    demo: TelescopeConfig = load_config(DEMO, flags, environ={}).config
    # For `Stack.run(environment=...)`.
    others = [{"name": "puzzle_series"}, {"name": "forks", "kwargs": demo.environments[0].kwargs}]
    config = demo.replace(environments=[*demo.environments, *others])
    async with AsyncExitStack() as exit_stack:
        directory = RunDirectory.create(config, [])
        reaper = exit_stack.enter_context(Reaper())
        exit_stack.enter_context(directory.open_record(console=True))
        parts = await start_components(config, directory, RunStatus("e2e", 1), exit_stack, reaper.directory)
        yield Stack(parts, folder)
