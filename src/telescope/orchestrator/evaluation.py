"""Runs the evals of a run before, during and after training.

Owns the set of held-out items, the schedule and the recording of results. `evals.runner` plans evals, and samples by
the same path as training.

During training an eval runs in its own task, on servers that serve no rollouts. It leases them at one policy version
(`servers.EvalLease`), so training and weight syncs of the other servers continue. Evals that share servers start
together. An eval that is due while the last one is still running is skipped and reported. An eval that fails is
reported, and ends neither the others nor the run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from telescope.config import TelescopeConfig
from telescope.errors import DeadlineExceeded, EnvironmentFailure, InfrastructureError
from telescope.evals.runner import EvalItem, EvalResult, PlannedEval, SamplesFile, run_eval, scores_of
from telescope.evals.statistics import estimate_difference
from telescope.health.rules import EvalPoint
from telescope.orchestrator import record_rows
from telescope.orchestrator.servers import EvalLease, ServerPool
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.supervision import Supervisor
from telescope.record.reader import eval_names
from telescope.record.recorder import Recorder
from telescope.rollout.pool import RolloutPool
from telescope.rollout.sample import RolloutSettings
from telescope.rollout.trajectory import Trajectory
from telescope.utils.text import pluralize, single_line

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _EvalShare:
    """Evals that share dedicated servers, and the task that runs them."""

    plans: list[PlannedEval]
    servers: list[int]
    version: int = 0
    """Policy version of the newest evals."""
    task: asyncio.Task[Any] | None = None


@dataclass
class Evaluation:
    """The planned evals of a run and their results, newest last."""

    plans: list[PlannedEval]
    config: TelescopeConfig
    rollouts: RolloutPool
    servers: ServerPool
    settings: RolloutSettings
    recorder: Recorder
    status: RunStatus
    spawn: Callable[[Coroutine[Any, Any, Any], str], asyncio.Task[Any]]
    """Starts a task that ends with the run at the latest."""
    results: list[EvalResult] = field(default_factory=list)
    """Results so far, those of earlier attempts included. Only baselines, to which later gains refer, have items."""
    problems: list[str] = field(default_factory=list)
    """Sentences about evals that failed, were skipped, or exceed the error budget."""
    group_ids: itertools.count[int] = field(default_factory=itertools.count)
    samples: SamplesFile | None = None
    """Keeps finished samples, and contains those of an interrupted evaluation (`telescope eval`)."""
    recorded: frozenset[str] = frozenset()
    """Ids of evals that the record already has as finished."""

    def __post_init__(self) -> None:
        dedicated = sorted(self.servers.dedicated)
        num_shares = min(len(dedicated), len(self.plans))
        self._shares = [_EvalShare(self.plans[n::num_shares], dedicated[n::num_shares]) for n in range(num_shares)]
        self._named = eval_names(self.config.values)
        self._run_waits = True
        """Whether the run waits for the running evals, so that the live view shows their progress."""

    @property
    def held_out_uids(self) -> frozenset[str]:
        """Identities of items that are never trained on."""
        return frozenset(item.prompt.sample_uid for plan in self.plans if plan.held_out for item in plan.items)

    def points(self) -> list[EvalPoint]:
        """Returns the results for the health rules."""
        return [self._point(result) for result in self.results]

    # Before and after training

    async def run_all(self, version: int) -> list[EvalResult]:
        """Runs every eval with the trainer's current weights, which have this version. Returns the results.

        Uses all servers, or only the dedicated servers (`eval_start_end_use_all_servers: false`). Cancels evals that
        are still running.
        """
        await self.cancel(f"superseded by the one at version {version}")
        self._run_waits = True
        self.status.phase = "evaluating " + ", ".join(
            f"{plan.name} ({len(plan.items)} items at temperature {plan.sampling.temperature:g})" for plan in self.plans
        )
        self.status.eval_done, self.status.eval_total = 0, sum(plan.num_samples for plan in self.plans)
        use_all = self.config.eval_start_end_use_all_servers or not self.servers.dedicated
        chosen = range(len(self.servers.clients)) if use_all else sorted(self.servers.dedicated)
        try:
            return await self._run(self.plans, await self._lease(chosen, version, self.plans))
        finally:
            self.status.eval_total = 0

    async def finish(self) -> None:
        """Waits until no eval is running."""
        self._run_waits = True
        running = self._running()
        if running:
            self.status.phase = "waiting for running evals"
        await asyncio.gather(*running)

    async def continue_after(self, step: int) -> None:
        """Cancels and forgets evals of versions after `step`, whose weights are lost."""
        self.results = [result for result in self.results if result.version <= step]
        await self.cancel(f"training continues after step {step}", later_than=step)

    async def cancel(self, reason: str, *, later_than: int = -1) -> None:
        """Cancels the running evals whose version is later than `later_than`."""
        running = self._running(later_than)
        for task in running:
            task.cancel(reason)
        await asyncio.gather(*running, return_exceptions=True)

    def _running(self, later_than: int = -1) -> list[asyncio.Task[Any]]:
        tasks = [share.task for share in self._shares if share.task is not None and share.version > later_than]
        return [task for task in tasks if not task.done()]

    # During training

    async def start_due(self, step: int, done: frozenset[int] = frozenset()) -> None:
        """Starts the evals that are due after `step` finished steps.

        Leaves out evals whose number is in `done`. Call it between two training steps. Waits at most for a weight sync
        of servers that missed the last sync.
        """
        self._run_waits = False
        if step >= self.config.number_of_steps and self.config.eval_after_training:
            return
        for share in self._shares:
            due = [
                p for p in share.plans if step % self.config.evals[p.number].eval_every == 0 and p.number not in done
            ]
            servers = self.servers.dedicated.intersection(share.servers)
            if due and (share.task in self._running() or not servers):
                busy = "the last eval on its servers is still running" if servers else "its servers serve rollouts"
                for plan in due:
                    self._report(plan, step, time.time(), "skipped", busy)
            elif due:
                lease = await self._lease(servers, step, due)
                share.version = step
                share.task = self.spawn(self._run(due, lease), f"evals at version {step}")
                # Also if the task is cancelled before it begins.
                share.task.add_done_callback(lambda _, lease=lease: self.servers.release(lease))  # type: ignore[misc]

    async def _lease(self, servers: Iterable[int], version: int, plans: Sequence[PlannedEval]) -> EvalLease:
        return await self.servers.lease(servers, version, [(plan.environment_key, plan.num_samples) for plan in plans])

    # One eval

    async def _run(self, plans: Sequence[PlannedEval], lease: EvalLease) -> list[EvalResult]:
        """Runs evals concurrently on leased servers, then releases them. Returns the results of finished evals."""
        try:
            results = await asyncio.gather(*(self._run_one(plan, lease) for plan in plans))
        finally:
            self.servers.release(lease)
        return [result for result in results if result is not None]

    async def _run_one(self, plan: PlannedEval, lease: EvalLease) -> EvalResult | None:
        """Runs and records one eval. Reports a failure and returns None."""
        version, component = lease.version, f"eval {self._named(plan.name, plan.number)}"
        started_at, used, num_done = time.time(), set[int](), itertools.count(1)
        failures, prompt_keys = list[str](), dict[int, str]()
        self.status.components[component] = f"version {version}: 0/{plan.num_samples} samples"

        def on_sample(item: EvalItem, sample: Trajectory) -> None:
            self.status.components[component] = f"version {version}: {next(num_done)}/{plan.num_samples} samples"
            if self._run_waits:
                self.status.eval_done += 1
                self.status.generated(sample.totals.num_completion_tokens)
                self.status.progressed()
            used.update({sample.server_index} - {-1})
            failures.extend(filter(None, [sample.failure_message]))
            if item.index not in prompt_keys:
                prompt = record_rows.prompt_row(sample.environment, item.prompt)
                prompt_keys[item.index] = prompt["prompt_key"]
                self.recorder.write("prompts", prompt)
            tokens, key = self.config.record_tokens == "all", prompt_keys[item.index]
            for table, row in record_rows.rows_of_eval_sample(plan, version, item, sample, key, tokens=tokens):
                self.recorder.write(table, row)
            versions = sample.totals.version_range
            if versions not in ((version, version), (-1, -1)):
                raise InfrastructureError(f"tokens of versions {versions} in an eval of version {version}")
            if self.samples is not None and (scores := scores_of(sample)) is not None:
                self.samples.add(plan, item, sample, scores)

        try:
            result = await self._sample_and_score(plan, lease, on_sample)
        except asyncio.CancelledError as error:
            self._report(plan, version, started_at, "cancelled", str(error) or "the run ended", used)
            raise
        except Exception as error:  # training continues without this eval
            if not isinstance(error, EnvironmentFailure | InfrastructureError | DeadlineExceeded):
                logger.exception("eval %s at version %d failed", plan.name, version)
            self._report(plan, version, started_at, "failed", f"{type(error).__name__}: {error}", used)
            return None
        # Gains refer to the first result of the same eval.
        baseline = next((r for r in self.results if (r.number, r.name) == (result.number, result.name)), None)
        if baseline is not None and not result.by_item.keys().isdisjoint(baseline.by_item):
            result = dataclasses.replace(result, gain=estimate_difference(result.by_item, baseline.by_item))
        # Only baselines keep their items: a run of days has thousands of results.
        self.results.append(result if baseline is None else dataclasses.replace(result, by_item={}))
        self._record(plan, result, started_at, used)
        self.status.components[component] = f"version {version}: {result.label} {result.accuracy:.3f}{result.failures}"
        if result.num_failed > self.config.environment_error_budget * plan.num_samples:
            first = f"; first: {single_line(failures[0])}" if failures else ""
            self._note_problem(
                f"{component} at version {version}: {result.num_failed} of {plan.num_samples} samples failed and "
                f"count as wrong{first}"
            )
        return result

    async def _sample_and_score(
        self, plan: PlannedEval, lease: EvalLease, on_sample: Callable[[EvalItem, Trajectory], None]
    ) -> EvalResult:
        """Returns the result of one eval. Raises InfrastructureError if no server has the weights any more."""
        finished = self.samples.finished(plan) if self.samples is not None else {}
        self.status.eval_done += len(finished)
        supervisor = Supervisor()
        supervisor.spawn(lease.fail_when_lost(), "servers of the eval")
        return await supervisor.run_until(
            run_eval(
                plan,
                version=lease.version,
                rollouts=self.rollouts,
                lane=lease.slots.name,
                settings=self.settings,
                # Every version uses the same seeds, so that a changed result means a changed policy.
                seed=(self.config.seed, "eval", plan.number),
                group_ids=self.group_ids,
                on_sample=on_sample,
                finished=finished,
                taken=self.samples.taken if self.samples is not None else (),
            )
        )

    def _record(self, plan: PlannedEval, result: EvalResult, started_at: float, used: set[int]) -> None:
        """Writes a result to the record, the log and the live view."""
        version, label, estimate = result.version, self._named(plan.name, plan.number), result.estimate
        if plan.id_at(version) not in self.recorded:
            self.recorder.write("evals", record_rows.eval_row(plan, version, started_at, result, servers=used))
        self.recorder.write(
            "spans",
            {
                "name": "eval", "component": "orchestrator", "step": version - 1, "start": started_at,
                "end": time.time(), "attributes": {"eval": label, result.label: f"{result.accuracy:.4f}"},
            },
        )  # fmt: skip
        logger.info(
            "eval %s at version %d: %s %.4f (%d of %d scored, temperature %g, %.1f s)",
            label, version, result.label, result.accuracy, result.num_scored, plan.num_samples, result.temperature,
            result.seconds,
        )  # fmt: skip
        self.status.report(
            f"{label} at version {version}: {result.label} {result.accuracy:.3f}"
            + (f" ({estimate.low:.3f} to {estimate.high:.3f})" if estimate else "")
            + f" of {pluralize(result.num_items, 'item')}{result.failures}",
            "eval",
        )
        self.status.report_findings(self.status.health.after_eval(self._point(result)), version - 1)

    def _report(
        self, plan: PlannedEval, version: int, started_at: float, status: str, error: str, used: set[int] | None = None
    ) -> None:
        """Reports an eval without a result in the record, the log and the live view."""
        if not plan.session:  # a standalone evaluation can continue, and its finished samples are recorded
            row = record_rows.eval_row(plan, version, started_at, status=status, error=error, servers=used or ())
            self.recorder.write("evals", row)
        outcome = status if status == "failed" else f"was {status}"
        component = f"eval {self._named(plan.name, plan.number)}"
        if status != "skipped":
            self.status.components[component] = f"version {version}: {status}"
        self._note_problem(f"{component} at version {version} {outcome}: {single_line(error)}")

    def _note_problem(self, sentence: str) -> None:
        self.status.report(sentence, "eval", "warning", log=logger)
        self.problems.append(sentence)

    def _point(self, result: EvalResult) -> EvalPoint:
        low, high = (result.estimate.low, result.estimate.high) if result.estimate else (None, None)
        name, step = self._named(result.name, result.number), result.version - 1
        return EvalPoint(name, step, result.accuracy, low, high, result.metric)
