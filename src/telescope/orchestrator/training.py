"""Trains from a state to the last checkpoint. Restarts the trainer after the loss of a rank.

    lost rank -> loops end -> all ranks replaced -> checkpoint loaded -> weights sent -> loops begin again

Servers, environments and finished groups stay (`run_state.after_restart`). Running requests are aborted, and their
prompts are sampled again. A restart is a new attempt in the record, so lost steps are hidden. The trainer restarts only
after the loss of a rank's process or node, at most `trainer_max_restarts` times in a run. An exception in a rank ends
the run. After such an error, or a stop signal, a checkpoint is written if there is time.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from telescope.config.model_files import vocabulary_size
from telescope.config.model_source import read_meta_files
from telescope.errors import RankLost, RunError
from telescope.orchestrator import record_rows
from telescope.orchestrator.async_window import Staleness
from telescope.orchestrator.checkpoints import Checkpointer, CheckpointFolder, refuse_damage
from telescope.orchestrator.evaluation import Evaluation
from telescope.orchestrator.filters import SampleFilters
from telescope.orchestrator.orchestrator import AfterStep, Orchestrator
from telescope.orchestrator.prompt_sampler import PromptSampler
from telescope.orchestrator.run_components import RunComponents, load_trainer
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.run_state import RunState, after_restart
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.supervision import Interrupt, Supervisor, with_progress
from telescope.record.recorder import REPORTED
from telescope.utils.text import pluralize

logger = logging.getLogger(__name__)


@dataclass
class Training:
    """Trains with started components."""

    components: RunComponents
    evaluation: Evaluation
    directory: RunDirectory
    status: RunStatus
    checkpoints: CheckpointFolder
    interrupt: Interrupt
    _exit_requested_at: float | None = None
    _num_restarts: int = 0

    async def run(self, start: RunState) -> Orchestrator:
        """Trains to the last checkpoint. Continues from the newest one if a rank is lost. Returns the last loops."""
        config, components, status = self.components.config, self.components, self.status
        while True:
            status.phase = "training"
            self.directory.started(components.topology | components.trainer.topology, start.step)
            self.checkpoints.continue_after(start.step)
            checkpointer = Checkpointer(
                config, self.checkpoints, components.trainer, status, self.directory,
                last_step=start.step, model_files=read_meta_files(config), seconds_left=self._seconds_left,
            )  # fmt: skip
            orchestrator = await make_orchestrator(
                components, self.evaluation, self.directory, status, start=start,
                after_step=partial(self._after_step, checkpointer),
            )  # fmt: skip
            status.engines_idle_seconds = status.last_step_at = None  # times before training belong to no step
            self.interrupt.on_first(self._request_exit)
            self.interrupt.on_first(orchestrator.request_stop)
            try:
                await self._run_loops(orchestrator, checkpointer)
                return orchestrator
            except RankLost as lost:
                start = await self.interrupt.run_until_first(self.restart(lost, orchestrator, checkpointer))
                await self.evaluation.continue_after(start.step)
            except (Exception, asyncio.CancelledError):
                await self._save_after_error(orchestrator, checkpointer)
                raise

    async def _after_step(self, checkpointer: Checkpointer, step: int, state: Callable[[], RunState]) -> None:
        if not self.interrupt.requested:
            await self.evaluation.start_due(step)
        await checkpointer.after_step(step, state)

    def _request_exit(self) -> None:
        self._exit_requested_at = self._exit_requested_at or time.monotonic()

    def _seconds_left(self) -> float | None:
        """Returns how long the run still waits for a checkpoint, or None without a limit."""
        if self._exit_requested_at is None:
            return None
        return max(
            self._exit_requested_at + self.components.config.checkpoint_on_exit_timeout_s - time.monotonic(), 0.0
        )

    async def _save_after_error(self, orchestrator: Orchestrator, checkpointer: Checkpointer) -> None:
        """Writes a checkpoint after an error, unless a step is incomplete. Only logs its own errors."""
        self._request_exit()
        trainer, step = self.components.trainer, self.status.version
        if not (trainer.is_settled and trainer.version == step == orchestrator.run_state().step):
            return
        try:
            await checkpointer.save_last(step, orchestrator.run_state, "writing a checkpoint after the error")
        except Exception as error:
            # The trainer or Ray may have failed too.
            logger.warning("No checkpoint could be written after the error: %r", error)

    async def _run_loops(self, orchestrator: Orchestrator, checkpointer: Checkpointer) -> None:
        """Runs the loops to their end and writes the last checkpoint. Raises `RankLost` at once."""
        loops = Supervisor()
        loops.spawn(self.components.trainer.watch(), "trainer ranks")

        async def train_and_save() -> None:
            await orchestrator.run(loops)
            await checkpointer.save_last(self.status.version, orchestrator.run_state)

        def grace(error: BaseException) -> float:
            """Returns the seconds that the current step and its checkpoint may take."""
            saves = self.components.config.checkpoint_every
            if not saves or not isinstance(error, RunError) or isinstance(error, RankLost):
                return 0.0
            self._request_exit()
            orchestrator.request_stop()
            self.status.phase = "stopping after this step, because of an error"
            return self._seconds_left() or 0.0

        await loops.run_until(train_and_save(), grace=grace)

    async def restart(self, lost: RankLost, orchestrator: Orchestrator, checkpointer: Checkpointer) -> RunState:
        """Replaces the ranks. Returns the state to continue from, whose weights are loaded.

        `orchestrator` and `checkpointer` belong to the ended loops. Raises `lost` if no restart is left, with the field
        that would have allowed one.
        """
        config, status = self.components.config, self.status
        if self._num_restarts >= config.trainer_max_restarts or not config.checkpoint_every:
            raise self._refusal(lost) from None
        self._num_restarts += 1
        logger.warning("%s", lost, extra=REPORTED)  # the alert follows when the ranks are back
        last_step = status.step
        status.phase = "restarting the trainer: a rank was lost"
        state = await with_progress(status, self._reload(orchestrator, checkpointer))
        kept = len(state.groups)
        news = (
            f"{str(lost).partition(' during:')[0]}; {pluralize(last_step - state.step, 'step')} lost, continuing after "
            f"step {state.step} with {pluralize(kept, 'finished group')} (restart {self._num_restarts} of "
            f"{config.trainer_max_restarts})"
        )
        status.report(news, "trainer", "warning", log=logger)
        status.history = [summary for summary in status.history if summary.step < state.step]
        status.step = status.version = state.step
        self.directory.begin_next_attempt(news)
        return state

    async def _reload(self, orchestrator: Orchestrator, checkpointer: Checkpointer) -> RunState:
        """Replaces the ranks and loads the newest checkpoint or, without one, the initial weights."""
        config, components = self.components.config, self.components
        async with components.trainer.queue:  # a server that comes back meanwhile waits for its weights
            await components.trainer.replace()
            await checkpointer.ranks_replaced()
            checkpoint = self.checkpoints.load(True) if self.checkpoints.steps() else None
            if checkpoint is not None:
                await asyncio.to_thread(refuse_damage, checkpoint.path, checkpoint.meta)
            await load_trainer(components, self.directory, self.status)
            if checkpoint is not None:
                await components.trainer.load_checkpoint(checkpoint.step, checkpoint.path)
        await components.weights.sync()
        return after_restart(
            checkpoint.state if checkpoint is not None else RunState(),
            orchestrator.run_state(),
            Staleness(config.max_off_policy_steps),
            synchronous=config.max_async_rollout == 0,
        )

    def _refusal(self, lost: RankLost) -> RankLost:
        """Returns the error that ends the run, with the fix."""
        config = self.components.config
        if not config.checkpoint_every:
            fix = "The ranks can restart from a checkpoint: set checkpoint_every"
        elif self._num_restarts:
            fix = (
                f"The ranks were restarted {pluralize(self._num_restarts, 'time')} already "
                "(trainer_max_restarts). Continue the run with resume_from_checkpoint once the cause is fixed"
            )
        else:
            fix = "trainer_max_restarts is 0: raise it, or continue the run with resume_from_checkpoint"
        return RankLost(f"{lost}\n{fix}")


async def make_orchestrator(
    components: RunComponents,
    evaluation: Evaluation,
    directory: RunDirectory,
    status: RunStatus,
    *,
    start: RunState | None = None,
    after_step: AfterStep | None = None,
) -> Orchestrator:
    """Builds the loops from a checkpoint's state. They never sample items that an eval holds out."""
    config = components.config
    infos = [components.rollouts.infos[key] for key in components.keys.training]
    for key, entry, info in zip(components.keys.training, config.environments, infos, strict=True):
        directory.recorder.write("environments", record_rows.environment_row(key, key, entry.weight, info))
    for key, eval_entry in zip(components.keys.evals, config.evals, strict=True):
        # The samples of an eval have its own name, also if it uses the environment of a training entry.
        own = eval_entry.name if key in components.keys.training else key
        if own not in components.keys.training:
            row = record_rows.environment_row(own, eval_entry.name, None, components.rollouts.infos[key])
            directory.recorder.write("environments", row)
    sampler = PromptSampler(
        config.seed,
        sizes=[info.num_samples for info in infos],
        weights=[entry.weight for entry in config.environments],
        first_index=[components.data[key]["held_out"] for key in components.keys.training],
    )
    return Orchestrator(
        config,
        components.rollouts,
        components.keys.training,
        infos,
        components.servers.slots,
        components.trainer,
        components.weights,
        directory.recorder,
        status,
        SampleFilters(config, vocabulary_size(config) if config.filter_gibberish else None),
        components.settings,
        sampler,
        evaluation.held_out_uids,
        start,
        after_step=after_step,
        eval_history=lambda: list(evaluation.results),
        data=components.data,
    )
