"""Records finished steps, and trained and discarded groups.

Owns the rows that the loops write, the metrics of a step, and the counts of discarded work since the previous step.
Makes no decisions. Invariant: a group, its samples and its turns are written once, when their outcome is final.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from telescope.orchestrator import record_rows
from telescope.orchestrator.groups import Batch, Group
from telescope.orchestrator.prompt_sampler import SamplerPosition
from telescope.orchestrator.status import RunStatus, StepSummary
from telescope.orchestrator.step_metrics import DiscardCounts, batch_metrics
from telescope.orchestrator.step_stats import Numbers, step_stats_rows
from telescope.record.recorder import Recorder
from telescope.rollout.trajectory import Trajectory
from telescope.trainer.batch import StepResult

RUN_ENDED = "run_ended"  # reason of a cancelled group: the run ended before it was trained or discarded


@dataclass
class TrainedStep:
    """A training step whose weights are synced. Times in seconds; `step` is also the version from which it started.

    `seconds` is its whole duration, of which the trainer waited `waited` for the batch. `position` is the sampler
    position once its groups are trained.
    """

    step: int
    batch: Batch
    result: StepResult
    sync_metrics: dict[str, float]
    started_at: float
    seconds: float
    waited: float
    position: SamplerPosition


class StepRecorder:
    """Writes to the record and the run status. `all_tokens` includes untrained samples (`record_tokens`)."""

    def __init__(self, recorder: Recorder, status: RunStatus, *, all_tokens: bool = False) -> None:
        self._recorder = recorder
        self._all_tokens = all_tokens
        self._status = status
        self._discards = DiscardCounts()
        self._num_tokens_at_last_step = status.num_tokens_generated

    def count_retries(self, sample: Trajectory) -> None:
        """Counts the failed requests and lost conversations of a finished sample."""
        self._discards.count_retries(sample)

    def masked(self, sample: Trajectory) -> None:
        """Counts a masked sample. Its row is written with its group."""
        self._discards.masked(sample)
        self._status.num_masked_samples += 1

    def discarded(self, group: Group, reason: str, kind: str | None, version: int) -> None:
        """Counts and writes a group that will not be trained. `kind` refines the reason."""
        self._discards.discarded(reason, kind, group.samples)
        self._status.num_discarded_groups += 1
        self._write_group(group, version, status="discarded", reason=reason, step=version)

    def withdrawn(self, group: Group, reason: str, version: int) -> None:
        """Counts and writes the finished samples of a group whose prompt is requeued, so its outcome is still open."""
        self._discards.requeued(group.samples)
        self._discards.discarded(reason, None, group.samples)
        self._write_samples(group, version, status="discarded", reason=reason, step=version)

    def cancelled(self, group: Group, sample: Trajectory, reason: str, version: int) -> None:
        """Counts and writes an aborted sample of a withdrawn group."""
        self._discards.cancelled(sample, requeued=group.requeued)
        self._write_sample(group, sample, version, status="cancelled", reason=reason, step=version)

    def write_unfinished(self, group: Group, version: int) -> None:
        """Writes a group that is open or unused when the run ends. Samples of withdrawn groups are written already."""
        fate: dict[str, Any] = {"status": "cancelled", "reason": RUN_ENDED, "step": version}
        self._recorder.write("groups", record_rows.group_row(group, **fate))
        if not group.withdrawn:
            self._write_samples(group, version, **fate)
        for row in record_rows.in_flight_rows(group):
            self._recorder.write("samples", {**row, "prompt_key": self._write_prompt(group), **fate})

    async def trained(self, trained: TrainedStep) -> None:
        """Counts, writes and shows a finished step. Yields to the event loop after each group and environment."""
        generated = self._status.num_tokens_generated - self._num_tokens_at_last_step
        self._num_tokens_at_last_step += generated
        ended_at, discarded = time.time(), self._discards.numbers()
        metrics = self._metrics(trained, generated, [numbers["discarded/reward"] for _, numbers in discarded])
        await self._write_batch(trained, discarded)
        self._write_step(trained, metrics, generated, ended_at)

    def _metrics(self, trained: TrainedStep, generated: int, discarded_rewards: list[float]) -> dict[str, float]:
        """Computes the metrics of a step, and resets the counts."""
        seconds = max(trained.seconds, 1e-6)
        # Includes discarded groups, because the mean of trained groups excludes every prompt that is always or never
        # solved.
        batch = trained.batch
        rewards = np.concatenate([*(group.rewards_n for group in batch.groups), discarded_rewards])
        metrics = {
            **batch_metrics(batch.groups, batch.advantages.tolist(), version=trained.step),
            **self._discards.take(len(batch.groups)),
            "reward/all_groups/mean": float(rewards.mean()),
            **batch.packing,
            **trained.result.metrics,
            **trained.sync_metrics,
            "timing_waiting_for_data": trained.waited,
            "timing_step_total": seconds,
            "timing_step_active": seconds - trained.waited,
            "performance/generated_tokens_per_second": generated / seconds,
        }
        metrics["performance/trained_tokens_per_second"] = batch.num_trained_tokens / seconds
        metrics["performance/samples_per_second"] = metrics["kept/samples"] / seconds
        idle, self._status.engines_idle_seconds = self._status.engines_idle_seconds, None
        if idle is not None:
            metrics["timing_engines_idle"] = min(idle, seconds)
        return metrics

    async def _write_batch(self, trained: TrainedStep, discarded: Sequence[tuple[str, Numbers]]) -> None:
        """Writes the groups, distributions and trainer's records of a step."""
        batch, step, write = trained.batch, trained.step, self._recorder.write
        advantages, position = batch.advantages.tolist(), 0
        for group in batch.groups:
            end = position + len(group.usable_samples)
            self._write_group(group, step, advantages[position:end], status="kept", reason=None, step=step)
            position = end
            await asyncio.sleep(0)
        for tokens in trained.result.tokens:
            write("tokens", record_rows.tokens_row(tokens, step))
        for span in trained.result.spans:
            write("spans", record_rows.trainer_span_row(span, step))
        for rows in step_stats_rows(batch.groups, advantages, discarded, step=step):
            for row in rows:
                write("step_stats", row)
            await asyncio.sleep(0)

    def _write_step(self, trained: TrainedStep, metrics: dict[str, float], generated: int, ended_at: float) -> None:
        """Writes and shows a step, and reports what stands out."""
        seconds = metrics["timing_step_total"]
        self._recorder.write(
            "steps",
            {
                "step": trained.step,
                "version": trained.step + 1,
                "started_at": trained.started_at,
                "ended_at": ended_at,
                "reward_mean": metrics["reward/all_groups/mean"],
                "reward_trained": metrics["reward/total/mean"],
                "learning_rate": metrics.get("learning_rate"),
                "num_samples": int(metrics["kept/samples"]),
                "num_groups": len(trained.batch.groups),
                "num_tokens_trained": trained.batch.num_trained_tokens,
                "num_tokens_generated": generated,
                "next_draw": trained.position.next_draw,
                "unfinished_draws": list(trained.position.unfinished),
                "metrics": metrics,
            },
        )
        summary = StepSummary(
            trained.step, metrics["reward/all_groups/mean"], metrics["reward/total/mean"], seconds,
            staleness_mean=metrics.get("staleness/steps/mean", 0.0),
            tokens_per_second=metrics["performance/trained_tokens_per_second"],
            kl_inference=metrics.get("kl_divergence_inference", 0.0), grad_norm=metrics.get("grad_norm", 0.0),
            waited_share=trained.waited / seconds, phase=self._status.phase,
        )  # fmt: skip
        self._status.history.append(summary)
        self._status.trained(trained.step, metrics, seconds)
        self._status.step = trained.step + 1
        self._status.version = trained.step + 1
        self._status.progressed()

    def _write_group(self, group: Group, version: int, advantages: Sequence[float] = (), **outcome: Any) -> None:
        """Writes a group with its samples, turns and spans. Ages are relative to `version`."""
        self._recorder.write("groups", record_rows.group_row(group, **outcome))
        self._write_samples(group, version, advantages, **outcome)

    def _write_samples(self, group: Group, version: int, advantages: Sequence[float] = (), **outcome: Any) -> None:
        advantage_of: dict[str, float] = {}
        if advantages:
            advantage_of = {s.sample_id: a for s, a in zip(group.usable_samples, advantages, strict=True)}
        for sample in group.samples:
            self._write_sample(group, sample, version, advantage=advantage_of.get(sample.sample_id), **outcome)

    def _write_prompt(self, group: Group) -> str:
        """Writes the prompt of a group once. Returns its key."""
        if not group.prompt_key:
            row = record_rows.prompt_row(group.environment, group.prompt)
            self._recorder.write("prompts", row)
            group.prompt_key = row["prompt_key"]
        return group.prompt_key

    def _write_sample(self, group: Group, sample: Trajectory, version: int, **outcome: Any) -> None:
        write = self._recorder.write
        oldest = sample.totals.version_range[0]
        age = version - oldest if oldest >= 0 else None
        row = record_rows.sample_row(sample, self._write_prompt(group), age=age, **outcome)
        if not sample.totals.num_turns:
            row["prompt_tokens"] = row["total_tokens"] = len(group.prompt.token_ids)
        write("samples", row)
        status = row["status"]
        for table, rows in sample.rows.items():
            write(table, rows)
        if self._all_tokens and status != "kept":
            for row in record_rows.untrained_tokens_rows(sample, outcome["step"]):
                write("tokens", row)
