"""Runs the loops of a training run. Everything here runs on one asyncio event loop and touches no tensor.

    _prompt_loop    fills the prompt buffer (`prompt_buffer`)         waits for: free space in the buffer
    _dispatch_loop  opens a group, gives it to a rollout worker       waits for: the async window, a prompt, a slot
    _sample_loop    takes ended samples, finishes groups              waits for: the rollout workers
    _batch_loop     takes finished groups, oldest first, and packs    waits for: B usable groups
    _train_loop     train step -> weight sync -> version += 1         waits for: a batch

Invariants: the async window alone decides whether a group may be opened; every opened prompt ends in `ledger` as
trained or as dropped with a reason; `version` counts the training steps whose weights the engines have loaded. A
failure in any loop ends the run. The orchestrator owns samples and groups. A rollout worker (`rollout.worker`) runs a
sample from its prompt to its reward, the trainer computes gradients, and the step recorder writes the record.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from telescope.config import TelescopeConfig
from telescope.environments.types import EnvironmentInfo, PreparedPrompt
from telescope.errors import RunError
from telescope.evals.runner import EvalResult
from telescope.orchestrator import record_rows
from telescope.orchestrator.async_window import MAX_ASYNC, MAX_REQUEUES, TOO_SLOW, Staleness, may_open
from telescope.orchestrator.budget import ErrorBudget
from telescope.orchestrator.filters import SampleFilters
from telescope.orchestrator.groups import Batch, DiscardStreak, Group, form_batch
from telescope.orchestrator.prompt_buffer import PromptBuffer
from telescope.orchestrator.prompt_sampler import PromptSampler, SampledPrompt, SamplerPosition
from telescope.orchestrator.run_state import RunState
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.step_recorder import StepRecorder, TrainedStep
from telescope.orchestrator.supervision import ChangeNotifier, Supervisor
from telescope.record.recorder import Recorder
from telescope.rollout.pool import Lane, RolloutPool
from telescope.rollout.sample import RolloutSettings, RolloutTask
from telescope.rollout.trajectory import Trajectory
from telescope.utils.process import rare_full_collections
from telescope.utils.text import pluralize

if TYPE_CHECKING:
    from telescope.cluster.trainer_group import TrainerGroup
    from telescope.orchestrator.weight_sync import WeightSync

logger = logging.getLogger(__name__)

IN_FLIGHT_SECONDS = 2.0  # interval at which the list of running samples is replaced; the record writes no more often
DISCARD_LIMIT_BATCHES = 10  # consecutive discards, in batches of groups, after which the run stops with a diagnosis


AfterStep = Callable[[int, Callable[[], RunState]], Awaitable[None]]


@dataclass(eq=False)
class Orchestrator:
    """One training run, from the first prompt to the last weight sync. It continues from `start`."""

    config: TelescopeConfig
    rollouts: RolloutPool
    environment_keys: list[str]
    """Key of each environment entry of the config."""
    infos: Sequence[EnvironmentInfo]
    """Description of each configured environment."""
    slots: Lane
    """Request slots of training rollouts."""
    trainer: TrainerGroup
    weights: WeightSync
    recorder: Recorder
    status: RunStatus
    filters: SampleFilters
    """Filters and penalties for scored samples."""
    settings: RolloutSettings
    sampler: InitVar[PromptSampler]
    held_out_uids: InitVar[frozenset[str]] = frozenset()
    start: InitVar[RunState | None] = None
    _: KW_ONLY
    after_step: AfterStep | None = None
    """Called after every step with the number of finished steps, for checkpoints. The next step waits for it."""
    eval_history: Callable[[], list[EvalResult]] = list
    """Returns results of evals, for checkpoints."""
    data: dict[str, Any] = field(default_factory=dict)
    """Sizes of the datasets, for the run's state."""
    max_requeues: int = MAX_REQUEUES
    """How often a stale prompt is requeued at most."""

    def __post_init__(self, sampler: PromptSampler, held_out_uids: frozenset[str], start: RunState | None) -> None:
        start = start or RunState()
        for group in start.groups:
            group.prompt_key = ""  # the attempt that recorded the prompt was an earlier one
        config, batch_size = self.config, self.config.prompts_batch_size_for_trainer
        self.version = start.step
        """Training steps whose weights the engines have loaded."""
        self.ledger = start.ledger
        self._notifier = ChangeNotifier(self.status)
        self.rollouts.on_change = self._notifier.notify
        self._budget = ErrorBudget(config.environment_error_budget, start.errors)
        self._prompts = PromptBuffer(
            config, self.rollouts, self.environment_keys, sampler, held_out_uids, start.sampler,
            max_context=self.settings.sampling.max_context, budget=self._budget, notifier=self._notifier,
            status=self.status,
        )  # fmt: skip
        self._ended: asyncio.Queue[tuple[Group, Trajectory | BaseException]] = asyncio.Queue()
        """Ended samples from the rollout workers, with their groups."""
        self._open: dict[int, Group] = {}
        self._finished: list[Group] = list(start.groups)
        self._unsettled: dict[int, Group] = {group.group_id: group for group in start.groups}
        """The newest group of every prompt that is neither trained nor dropped."""
        self._dropped: dict[int, str] = {}
        """Prompts dropped since the last step, with their reasons."""
        self._has_ended = False
        self._batch: Batch | None = None
        """A packed batch that waits for the trainer."""
        self._first_step = self._num_taken = start.step
        """Batches that the trainer has received; also the policy version that the next batch starts from."""
        self._staleness = Staleness(config.max_off_policy_steps)
        self._step_recorder = StepRecorder(self.recorder, self.status, all_tokens=config.record_tokens == "all")
        self._streak = DiscardStreak(DISCARD_LIMIT_BATCHES * batch_size)
        self._stop_requested = False

    def request_stop(self) -> None:
        """Ends the run after the current training step. Safe to call more than once."""
        self._stop_requested = True
        self._notifier.notify()

    def position(self) -> SamplerPosition:
        """Returns the sampler position. Every prompt that is neither trained nor dropped is unfinished."""
        return self._prompts.position(self.ledger.open)

    def run_state(self) -> RunState:
        """Returns the state after the last finished step, to continue from.

        Finished groups are kept, also while they are packed. Prompts in flight are unfinished, and so are prompts that
        were dropped since that step: the record counts them in the next step, which another attempt records again.
        """
        if self._has_ended:
            return self._last_state
        # Not `is_finished`: the last sample of a group may be the failure that ended the run.
        kept = [group for group in self._unsettled.values() if group.finished_at is not None and not group.withdrawn]
        kept_ids = {group.group_id for group in kept}
        return RunState(
            step=self.version,
            sampler=self._prompts.position((self.ledger.open - kept_ids) | self._dropped.keys()),
            ledger=self.ledger.reopening(kept_ids, self._dropped.values()),
            errors=self._budget.state_dict(),
            groups=kept,
            data=self.data,
            evals=self.eval_history(),
        )

    async def run(self, supervisor: Supervisor) -> None:
        """Trains `number_of_steps` steps, or until a stop is requested. Raises the first error of any loop."""
        self.status.progressed()
        supervisor.spawn(self._prompts.fill(), "_prompt_loop")
        for loop in (self._dispatch_loop, self._sample_loop, self._batch_loop, self._in_flight_loop):
            supervisor.spawn(loop(), loop.__name__)
        try:
            with rare_full_collections():
                await self._train_loop()
        finally:
            self._last_state = self.run_state()
            self._has_ended = True
            for group in self._unsettled.values():
                self._step_recorder.write_unfinished(group, self.version)
                if group.running is not None:
                    group.running.cancel()
            self._unsettled.clear()
            self.recorder.set_in_flight([])
        assert self.ledger.is_balanced(), f"the prompt ledger is not balanced: {self.ledger}"

    # Groups and samples

    async def _dispatch_loop(self) -> None:
        """Opens groups as the window and the request slots allow, and gives them to the rollout workers."""
        while True:
            await self._notifier.wait_until(self._may_open, "dispatch", "the async window")
            await self._notifier.wait_until(lambda: len(self._prompts) > 0, "dispatch", "a prompt")
            await self._notifier.wait_until(
                lambda: self.slots.has_free_slot(self._prompts.next_key), "dispatch", "a request slot"
            )
            if not self._may_open():
                continue
            sampled, prompt = self._prompts.take()
            group = self._open_group(sampled, prompt)
            self.status.components["dispatch"] = f"opened group {group.group_id}"
            tasks = [self._task(group, index) for index in range(group.size)]
            group.running = self.rollouts.start(tasks, self.settings, partial(self._on_sample, group))
            self._notifier.notify()

    def _on_sample(self, group: Group, _: int, sample: Trajectory | BaseException) -> None:
        self._ended.put_nowait((group, sample))

    async def _sample_loop(self) -> None:
        """Takes ended samples. Errors are raised here, not where reports are read, so that they end the run."""
        while True:
            group, sample = await self._ended.get()
            if self._has_ended:
                continue  # the sample was cancelled, and its group is recorded
            if isinstance(sample, BaseException):
                raise sample
            self._sample(group, sample)

    def _may_open(self) -> bool:
        if self._stop_requested or self._has_ended:
            return False
        # A group beyond the last step would never be trained.
        num_ahead = min(self.config.max_async_rollout, self.config.number_of_steps - self.version - 1)
        return may_open(self.ledger.num_groups, self.config.prompts_batch_size_for_trainer, num_ahead)

    def _open_group(self, sampled: SampledPrompt, prompt: PreparedPrompt) -> Group:
        self.ledger.opened(sampled.n)
        group = Group(
            sampled,
            self.environment_keys[sampled.environment],
            prompt,
            self.config.group_size,
            self.version,
            time.time(),
            num_requeues=self.ledger.requeues.get(sampled.n, 0),
        )
        self._open[sampled.n] = self._unsettled[sampled.n] = group
        self.status.num_open_groups = len(self._open)
        return group

    def _task(self, group: Group, index: int) -> RolloutTask:
        return RolloutTask(
            sample_id=group.sample_id(index),
            group_id=group.group_id,
            sample_index=index,
            environment=group.environment,
            environment_key=self.environment_keys[group.sampled_prompt.environment],
            item_index=group.sampled_prompt.index,
            prompt_token_ids=group.prompt.token_ids,
            seed=(self.config.seed, group.group_id, index),
        )

    def _sample(self, group: Group, trajectory: Trajectory) -> None:
        """Counts an ended sample and scores or masks it. The last sample finishes its group."""
        group.samples.append(trajectory)
        if group.is_finished:
            group.running = None
        self._step_recorder.count_retries(trajectory)
        if group.withdrawn:
            self.status.num_tokens_generated += trajectory.num_sampled_tokens
            reason = MAX_ASYNC if group.requeued else TOO_SLOW
            self._step_recorder.cancelled(group, trajectory, reason, self.version)
            return
        if trajectory.reward is None:
            assert trajectory.failure_kind is not None
            self._masked(group, trajectory)
        else:
            self._budget.succeeded("samples", group.environment)
            self._apply_filters(group, trajectory)
        self.status.generated(trajectory.num_sampled_tokens)
        self.status.progressed()
        if group.is_finished:
            self._finish_group(group)
        self._notifier.notify()

    def _apply_filters(self, group: Group, trajectory: Trajectory) -> None:
        """Sets the training reward or the filter of a scored sample."""
        info = self.infos[group.sampled_prompt.environment]
        low, high = (info.reward_min, info.reward_max) if self.config.normalize_rewards else (0.0, 1.0)
        assert low is not None and high is not None  # by `check_reward_ranges`
        self.filters.apply(trajectory, (low, high))
        if trajectory.filtered_by is not None:
            logger.info(
                "sample %s (%s) is filtered: %s", trajectory.sample_id, group.environment, trajectory.filtered_by
            )
            self._step_recorder.masked(trajectory)

    def _masked(self, group: Group, trajectory: Trajectory) -> None:
        kind, message = trajectory.failure_kind or "", trajectory.failure_message or ""
        logger.warning(
            "sample %s (%s) is masked after an %s failure: %s", trajectory.sample_id, group.environment, kind, message
        )
        self._step_recorder.masked(trajectory)
        self._streak.last_failure = message
        if kind == "environment":
            self._budget.failed("samples", group.environment, group.sampled_prompt.index, message)

    def _finish_group(self, group: Group) -> None:
        """Keeps a finished group, or discards it with a reason."""
        group.finished_at = time.time()
        del self._open[group.group_id]
        reason, kind = group.why_useless() or (None, None)
        if reason is None or (reason == "zero_advantage" and not self.config.discard_group_zero_advantage):
            self._streak.usable()
            self._finished.append(group)
        else:
            self._discard(group, reason, kind, group.training_rewards_n)
        self.status.num_open_groups = len(self._open)
        self.status.num_finished_groups = len(self._finished)

    def _discard(self, group: Group, reason: str, kind: str | None, rewards_n: np.ndarray) -> None:
        self.ledger.drop(group.group_id, reason)
        self._dropped[group.group_id] = reason
        del self._unsettled[group.group_id]
        self._streak.discarded(kind or reason, rewards_n)
        self._step_recorder.discarded(group, reason, kind, self.version)
        if self._streak.is_half_over:
            self.status.report(self._streak.diagnosis(self.version), "discards", "warning")
        if self._streak.is_over:
            raise RunError(self._streak.diagnosis(self.version))

    # Groups that became too old

    def _withdraw_stale_groups(self) -> None:
        """Withdraws groups that are too old and requeues their prompts, at every sync and when a batch is formed."""
        if self._has_ended:
            return
        if self._batch is not None and self._staleness.stale(self._batch.groups, self.version):
            # If the waiting batch has a stale group, it is dissolved and its other groups go into the next batch.
            self._finished += self._batch.groups
            self._batch = None
        for group in self._staleness.stale((*self._finished, *self._open.values()), self.version):
            self._withdraw(group)
        self._finished = [group for group in self._finished if not group.withdrawn]
        self.status.num_open_groups = len(self._open)
        self.status.num_finished_groups = len(self._finished)
        self._notifier.notify()

    def _withdraw(self, group: Group) -> None:
        """Withdraws a group, cancels its running samples, and requeues or drops its prompt."""
        version = self.version
        group.withdrawn = True
        group.finished_at = time.time()
        self._open.pop(group.group_id, None)
        if group.num_requeues < self.max_requeues:
            self.ledger.requeued(group.group_id)
            group.requeued = True
            self._prompts.requeue(group.sampled_prompt, group.prompt)
            self._step_recorder.withdrawn(group, MAX_ASYNC, version)
        else:
            self._discard(group, TOO_SLOW, None, group.rewards_n)
        if group.running is not None:
            group.running.cancel()

    async def _in_flight_loop(self) -> None:
        """Keeps the record's list of running samples up to date."""
        while True:
            rows: list[dict[str, Any]] = []
            for number, group in enumerate(list(self._open.values())):
                rows += record_rows.in_flight_rows(group)
                if number % 16 == 15:
                    await asyncio.sleep(0)  # thousands of rows would block the event loop for 100 ms
            self.recorder.set_in_flight(rows)
            # Samples that have a server, but no request of theirs runs. The counts are not of the same moment.
            num_in_environments = max(0, sum("server" in row for row in rows) - self.slots.num_used)
            doing = f"{pluralize(num_in_environments, 'sample')} in tools and rewards"
            self.status.components["environments"] = doing
            await asyncio.sleep(IN_FLIGHT_SECONDS)

    # Batches and steps

    async def _batch_loop(self) -> None:
        """Packs B finished groups for the trainer's ranks, oldest start version first."""
        size = self.config.prompts_batch_size_for_trainer
        while True:
            await self._notifier.wait_until(lambda: len(self._finished) >= size, "batches", f"{size} usable groups")
            # The trainer takes one batch at a time. A batch that is formed late has more groups to choose from.
            await self._notifier.wait_until(lambda: self._batch is None, "batches", "the trainer")
            self._withdraw_stale_groups()
            if len(self._finished) < size:
                continue
            self._finished.sort(key=lambda group: (group.start_version, group.group_id))
            groups, self._finished = self._finished[:size], self._finished[size:]
            self.status.num_finished_groups = len(self._finished)
            step = self._num_taken
            self.status.components["batches"] = f"packing batch {step}"
            self._batch = await asyncio.to_thread(
                form_batch, self.config, groups, step, num_ranks=self.trainer.data_size, packs=self.trainer.packs
            )
            self._withdraw_stale_groups()  # a sync may have ended meanwhile

    async def _train_loop(self) -> None:
        """Trains, syncs and counts until the last step."""
        for step in range(self._first_step, self.config.number_of_steps):
            started_at, began = time.time(), time.monotonic()
            await self._notifier.wait_until(
                lambda: self._stop_requested or self._batch is not None, "trainer", "a batch of usable groups"
            )
            if self._stop_requested or self._batch is None:
                return
            batch, self._batch = self._batch, None
            self._num_taken += 1
            self._notifier.notify()
            waited = time.monotonic() - began
            self.status.components["trainer"] = f"training step {step}"
            result = await self.trainer.train_step(batch.inputs)
            self.status.components["trainer"] = "sending weights"
            sync_metrics = await self.weights.sync()
            self.version += 1
            self._dropped.clear()
            for group in batch.groups:
                self.ledger.trained(group.group_id)
                del self._unsettled[group.group_id]
            seconds = time.monotonic() - began
            trained = TrainedStep(step, batch, result, sync_metrics, started_at, seconds, waited, self.position())
            await self._step_recorder.trained(trained)
            # After the step is counted: samples too old for the new weights count in the next step, as in the record.
            self._withdraw_stale_groups()
            if self.after_step is not None:
                await self.after_step(step + 1, self.run_state)
