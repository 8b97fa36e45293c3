"""Writes generated steps as the record of a run, through the code that records real ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from telescope.config import TelescopeConfig
from telescope.config.yaml_file import dump_yaml
from telescope.environments.worker_pool.messages import EnvironmentInfo
from telescope.orchestrator import record_rows
from telescope.orchestrator.groups import Group
from telescope.orchestrator.prompt_sampler import SamplerPosition
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.step_recorder import StepRecorder, TrainedStep
from telescope.record.files import RunFiles, replace_file, replace_json
from telescope.record.log_files import process_of
from telescope.record.recorder import Recorder
from telescope.record.run_info import attempt_row, begin_run, end_run
from telescope.rollout.trajectory import Trajectory
from telescope.testing.demo_run import telemetry
from telescope.testing.demo_run.curves import Curves, Story
from telescope.testing.demo_run.evals import EVAL_EVERY, EVALS, NUM_ITEMS, PASS_K, write_eval_samples, write_evals
from telescope.testing.demo_run.steps import (
    GROUP_SIZE,
    NUM_RANKS,
    NUM_SERVERS,
    SYNC_SECONDS,
    WEIGHTS,
    Simulation,
    Step,
    engine_spans,
)
from telescope.testing.demo_run.tasks import LEVELS, NUM_PROBLEMS

CHECKPOINT_EVERY = 100
NUM_TOKENS_SAMPLES = 4
CHECKPOINT_PAUSE = 0.38
MOST_PENDING_ROWS = 100_000

LOGGER = logging.getLogger("telescope.orchestrator.status")
"""Logs what `RunStatus` reports."""


class StepLog:
    """Ignores the metrics that W&B would receive."""

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        """Does nothing."""


class StepsAlone(StepRecorder):
    """Writes steps and alerts. Groups, samples and distributions follow later."""

    async def _write_batch(self, trained: TrainedStep) -> None:
        self._discarded_numbers = []

    def _write_group(self, group: Group, version: int, advantages: Sequence[float] = (), **outcome: Any) -> None:
        """Does nothing."""

    def _write_samples(self, group: Group, version: int, advantages: Sequence[float] = (), **outcome: Any) -> None:
        """Does nothing."""

    def _write_sample(self, group: Group, sample: Trajectory, version: int, **outcome: Any) -> None:
        """Does nothing."""


class SamplesAlone(StepRecorder):
    """Writes what `StepsAlone` leaves out, in any order of steps."""

    def _write_step(self, trained: TrainedStep, metrics: dict[str, float], generated: int, ended_at: float) -> None:
        """Does nothing."""


def run_now(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine that only yields."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration:
            return


class RunWriter:
    """Writes one run. Use it as a context manager; `end` first, unless the run remains live.

    `write_step` goes forward through the steps. `write_samples` can follow in any order.
    """

    def __init__(
        self, run_dir: Path, story: Story, *, num_steps: int, num_groups: int = 4, seed: int = 0,
        origin: float | None = None,
    ) -> None:  # fmt: skip
        curves = Curves(story, seed)
        self.origin = time.time() - curves.start(num_steps) if origin is None else origin
        self.simulation = Simulation(curves, origin=self.origin, num_groups=num_groups)
        self.config = config_of(run_dir, story, num_steps, num_groups, seed)
        self.now = self.origin
        self.status = RunStatus(run_dir.name, num_steps, run_dir=str(run_dir), clock=lambda: self.now)
        self.recorder = Recorder(run_dir, max_pending_rows=MOST_PENDING_ROWS)
        self._summary = StepsAlone(self.recorder, StepLog(), self.status)
        self._samples = SamplesAlone(self.recorder, StepLog(), RunStatus(run_dir.name, num_steps))
        self._handler = _LogHandler(self)
        self._rates: dict[str, float | None] = {}
        self.accuracies: dict[str, list[float]] = {}
        """Results so far, by eval."""
        self.baselines: dict[str, dict[str, float]] = {}
        """First accuracy of each item, by eval."""

    def __enter__(self) -> RunWriter:
        config, text = self.config, self.config.to_json()
        self.info = begin_run(
            self.recorder, name=self.status.run_name, config_hash=config.hash, config_json=text,
            project="telescope", tags=["demo"], num_steps=config.number_of_steps, first_step=0, started_at=self.origin,
            attempt=attempt_row(config.hash, ["This run is generated: no model was trained."])
            | {"started_at": self.origin, "topology": telemetry.TOPOLOGY, "host": telemetry.NODES[0],
               "versions": telemetry.VERSIONS},
        )  # fmt: skip
        self.simulation.vocabulary.write(RunFiles(self.recorder.files.run_dir).model)
        replace_file(self.recorder.files.config, dump_yaml(config.values).encode())
        for task, weight in WEIGHTS.items():
            levels = [str(level) for level, _ in LEVELS[task]]
            metrics = {name: {"min": 0.0, "max": 1.0} for name in ("correct", "format")}
            described = EnvironmentInfo(
                task, NUM_PROBLEMS, task == "calculator_agent", 0.0, 1.0, metrics, {"level": levels}
            )
            self.recorder.write("environments", record_rows.environment_row(task, task, weight, described))
        self.status.record_alerts(partial(self.recorder.write, "alerts"))
        for row in telemetry.start_logs(self.origin):
            self.recorder.write("logs", row)
        self.status.phase = "starting the trainer and the inference servers"
        self.recorder.describe_now(lambda: {**self.status.now(), **self._rates})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.recorder.close()

    def write_step(self, number: int) -> None:
        """Writes a step with its metrics, alerts and log lines, and the evals before it."""
        made = self.simulation.step(number, num_tokens_samples=0)
        self.now = made.start
        with self._logs():
            if number % EVAL_EVERY == 0:
                write_evals(self, number)
            self._report_events(number)
        self._count(self._summary, made)
        self.now = made.end
        draw = self.simulation.curves.draw(number)
        if number and number % CHECKPOINT_EVERY == 0:
            made.result.metrics["timing_checkpoint"] = CHECKPOINT_PAUSE
        self.status.engines_idle_seconds = (0.02 + 0.02 * draw.random()) * (made.end - made.start)
        with self._logs():
            run_now(self._summary.trained(self._trained(made)))
        for row in sorted(telemetry.step_logs(made, draw), key=lambda row: row["time"]):
            self.recorder.write("logs", row)
        self._make_room()

    def write_samples(self, number: int) -> None:
        """Writes samples, distributions and spans of a step, and evals before it."""
        made = self.simulation.step(number, num_tokens_samples=NUM_TOKENS_SAMPLES)
        if number % EVAL_EVERY == 0:
            write_eval_samples(self, number, made.start)
        self._count(self._samples, made)
        run_now(self._samples.trained(self._trained(made)))
        requests = (row for group in made.groups for sample in group.samples for row in engine_spans(sample))
        for row in (*requests, *made.spans):
            self.recorder.write("spans", row)
        if number and number % CHECKPOINT_EVERY == 0:
            about = {"name": "checkpoint", "component": "orchestrator", "step": number - 1}
            times = {"start": made.start - CHECKPOINT_PAUSE, "end": made.start + 4.1}
            self.recorder.write("spans", {**about, **times, "attributes": {"paused_seconds": str(CHECKPOINT_PAUSE)}})
        self._make_room()

    def write_gauges(self, num_steps: int, interval: float) -> Iterator[None]:
        """Writes the gauges of the first steps, a reading every `interval` seconds. Yields after each."""
        curves, due = self.simulation.curves, self.origin
        for row in telemetry.given_gpus(due):
            self.recorder.write("gauges", row)
        gauges = telemetry.Gauges(curves, due)
        for number in range(num_steps):
            while due < self.origin + curves.start(number + 1):
                for row in gauges.at(due, number):
                    self.recorder.write("gauges", row)
                due += interval
                yield
            self._make_room()

    @contextmanager
    def _logs(self) -> Iterator[None]:
        """Writes what is logged inside as rows of `logs` alone."""
        LOGGER.addHandler(self._handler)
        LOGGER.propagate = False
        try:
            yield
        finally:
            LOGGER.removeHandler(self._handler)
            LOGGER.propagate = True

    def _trained(self, made: Step) -> TrainedStep:
        draw = self.simulation.curves.draw(made.number)
        packing = {
            "packing/padding_share": 0.02 + 0.02 * draw.random(), "packing/dummy_share": 0.0,
            "packing/imbalance": 1.0 + 0.05 * draw.random(),
        }  # fmt: skip
        position = SamplerPosition(next_draw=(made.number + 1) * self.simulation.ids_per_step)
        rewards = [group.training_rewards_n for group in made.kept]
        advantages = np.concatenate([(each - each.mean()) / (each.std(ddof=1) + 1e-6) for each in rewards])
        return TrainedStep(
            made.number, made.kept, advantages, packing, made.result, made.sync_metrics, made.start, made.waited,
            position,
        )  # fmt: skip

    def _make_room(self) -> None:
        """Waits for the disk before the recorder would drop rows."""
        if self.recorder.health().pending_rows > MOST_PENDING_ROWS // 2:
            self.recorder.flush()

    def end(self, status: str = "finished", error: str | None = None) -> None:
        """Writes the end of the run, in the time of its steps."""
        with self._logs():
            if error is None:
                write_evals(self, self.status.step)
            else:
                self.status.report(error, "run", "error")
        heldout = self.accuracies.get(EVALS[0], [])
        summary = {"heldout_before": heldout[0], "heldout_after": heldout[-1]} if len(heldout) > 1 else {}
        replace_json(self.recorder.files.summary, {"status": status, "steps": self.status.step, **summary})
        text = self.config.to_json()
        self.info = end_run(self.recorder, self.info, status, config_json=text, error=error, ended_at=self.now)

    def write_in_flight(self, number: int, now: float) -> None:
        """Shows what the run does at a time within a step: its samples are those of its batch, or of the next one."""
        steps = [self.simulation.step(one, num_tokens_samples=0) for one in (number, number + 1)]
        self._describe(steps, now)
        rows = [
            {
                "sample_id": sample.sample_id, "group_id": group.group_id, "sample_index": sample.sample_index,
                "environment": group.environment, "start_version": number, "started_at": sample.started_at,
                "prompt_tokens": len(group.prompt.token_ids), "server": sample.server_index, "lane": sample.slot,
            }
            for step in steps
            for group in step.groups
            for sample in group.samples
            if sample.started_at <= now < sample.finished_at
        ]  # fmt: skip
        self.recorder.set_in_flight(rows)

    def _describe(self, steps: Sequence[Step], now: float) -> None:
        """Sets what the page shows as the present of the run."""
        made, status = steps[0], self.status
        groups = [group for step in steps for group in step.groups]
        samples = [sample for group in groups for sample in group.samples]
        status.phase, status.num_slots = "training", NUM_SERVERS * GROUP_SIZE
        status.num_generating = sum(sample.started_at <= now < sample.finished_at for sample in samples)
        status.num_open_groups = sum(group.opened_at <= now < (group.finished_at or now) for group in groups)
        begins = made.start + made.waited
        next_batch = made if now < begins else steps[1]
        status.num_finished_groups = sum((group.finished_at or now) <= now for group in next_batch.kept)
        seconds = made.end - made.start
        tokens = sum(sample.num_completion_tokens for group in made.groups for sample in group.samples)
        self._rates = {
            "tokens_per_second": tokens / seconds,
            "seconds_left": seconds * max(0, status.num_steps - status.step),
        }
        syncs = now >= made.end - SYNC_SECONDS
        doing = "waiting for a batch" if now < begins else f"training step {made.number}"
        status.set_component("trainer", "sending weights" if syncs else doing)
        for server in range(NUM_SERVERS):
            down = self.simulation.curves.is_down(server, made.number)
            works = "receiving weights" if syncs else "serving"
            status.set_component(f"server {server}", "restarting (loading)" if down else works)

    def _count(self, steps: StepRecorder, made: Step) -> None:
        """Counts and writes what is not trained."""
        for group in made.groups:
            for sample in group.samples:
                self.status.num_tokens_generated += sample.num_completion_tokens
                if sample.failure_kind:
                    steps.masked(sample)
        for group, kind in made.discarded:
            steps.discarded(group, "zero_advantage", kind, made.number)
        for group in made.withdrawn:
            cancelled = [sample for sample in group.samples if sample.cancelled]
            group.samples = [sample for sample in group.samples if not sample.cancelled]
            steps.withdrawn(group, "max_async", made.number)
            for sample in cancelled:
                steps.cancelled(group, sample, "max_async", made.number)
            group.samples += cancelled

    def _report_events(self, number: int) -> None:
        """Reports what the story has for a step besides its numbers."""
        down = self.simulation.curves.story.server_down
        if down and number == down[0]:
            reason = "its process was killed by SIGKILL: out of memory on the GPU. It is restarted"
            self.status.report(f"server 2 is down: {reason}", "server", "warning", log=LOGGER)
        if down and number == down[1]:
            self.status.report("server 2 is back with the current weights (restarted)", "server")


class _LogHandler(logging.Handler):
    """Writes log records as rows, at the time of the run."""

    def __init__(self, writer: RunWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        place = f"{record.name}:{record.lineno}"
        row = {"time": self._writer.now, "level": record.levelname, "message": record.getMessage(), "place": place}
        self._writer.recorder.write("logs", {**row, "process": 4000, **process_of("driver.log")})


def config_of(run_dir: Path, story: Story, num_steps: int, num_groups: int, seed: int) -> TelescopeConfig:
    """Returns the config that the run claims to have."""
    return TelescopeConfig.model_validate(
        {
            "model": "Qwen/Qwen3-1.7B", "run_dir": str(run_dir), "wandb_run_name": run_dir.name,
            "wandb_tags": ["demo"],
            "environments": [{"name": task, "weight": weight} for task, weight in WEIGHTS.items()],
            "evals": [
                {"name": name, "eval_every": EVAL_EVERY, "num_samples": NUM_ITEMS, "pass_k": PASS_K, "temperature": 0.6}
                for name in EVALS
            ],
            "algorithm": "grpo", "learning_rate": story.learning_rate, "warmup_steps": 20, "seed": seed,
            "number_of_steps": num_steps, "group_size": GROUP_SIZE, "prompts_batch_size_for_trainer": num_groups,
            "max_async_rollout": 1, "discard_group_zero_advantage": True, "checkpoint_every": CHECKPOINT_EVERY,
            "inference_num_workers": NUM_SERVERS, "trainer_num_workers": NUM_RANKS, "max_tokens": 512,
            "use_wandb": False,
        }
    )  # fmt: skip
