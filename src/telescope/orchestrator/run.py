"""A training run from the resolved config to the summary.

Opens the record, starts the components, trains, and stops everything. The composition root together with
`run_components`: the only modules that know all packages. Whatever happens, the components are stopped, the summary is
written, and the first error is raised.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from telescope.cluster.actors import HostGroup
from telescope.cluster.ray_cluster import watch_daemons
from telescope.cluster.reaper import Reaper
from telescope.config import TelescopeConfig
from telescope.config.loader import choose_run_dir
from telescope.config.model_files import vocabulary_size
from telescope.config.model_source import read_meta_files
from telescope.errors import RankLost, UserError
from telescope.orchestrator import record_rows
from telescope.orchestrator.checkpoints import Checkpoint, Checkpointer, CheckpointFolder
from telescope.orchestrator.collectors import Collectors, sources_of
from telescope.orchestrator.evaluation import Evaluation, finished_at
from telescope.orchestrator.filters import SampleFilters
from telescope.orchestrator.final_model import save_where_possible
from telescope.orchestrator.orchestrator import AfterStep, Orchestrator, Services
from telescope.orchestrator.prompt_sampler import PromptSampler
from telescope.orchestrator.resume import check_data, find_checkpoint
from telescope.orchestrator.run_components import RunComponents, start_components
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.run_state import RunState
from telescope.orchestrator.status import Interrupted, RunStatus, RunSummary, headline_of, summarize
from telescope.orchestrator.supervision import Interrupt, Supervisor, watchdog
from telescope.orchestrator.trainer_restart import TrainerRestarts
from telescope.record.files import RunFiles
from telescope.record.recorder import Recorder
from telescope.record.system_metrics import MachineSampler

logger = logging.getLogger(__name__)

GAUGE_SECONDS = 0.5
"""Interval of the live view's numbers and the record's gauges."""


class View(Protocol):
    """Shows the progress of a run."""

    def start(self, status: RunStatus) -> None: ...

    def stop(self) -> None: ...


def run_training(config: TelescopeConfig, notes: list[str], view: View | None = None) -> RunSummary:
    """Trains as configured. Returns the summary, which is also in the run directory.

    Raises UserError for input that cannot be run (nothing is left behind), the first error of any part otherwise.
    """
    return asyncio.run(_TrainingRun(config, notes, view).run())


class _TrainingRun:
    """One attempt of a run, from its directory to its summary."""

    def __init__(self, config: TelescopeConfig, notes: list[str], view: View | None) -> None:
        self._config = config
        self._view = view
        path = choose_run_dir(config)
        self._checkpoints = CheckpointFolder.for_run(config, path)
        self._resumed = find_checkpoint(config, path)
        self._directory = RunDirectory.create(config, notes, path=path, is_resumed=self._resumed is not None)
        self._status = RunStatus(config.wandb_run_name, config.number_of_steps)
        self._status.run_dir = str(self._directory.path)
        self._status.messages.extend(notes)
        self._interrupt = Interrupt(self._status)
        self._interrupt.on_second(self._directory.ended_at_once)
        self._evaluation: Evaluation | None = None
        self._started_at = time.time()
        self._training_seconds: float | None = None
        self._model_dir: Path | None = None
        self._leaving_at: float | None = None
        """When the run was stopped, or failed, while it trained."""

    async def run(self) -> RunSummary:
        """Runs to the end. Raises the error that ended the run, unless the user stopped it."""
        error: BaseException | None = None
        async with AsyncExitStack() as stack:
            reaper = stack.enter_context(Reaper())
            stack.enter_context(self._directory.open_record(console=self._view is None))
            if self._directory.step_log.notice:
                self._status.messages.append(self._directory.step_log.notice)
            stack.callback(self._stop_view)
            if self._view is not None:
                self._view.start(self._status)
            self._interrupt.install(asyncio.get_running_loop())
            try:
                await self._start_and_train(reaper.directory)
            except BaseException as caught:
                error = caught
            summary = self._summarize(error, await asyncio.to_thread(self._directory.record_problem))
            self._directory.ended(summary)
            self._status.phase = summary.sentence
        if error is not None and not isinstance(error, Interrupted):
            if summary.record_error is not None:
                error.add_note(f"The record in {self._directory.path} is incomplete: {summary.record_error}")
            if not isinstance(error, UserError) and (steps := self._checkpoints.steps()):
                error.add_note(f"Continue after step {steps[-1]} with: telescope train --resume {self._directory.path}")
            raise error
        return summary

    async def _start_and_train(self, temporary: Path) -> None:
        async with AsyncExitStack() as stack:
            stack.callback(self._show_shutdown)
            supervisor = Supervisor()
            await supervisor.run_until(self._start_components_and_train(supervisor, stack, temporary))

    async def _start_components_and_train(self, supervisor: Supervisor, stack: AsyncExitStack, temporary: Path) -> None:
        config, status = self._config, self._status
        loop = asyncio.get_running_loop()

        def on_ray_started() -> None:
            self._interrupt.install(loop)
            supervisor.spawn(watch_daemons(), "Ray's daemons")

        starting = start_components(
            config, self._directory, status, stack, temporary, on_ray_started=on_ray_started,
            check_data=self._check_data,
        )  # fmt: skip
        components = await self._interrupt.run_until_first(starting)
        supervisor.spawn(components.servers.watch(), "server watch")
        supervisor.spawn(self._take_gauges(components), "gauges")
        supervisor.spawn(start_collectors(config, components, self._directory.recorder, stack).run(), "collectors")
        supervisor.spawn(watchdog(status, config.watchdog_seconds, components.dump_stacks), "watchdog")
        await self._evaluate_and_train(components, supervisor)

    async def _evaluate_and_train(self, components: RunComponents, supervisor: Supervisor) -> None:
        """Evals at version 0, training, evals at the last version."""
        config, status = self._config, self._status
        evaluation = self._evaluation = Evaluation(
            components.evals, config, components.environments, components.servers, components.settings,
            self._directory.recorder, self._directory.step_log.log_step, status, supervisor.spawn,
            results=list(self._resumed.state.evals) if self._resumed else [],
        )  # fmt: skip
        status.phase = "verifying the weights of the servers"
        await self._interrupt.run_until_first(components.weights.verify_initial())
        if self._resumed is not None:
            await self._interrupt.run_until_first(self._load_checkpoint(components, self._resumed))
        elif evaluation.plans and config.eval_before_training:
            results = await self._interrupt.run_until_first(evaluation.run_all(0))
            if (headline := headline_of(results)) is not None:
                self._directory.evaluated_before(headline.accuracy)
        started_at = time.time()
        await self._train(components, evaluation)
        self._training_seconds = time.time() - started_at
        if config.save_final_model and status.version > 0:
            status.phase = "saving the trained model"
            self._model_dir = await self._save_model(components)
        if evaluation.plans and not self._interrupt.requested:
            after = evaluation.run_all(status.version) if config.eval_after_training else evaluation.finish()
            await self._interrupt.run_until_first(after)

    def _check_data(self, data: dict[str, Any]) -> None:
        if self._resumed is not None:
            self._resumed = check_data(self._config, self._resumed, data)

    async def _train(self, components: RunComponents, evaluation: Evaluation) -> None:
        """Trains to the last checkpoint. When a trainer rank is lost, continues from the newest one."""
        config, status = self._config, self._status
        restarts = TrainerRestarts(config, components, self._checkpoints, self._directory, status)
        start = self._resumed.state if self._resumed else RunState()
        if self._resumed is not None:
            await evaluation.start_due(start.step, done=finished_at(self._directory.path, start.step))
        while True:
            status.phase = "training"
            self._directory.started(components.topology | components.trainer.topology, start.step)
            self._checkpoints.continue_after(start.step)
            checkpointer = Checkpointer(
                config, self._checkpoints, components.trainer, status,
                last_step=start.step, model_files=read_meta_files(config), flush_record=self._directory.flush_record,
                write=self._directory.recorder.write, seconds_left=self._seconds_left,
            )  # fmt: skip
            orchestrator = await make_orchestrator(
                config, components, evaluation, self._directory, status, start=start,
                after_step=partial(self._after_step, evaluation, checkpointer),
            )  # fmt: skip
            self._interrupt.on_first(self._leave)
            self._interrupt.on_first(orchestrator.request_stop)
            try:
                await self._run_loops(orchestrator, checkpointer, components)
                return
            except RankLost as lost:
                start = await self._interrupt.run_until_first(restarts.restart(lost, orchestrator, checkpointer))
                await evaluation.continue_after(start.step)
            except (Exception, asyncio.CancelledError):
                await self._save_after_error(components, orchestrator, checkpointer)
                raise

    async def _after_step(
        self, evaluation: Evaluation, checkpointer: Checkpointer, step: int, state: Callable[[], RunState]
    ) -> None:
        """Starts the evals and the checkpoint that are due after a finished step."""
        if not self._interrupt.requested:
            await evaluation.start_due(step)
        await checkpointer.after_step(step, state)

    def _leave(self) -> None:
        self._leaving_at = self._leaving_at or time.monotonic()

    def _seconds_left(self) -> float | None:
        """Returns how long the run still waits for a checkpoint; None for ever."""
        if self._leaving_at is None:
            return None
        return max(self._leaving_at + self._config.checkpoint_on_exit_timeout_s - time.monotonic(), 0.0)

    async def _save_after_error(
        self, components: RunComponents, orchestrator: Orchestrator, checkpointer: Checkpointer
    ) -> None:
        """Writes a checkpoint after an error that ended the loops, if the ranks have the weights of the last step.

        Does not raise: the first error is what the user must see.
        """
        self._leave()
        trainer, step = components.trainer, self._status.version
        if not (trainer.is_settled and trainer.version == step == orchestrator.run_state().step):
            return
        self._status.phase = "writing a checkpoint after the error"
        try:
            await checkpointer.save_last(step, orchestrator.run_state)
        except Exception as error:
            # The trainer, or Ray, may have failed with the other component.
            logger.warning("No checkpoint could be written after the error: %r", error)

    async def _run_loops(
        self, orchestrator: Orchestrator, checkpointer: Checkpointer, components: RunComponents
    ) -> None:
        """Runs the loops to their end, and writes the last checkpoint. Raises `RankLost` at once."""
        loops = Supervisor()
        loops.spawn(components.trainer.watch(), "trainer ranks")

        async def train_and_save() -> None:
            await orchestrator.run(loops)
            self._status.phase = "writing the last checkpoint"
            await checkpointer.save_last(self._status.version, orchestrator.run_state)

        await loops.run_until(train_and_save())

    async def _load_checkpoint(self, components: RunComponents, checkpoint: Checkpoint) -> None:
        """Gives trainer and engines the weights of a checkpoint."""
        status = self._status
        status.phase = f"loading the checkpoint after step {checkpoint.step}"
        async with components.trainer.queue:
            await components.trainer.load_checkpoint(checkpoint.step, checkpoint.path)
        await components.weights.sync()
        for note in checkpoint.notes:
            logger.info("%s", note)
            status.messages.append(note)
        status.step = status.version = checkpoint.step

    async def _save_model(self, components: RunComponents) -> Path:
        """Writes the trained model; returns its folder."""

        async def save(folder: Path) -> None:
            async with components.trainer.queue:
                await components.trainer.save_hf(folder)

        folder = RunFiles(self._directory.path).model
        return await save_where_possible(save, folder, self._status.messages.append, self._status.progressed)

    async def _take_gauges(self, components: RunComponents) -> None:
        """Updates the live view's numbers and the record's gauges."""
        status, write = self._status, self._directory.recorder.write
        status.num_slots = sum(server.capacity for server in components.slots.servers)
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(GAUGE_SECONDS)
            lag = max(loop.time() - before - GAUGE_SECONDS, 0.0)
            status.num_generating = components.slots.num_used + components.servers.num_slots_used_by_evals
            news = self._directory.record_news()
            if news is not None:
                status.messages.append(news)
            now = time.time()
            for name, value in (
                ("event_loop_lag_seconds", lag),
                ("lanes_used", float(status.num_generating)),
                ("groups_open", float(status.num_open_groups)),
                ("groups_ready", float(status.num_finished_groups)),
                ("tokens_per_second", status.tokens_per_second()),
            ):
                write("gauges", {"time": now, "name": name, "component": "orchestrator", "value": value})

    def _summarize(self, error: BaseException | None, record_error: str | None) -> RunSummary:
        return summarize(
            self._config,
            self._directory.path,
            self._status,
            self._evaluation.results if self._evaluation is not None else [],
            self._evaluation.problems if self._evaluation is not None else [],
            seconds=time.time() - self._started_at,
            training_seconds=self._training_seconds,
            model_dir=self._model_dir,
            error=error,
            interrupted=self._interrupt.requested,
            record_error=record_error,
        )

    def _show_shutdown(self) -> None:
        self._status.phase = "shutting down"

    def _stop_view(self) -> None:
        if self._view is not None:
            self._view.stop()


def start_collectors(
    config: TelescopeConfig, components: RunComponents, recorder: Recorder, stack: AsyncExitStack
) -> Collectors:
    """The collectors of all gauges, sampling from now on. What they start ends with `stack`."""
    machine = MachineSampler(config.system_metrics_collection_interval_seconds)
    stack.callback(machine.stop)
    hosts = HostGroup(config, components.cluster)
    stack.push_async_callback(hosts.stop)
    return Collectors(sources_of(config, machine, components.trainer, components.inference, hosts), recorder)


async def make_orchestrator(
    config: TelescopeConfig,
    components: RunComponents,
    evaluation: Evaluation,
    directory: RunDirectory,
    status: RunStatus,
    *,
    start: RunState | None = None,
    after_step: AfterStep | None = None,
) -> Orchestrator:
    """The loops over started components, from the state of a checkpoint or from the beginning.

    Items that an eval holds out are never sampled.
    """
    infos = [await components.environments.describe(key) for key in components.keys.training]
    for key, entry, info in zip(components.keys.training, config.environments, infos, strict=True):
        directory.recorder.write("environments", record_rows.environment_row(key, entry.name, entry.weight, info))
    for key, eval_entry in zip(components.keys.evals, config.evals, strict=True):
        if key not in components.keys.training:
            row = record_rows.environment_row(key, eval_entry.name, None, await components.environments.describe(key))
            directory.recorder.write("environments", row)
    sampler = PromptSampler(
        config.seed,
        sizes=[info.num_samples for info in infos],
        weights=[entry.weight for entry in config.environments],
        first_index=[evaluation.num_reserved(key) for key in components.keys.training],
    )
    services = Services(
        environments=components.environments,
        environment_keys=components.keys.training,
        slots=components.slots,
        engines=components.servers.clients,
        trainer=components.trainer,
        weights=components.weights,
        recorder=directory.recorder,
        step_log=directory.step_log,
        filters=SampleFilters.from_config(config, vocabulary_size(config) if config.filter_gibberish else None),
        infos=infos,
        report_engine_failure=components.servers.report_failure,
        after_step=after_step,
        eval_history=evaluation.history,
        data=components.data,
    )
    return Orchestrator(config, services, sampler, evaluation.held_out_uids, components.settings, status, start)
