"""Training from a state to the last checkpoint.

When a trainer rank is lost, new loops continue (`trainer_restart`). After any other error, or a stop signal, a
checkpoint is written if there is time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from telescope.config import TelescopeConfig
from telescope.config.model_files import vocabulary_size
from telescope.config.model_source import read_meta_files
from telescope.errors import RankLost, RunError
from telescope.orchestrator import record_rows
from telescope.orchestrator.checkpoints import Checkpointer, CheckpointFolder
from telescope.orchestrator.evaluation import Evaluation
from telescope.orchestrator.filters import SampleFilters
from telescope.orchestrator.orchestrator import AfterStep, Orchestrator, Services
from telescope.orchestrator.prompt_sampler import PromptSampler
from telescope.orchestrator.run_components import RunComponents
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.run_state import RunState
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.supervision import Interrupt, Supervisor
from telescope.orchestrator.trainer_restart import TrainerRestarts

logger = logging.getLogger(__name__)


@dataclass
class Training:
    """Training over started components."""

    config: TelescopeConfig
    components: RunComponents
    evaluation: Evaluation
    directory: RunDirectory
    status: RunStatus
    checkpoints: CheckpointFolder
    interrupt: Interrupt
    _exit_requested_at: float | None = None

    async def run(self, start: RunState) -> Orchestrator:
        """Trains to the last checkpoint. When a trainer rank is lost, continues from the newest one.

        Trainer and servers have the weights of `start`. Returns the last loops.
        """
        config, components, status = self.config, self.components, self.status
        restarts = TrainerRestarts(config, components, self.checkpoints, self.directory, status)
        while True:
            status.phase = "training"
            self.directory.started(components.topology | components.trainer.topology, start.step)
            self.checkpoints.continue_after(start.step)
            checkpointer = Checkpointer(
                config, self.checkpoints, components.trainer, status,
                last_step=start.step, model_files=read_meta_files(config), flush_record=self.directory.flush_record,
                write=self.directory.recorder.write, seconds_left=self._seconds_left,
            )  # fmt: skip
            orchestrator = await make_orchestrator(
                config, components, self.evaluation, self.directory, status, start=start,
                after_step=partial(self._after_step, checkpointer),
            )  # fmt: skip
            status.training_begins()
            self.interrupt.on_first(self._request_exit)
            self.interrupt.on_first(orchestrator.request_stop)
            try:
                await self._run_loops(orchestrator, checkpointer)
                return orchestrator
            except RankLost as lost:
                start = await self.interrupt.run_until_first(restarts.restart(lost, orchestrator, checkpointer))
                await self.evaluation.continue_after(start.step)
            except (Exception, asyncio.CancelledError):
                await self._save_after_error(orchestrator, checkpointer)
                raise

    async def _after_step(self, checkpointer: Checkpointer, step: int, state: Callable[[], RunState]) -> None:
        """Starts the evals and the checkpoint due after a step."""
        if not self.interrupt.requested:
            await self.evaluation.start_due(step)
        await checkpointer.after_step(step, state)

    def _request_exit(self) -> None:
        self._exit_requested_at = self._exit_requested_at or time.monotonic()

    def _seconds_left(self) -> float | None:
        """Returns how long the run waits for a checkpoint; None without limit."""
        if self._exit_requested_at is None:
            return None
        return max(self._exit_requested_at + self.config.checkpoint_on_exit_timeout_s - time.monotonic(), 0.0)

    async def _save_after_error(self, orchestrator: Orchestrator, checkpointer: Checkpointer) -> None:
        """Writes a checkpoint after an error, unless a step is incomplete.

        Does not raise: the user must see the first error.
        """
        self._request_exit()
        trainer, step = self.components.trainer, self.status.version
        if not (trainer.is_settled and trainer.version == step == orchestrator.run_state().step):
            return
        self.status.phase = "writing a checkpoint after the error"
        try:
            await checkpointer.save_last(step, orchestrator.run_state)
        except Exception as error:
            # The trainer, or Ray, may have failed with the other component.
            logger.warning("No checkpoint could be written after the error: %r", error)

    async def _run_loops(self, orchestrator: Orchestrator, checkpointer: Checkpointer) -> None:
        """Runs the loops to their end, and writes the last checkpoint. Raises `RankLost` at once."""
        loops = Supervisor()
        loops.spawn(self.components.trainer.watch(), "trainer ranks")

        async def train_and_save() -> None:
            await orchestrator.run(loops)
            self.status.phase = "writing the last checkpoint"
            await checkpointer.save_last(self.status.version, orchestrator.run_state)

        def grace(error: BaseException) -> float:
            """Returns the seconds that the current step and its checkpoint may take."""
            if not self.config.checkpoint_every or not isinstance(error, RunError) or isinstance(error, RankLost):
                return 0.0
            self._request_exit()
            orchestrator.request_stop()
            self.status.phase = "stopping after this step, because of an error"
            return self._seconds_left() or 0.0

        await loops.run_until(train_and_save(), grace=grace)


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
    """Builds the loops over started components. `start` is the state of a checkpoint.

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
