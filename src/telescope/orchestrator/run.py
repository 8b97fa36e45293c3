"""Trains a model, from the resolved config to the summary.

Trains in a `session` with started components. In any case, the components are stopped, the summary is written, and the
first error is raised.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from telescope.cluster.actors import HostGroup
from telescope.cluster.reaper import temporary_base
from telescope.config import TelescopeConfig
from telescope.config.loader import choose_run_dir
from telescope.errors import RunError, UserError
from telescope.health.watch import Watch
from telescope.orchestrator.checkpoints import Checkpoint, CheckpointFolder, refuse_damage
from telescope.orchestrator.collectors import collect, sources_of
from telescope.orchestrator.evaluation import Evaluation
from telescope.orchestrator.resume import check_data, find_checkpoint
from telescope.orchestrator.run_components import RunComponents
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.run_state import RunState
from telescope.orchestrator.session import Session, View
from telescope.orchestrator.status import Interrupted, RunStatus, RunSummary, headline_of, summarize
from telescope.orchestrator.supervision import with_progress
from telescope.orchestrator.training import Training
from telescope.record.code_snapshot import keep_code
from telescope.record.files import RunFiles
from telescope.record.gauges import Sampler
from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.record.system_metrics import DISK_FREE, DISK_TOTAL, MachineSampler, read_disk
from telescope.weights.model_folder import ModelOrigin, ModelSource

logger = logging.getLogger(__name__)

GAUGE_SECONDS = 0.5  # interval of the live view's numbers and the record's gauges
DISK_SECONDS = 10.0  # interval at which the free space of the run directory's disk is read


def run_training(config: TelescopeConfig, notes: list[str], view: View | None = None) -> RunSummary:
    """Trains as configured. Returns the summary, which is also in the run directory.

    Raises UserError for input that cannot be run, without leaving anything behind, and otherwise the first error of any
    component.
    """
    summary = asyncio.run(_TrainingRun(config, notes, view).run())
    if summary.status == "stopped":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a scheduler repeats the signal while the last lines are printed
    return summary


class _TrainingRun:
    """One attempt of a run, from its directory to its summary."""

    def __init__(self, config: TelescopeConfig, notes: list[str], view: View | None) -> None:
        self._config = config
        path = choose_run_dir(config)
        self._resumed = find_checkpoint(config, path)
        if self._resumed is not None:
            refuse_damage(self._resumed.path, self._resumed.meta)
        self._directory = RunDirectory.create(config, notes, path=path, is_resumed=self._resumed is not None)
        self._checkpoints = CheckpointFolder.for_run(config, self._directory.path)
        self._status = RunStatus(
            config.wandb_run_name, config.number_of_steps, run_dir=str(self._directory.path),
            health=Watch(config.values),
        )  # fmt: skip
        if self._resumed is not None:
            self._status.step = self._resumed.step
        for note in notes:
            self._status.report(note, "config")
        self._session = Session(self._status, view)
        self._interrupt = self._session.interrupt
        self._interrupt.on_second(self._directory.ended_at_once)
        self._evaluation: Evaluation | None = None
        self._started_at = time.time()
        self._training_seconds: float | None = None
        self._model_dir: Path | None = None

    async def run(self) -> RunSummary:
        """Runs to the end. Raises the error that ended the run, unless the user stopped it."""
        error: BaseException | None = None
        directory, tell = self._directory, self._status.show
        with self._session.open(directory.open_record(console=not self._session.has_view, tell=tell)) as recorder:
            directory.trackers.tell = self._status.messages.append
            self._status.record_alerts(directory.alerts.add)
            recorder.now = self._status.now
            keep_code(
                directory.path, recorder.attempt, max_mb=self._config.wandb_code_max_file_size_mb,
                exclude=self._config.wandb_code_exclude_patterns, folders=self._config.environments_path,
            )  # fmt: skip
            if directory.trackers.notice:
                self._status.messages.append(directory.trackers.notice)
            try:
                await self._session.run(self._start_and_train())
            except BaseException as caught:
                error = caught
            summary = summarize(
                self._config, directory.path, self._status,
                self._evaluation.results if self._evaluation is not None else [],
                self._evaluation.problems if self._evaluation is not None else [],
                seconds=time.time() - self._started_at, training_seconds=self._training_seconds,
                model_dir=self._model_dir, error=error, interrupted=self._interrupt.requested,
                record_error=await asyncio.to_thread(directory.record_problem),
            )  # fmt: skip
            directory.ended(summary, error)
            self._status.phase = summary.sentence
        if error is not None and not isinstance(error, Interrupted):
            if summary.record_error is not None:
                error.add_note(f"The record in {directory.path} is incomplete: {summary.record_error}")
            if not isinstance(error, UserError) and (steps := self._checkpoints.steps()):
                error.add_note(f"Continue after step {steps[-1]} with: telescope train --resume {directory.path}")
            raise error
        return summary

    async def _start_and_train(self) -> None:
        """Trains between the evals at version 0 and the evals at the last version."""
        config, status, interrupt = self._config, self._status, self._interrupt
        if config.prometheus_address:
            from telescope.orchestrator.prometheus import serve_status

            self._session.stack.callback(serve_status(config.prometheus_address, status))
        components, evaluation, start = await interrupt.run_until_first(self._start())
        started_at = time.time()
        training = Training(components, evaluation, self._directory, status, self._checkpoints, interrupt)
        interrupt.describe_stop("stopping after this step")
        await training.run(start)
        interrupt.describe_stop("stopping")
        self._training_seconds = time.time() - started_at
        if config.save_final_model and status.version > 0:
            status.phase = "saving the trained model"
            self._model_dir = await with_progress(status, self._save_model(components))
        if evaluation.plans and not interrupt.requested:
            after = evaluation.run_all(status.version) if config.eval_after_training else evaluation.finish()
            await interrupt.run_until_first(after)

    async def _start(self) -> tuple[RunComponents, Evaluation, RunState]:
        """Starts the components with verified weights, from a checkpoint if there is one. Returns its state too."""
        config, status, directory, supervisor = self._config, self._status, self._directory, self._session.supervisor

        async def check(components: RunComponents) -> TelescopeConfig:
            if self._resumed is not None:
                self._resumed = check_data(config, self._resumed, components.data)
            return config

        components = await self._session.start(config, directory, on_data=check)
        disk = Sampler("disk", DISK_SECONDS, partial(read_disk, directory.path))
        disk.start()
        self._session.stack.callback(disk.stop)
        supervisor.spawn(self._take_gauges(components, disk), "gauges")
        supervisor.spawn(collect_gauges(components, directory.recorder, self._session.stack), "collectors")
        evaluation = self._evaluation = Evaluation(
            components.evals, config, components.rollouts, components.servers, components.settings,
            directory.recorder, status, supervisor.spawn,
            results=list(self._resumed.state.evals) if self._resumed else [],
        )  # fmt: skip
        status.phase = "verifying the weights of the servers"
        await with_progress(status, components.weights.verify_initial())
        if self._resumed is not None:
            start = self._resumed.state
            await with_progress(status, self._load_checkpoint(components, evaluation, self._resumed))
            record = Run(directory.path)
            done = record.values("evals", "number", version=start.step, status="finished", source="live")
            await evaluation.start_due(start.step, done)
            return components, evaluation, start
        results = await evaluation.run_all(0) if evaluation.plans and config.eval_before_training else []
        if (headline := headline_of(results)) is not None:
            directory.evaluated_before(headline.accuracy)
        return components, evaluation, RunState()

    async def _load_checkpoint(self, components: RunComponents, evaluation: Evaluation, checkpoint: Checkpoint) -> None:
        """Loads the weights of a checkpoint into trainer and engines."""
        status = self._status
        status.phase = f"loading the checkpoint after step {checkpoint.step}"
        async with components.trainer.queue:
            await components.trainer.load_checkpoint(checkpoint.step, checkpoint.path)
        await components.weights.sync()
        for note in checkpoint.notes:
            status.report(note, "checkpoint", log=logger)
        # The health rules get the steps before the checkpoint.
        rows = Run(self._directory.path).table("steps", columns=["step", "metrics"]).sort_by("step").to_pylist()
        earlier = [(row["step"], dict(row["metrics"])) for row in rows if row["step"] < checkpoint.step]
        status.health.resume(earlier, evaluation.points())
        status.version = checkpoint.step

    async def _save_model(self, components: RunComponents) -> Path:
        source = ModelSource(self._status.version, time.time(), self._config.model, self._config.hash)
        origin = ModelOrigin(source, run=self._directory.run_id)

        async def save(folder: Path) -> None:
            async with components.trainer.queue:
                await components.trainer.save_hf(folder, origin)

        folder = RunFiles(self._directory.path).model
        return await save_where_possible(save, folder, self._status)

    async def _take_gauges(self, components: RunComponents, disk: Sampler) -> None:
        """Updates the live view's numbers and the record's gauges. Also detects stalls and a full disk."""
        status, write = self._status, self._directory.recorder.write
        status.num_slots = sum(components.servers.slots.capacities)
        loop = asyncio.get_running_loop()
        sizes: dict[str, float] = {}
        while True:
            before = loop.time()
            await asyncio.sleep(GAUGE_SECONDS)
            seconds = loop.time() - before
            if not self._config.share_gpus:  # a server without requests leaves the GPU to the trainer
                idle = status.engines_idle_seconds or 0.0
                status.engines_idle_seconds = idle + seconds * components.servers.slots.idle_share
            status.num_generating = components.servers.slots.num_used + components.servers.num_slots_used_by_evals
            news = self._directory.record_news()
            if news is not None:
                status.report(news, "record", "warning")
            status.detect_stall()
            now = time.time()
            for reading in disk.take().readings:
                row = {"time": reading.time, "name": reading.name, "component": "host", "value": reading.value}
                write("gauges", row)
                sizes[reading.name] = reading.value
            if len(sizes) == 2:
                found = status.health.check_disk(sizes[DISK_FREE], sizes[DISK_TOTAL], status.run_dir, now)
                status.report_findings(found, status.step)
            for name, value in (
                ("event_loop_lag_seconds", max(seconds - GAUGE_SECONDS, 0.0)),
                ("lanes_used", float(status.num_generating)),
                ("groups_open", float(status.num_open_groups)),
                ("groups_ready", float(status.num_finished_groups)),
                ("tokens_per_second", status.tokens_per_second()),
            ):
                write("gauges", {"time": now, "name": name, "component": "orchestrator", "value": value})


async def collect_gauges(components: RunComponents, recorder: Recorder, stack: AsyncExitStack) -> None:
    """Samples and records all gauges until cancelled. `stack` stops what this starts."""
    config = components.config
    machine = MachineSampler(config.system_metrics_collection_interval_seconds)
    stack.callback(machine.stop)
    hosts = HostGroup(config, components.cluster)
    stack.push_async_callback(hosts.stop)
    await collect(sources_of(config, machine, components.trainer, components.inference, hosts), recorder)


SAVE_WAIT_SECONDS = 1800.0
"""How long the run waits for space for the trained model, so that a person can free some."""

SAVE_RETRY_SECONDS = 10.0


async def save_where_possible(
    save: Callable[[Path], Awaitable[None]],
    folder: Path,
    status: RunStatus,
    *,
    wait_seconds: float = SAVE_WAIT_SECONDS,
    retry_seconds: float = SAVE_RETRY_SECONDS,
) -> Path:
    """Saves the trained model to `folder`, or else to a temporary folder. Returns the folder.

    If neither has space, reports it and tries again for `wait_seconds`, because the weights are lost when the run ends.
    Raises `RunError` with both problems.
    """
    deadline = time.monotonic() + wait_seconds
    elsewhere = Path(temporary_base(), f"telescope-model-{folder.parent.name}-{time.time_ns():x}")
    announced = False
    while True:
        problems = []
        for candidate in (folder, elsewhere):
            try:
                await save(candidate)
            except OSError as error:
                problems.append(str(error))
                continue
            if problems:
                news = f"the trained model was saved to {candidate}, because {problems[0]}"
                status.report(news, "model", "warning", log=logger)
            return candidate
        what = f"The trained model cannot be saved. {'. '.join(problems)}"
        if not announced:
            announced = True
            news = (
                f"{what}. Free space in one of these folders: saving is tried every {retry_seconds:g} s for "
                f"{wait_seconds / 60:g} min, and the weights are lost after that"
            )
            status.report(news, "model", "error", log=logger)
        if time.monotonic() + retry_seconds > deadline:
            raise RunError(
                f"{what}. Free space in one of these folders before a run ends, or set run_dir to another disk"
            )
        status.progressed()
        await asyncio.sleep(retry_seconds)
