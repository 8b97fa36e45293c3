"""Restarts the trainer's ranks from the newest checkpoint after a loss.

    lost rank -> loops end -> all ranks replaced -> checkpoint loaded -> weights sent -> loops begin again

Servers, environments and finished groups stay (`run_state.after_restart`); requests that run are aborted, and their
prompts are sampled again. A restart is a new attempt in the record, so the steps that were lost are hidden. Only the
loss of a rank's process or node is followed by a restart, at most `trainer_max_restarts` times in a run. An exception
in a rank ends the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from telescope.config import TelescopeConfig
from telescope.errors import RankLost
from telescope.orchestrator.async_window import Staleness
from telescope.orchestrator.checkpoints import PROGRESS_SECONDS, Checkpointer, CheckpointFolder
from telescope.orchestrator.orchestrator import Orchestrator
from telescope.orchestrator.run_components import RunComponents, set_up_trainer
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.run_state import RunState, after_restart
from telescope.orchestrator.status import RunStatus
from telescope.record.alerts import REPORTED
from telescope.utils.text import pluralize

logger = logging.getLogger(__name__)


class TrainerRestarts:
    """Restarts of one run's trainer, counted."""

    def __init__(
        self,
        config: TelescopeConfig,
        components: RunComponents,
        folder: CheckpointFolder,
        directory: RunDirectory,
        status: RunStatus,
    ) -> None:
        self._config = config
        self._components = components
        self._folder = folder
        self._directory = directory
        self._status = status
        self._num_restarts = 0

    async def restart(self, lost: RankLost, orchestrator: Orchestrator, checkpointer: Checkpointer) -> RunState:
        """Replaces the ranks. Returns the state to continue from, whose weights are loaded.

        `orchestrator` and `checkpointer` are those of the loops that ended. Raises `lost`, with the field that would
        have continued the run, when no restart is left.
        """
        config, status = self._config, self._status
        if self._num_restarts >= config.trainer_max_restarts or not config.checkpoint_every:
            raise self._refusal(lost) from None
        self._num_restarts += 1
        logger.warning("%s", lost, extra=REPORTED)  # the alert follows when the ranks are back
        last_step = status.step
        status.phase = "restarting the trainer: a rank was lost"
        state = await self._with_progress(self._reload(orchestrator, checkpointer))
        kept = len(state.groups)
        news = (
            f"{str(lost).partition(' during:')[0]}; {pluralize(last_step - state.step, 'step')} lost, continuing after "
            f"step {state.step} with {pluralize(kept, 'finished group')} (restart {self._num_restarts} of "
            f"{config.trainer_max_restarts})"
        )
        status.report(news, "trainer", "warning", log=logger)
        status.history = [summary for summary in status.history if summary.step < state.step]
        status.step = status.version = state.step
        self._directory.begin_next_attempt(news)
        return state

    async def _reload(self, orchestrator: Orchestrator, checkpointer: Checkpointer) -> RunState:
        """Replaces the ranks and loads the newest checkpoint, or the first weights."""
        config, parts = self._config, self._components
        async with parts.trainer.queue:  # a server that comes back meanwhile waits for its weights
            await parts.trainer.replace()
            await checkpointer.ranks_replaced()
            checkpoint = self._folder.load(True) if self._folder.steps() else None
            await set_up_trainer(self._directory, parts.trainer, self._status, loopback=parts.loopback)
            if checkpoint is not None:
                await parts.trainer.load_checkpoint(checkpoint.step, checkpoint.path)
        await parts.weights.sync()
        return after_restart(
            checkpoint.state if checkpoint is not None else RunState(),
            orchestrator.run_state(),
            Staleness(config.max_off_policy_steps),
            synchronous=config.max_async_rollout == 0,
        )

    async def _with_progress(self, work: Coroutine[Any, Any, RunState]) -> RunState:
        """Awaits `work`, whose parts have deadlines, and resets the watchdog meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=PROGRESS_SECONDS))[0]:
                self._status.progressed()
            return task.result()
        finally:
            task.cancel()

    def _refusal(self, lost: RankLost) -> RankLost:
        """Returns the error that ends the run, with the fix."""
        config = self._config
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
