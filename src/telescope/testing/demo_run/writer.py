"""Writes generated steps as the record of a run, through the code that records real ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from telescope.config import TelescopeConfig
from telescope.config.yaml_file import dump_yaml
from telescope.environments.worker_pool.messages import EnvironmentInfo
from telescope.evals.runner import EvalResult
from telescope.orchestrator import record_rows
from telescope.orchestrator.groups import zero_advantage_kind
from telescope.orchestrator.prompt_sampler import SamplerPosition
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.step_recorder import StepRecorder, TrainedStep
from telescope.record.files import RunFiles, replace_file, replace_json
from telescope.record.recorder import Recorder
from telescope.record.run_info import attempt_row, begin_run, end_run
from telescope.testing.demo_run import telemetry
from telescope.testing.demo_run.curves import Curves, Story
from telescope.testing.demo_run.evals import EVAL_EVERY, EVALS, PASS_K, plans_of, write_evals
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
from telescope.testing.demo_run.tasks import ENVIRONMENTS, NUM_PROBLEMS, tokenizer_json

CHECKPOINT_EVERY = 50
CHECKPOINT_PAUSE = 0.38
MOST_PENDING_ROWS = 100_000

# Health warnings of the demo run are not warnings of this process.
logging.getLogger("telescope.orchestrator.status").addHandler(logging.NullHandler())


class StepLog:
    """Ignores the metrics that W&B would receive."""

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        """Does nothing."""


def run_now(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine that only yields."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration:
            return


class RunWriter:
    """Writes one run, a step after the other. Use it as a context manager; `end` first, unless the run remains live."""

    def __init__(
        self, run_dir: Path, story: Story, *, num_steps: int, num_groups: int = 4, seed: int = 0,
        origin: float | None = None,
    ) -> None:  # fmt: skip
        curves = Curves(story, seed)
        self.origin = time.time() - curves.start(num_steps) if origin is None else origin
        self.simulation = Simulation(curves, origin=self.origin, num_groups=num_groups)
        self.config = config_of(run_dir, story, num_steps, num_groups, seed)
        self.plans = plans_of(self.config)
        self.now = self.origin
        self.status = RunStatus(run_dir.name, num_steps, run_dir=str(run_dir), clock=lambda: self.now)
        self.recorder = Recorder(run_dir, max_pending_rows=MOST_PENDING_ROWS)
        self._steps = StepRecorder(self.recorder, StepLog(), self.status)
        self._rates: dict[str, float | None] = {}
        self.results: dict[str, list[EvalResult]] = {}
        """Results so far, by eval."""

    def __enter__(self) -> RunWriter:
        config, text = self.config, self.config.to_json()
        self.info = begin_run(
            self.recorder, name=self.status.run_name, config_hash=config.hash, config_json=text,
            project="telescope", tags=["demo"], num_steps=config.number_of_steps, first_step=0, started_at=self.origin,
            attempt=attempt_row(config.hash, ["This run is generated: no model was trained."])
            | {"started_at": self.origin, "topology": telemetry.TOPOLOGY, "host": telemetry.NODES[0],
               "versions": telemetry.VERSIONS},
        )  # fmt: skip
        replace_file(self.recorder.files.config, dump_yaml(config.values).encode())
        for task, weight in WEIGHTS.items():
            made = ENVIRONMENTS[task]
            described = EnvironmentInfo(
                task, NUM_PROBLEMS, made.is_multi_turn, reward_min=0.0, reward_max=1.0,
                metrics_ranges=made.metrics_ranges,
            )  # fmt: skip
            self.recorder.write("environments", record_rows.environment_row(task, task, weight, described))
        self.status.record_alerts(self._add_alert)
        for row in telemetry.start_logs(self.origin):
            self.recorder.write("logs", row)
        # All problems exist by now, and with them all tokens.
        files = RunFiles(self.recorder.files.run_dir)
        files.model.mkdir(parents=True, exist_ok=True)
        replace_file(files.model / "tokenizer.json", tokenizer_json().encode())
        self.status.phase = "starting the trainer and the inference servers"
        self.recorder.describe_now(lambda: {**self.status.now(), **self._rates})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.recorder.close()

    def _add_alert(self, row: dict[str, Any]) -> None:
        self.recorder.write("alerts", row)
        self.recorder.write("logs", telemetry.log_line(row["time"], row["message"], level=row["level"].upper()))

    def write_step(self, number: int) -> None:
        """Writes a step with all that belongs to it, and the evals before it."""
        made, status = self.simulation.step(number), self.status
        draw, down = self.simulation.curves.draw(number), self.simulation.curves.story.server_down
        self.now = made.start
        if number % EVAL_EVERY == 0:
            write_evals(self, number)
        if down and number == down[0]:
            reason = "its process was killed by SIGKILL: out of memory on the GPU. It is restarted"
            status.report(f"server 2 is down: {reason}", "server", "warning")
        if down and number == down[1]:
            status.report("server 2 is back with the current weights (restarted)", "server")
        self._write_untrained(made)
        self.now = made.end
        if number and number % CHECKPOINT_EVERY == 0:
            made.result.metrics["timing_checkpoint"] = CHECKPOINT_PAUSE
            made.spans.append({
                "name": "checkpoint", "component": "orchestrator", "step": number - 1,
                "start": made.start - CHECKPOINT_PAUSE, "end": made.start + 4.1,
                "attributes": {"paused_seconds": str(CHECKPOINT_PAUSE)},
            })  # fmt: skip
        status.engines_idle_seconds = (0.02 + 0.02 * draw.random()) * (made.end - made.start)
        rewards = [group.training_rewards_n for group in made.kept]
        trained = TrainedStep(
            number, made.kept, np.concatenate([(each - each.mean()) / (each.std(ddof=1) + 1e-6) for each in rewards]),
            packing={
                "packing/padding_share": 0.02 + 0.02 * draw.random(), "packing/dummy_share": 0.0,
                "packing/imbalance": 1.0 + 0.05 * draw.random(),
            },
            result=made.result, sync_metrics=made.sync_metrics, started_at=made.start, waited=made.waited,
            position=SamplerPosition(next_draw=(number + 1) * self.simulation.ids_per_step),
        )  # fmt: skip
        run_now(self._steps.trained(trained))
        requests = (row for group in made.groups for sample in group.samples for row in engine_spans(sample))
        for row in (*requests, *made.spans):
            self.recorder.write("spans", row)
        for row in telemetry.step_logs(made, draw):
            self.recorder.write("logs", row)
        self._make_room()

    def _write_untrained(self, made: Step) -> None:
        for group in made.groups:
            for sample in group.samples:
                self.status.num_tokens_generated += sample.num_completion_tokens
                if sample.failure_kind:
                    self._steps.masked(sample)
        for group in made.discarded:
            self._steps.discarded(group, "zero_advantage", zero_advantage_kind(group.rewards_n), made.number)
        for group in made.withdrawn:
            samples = group.samples
            group.samples = [sample for sample in samples if not sample.cancelled]
            self._steps.withdrawn(group, "max_async", made.number)
            group.samples = samples
            for sample in samples:
                if sample.cancelled:
                    self._steps.cancelled(group, sample, "max_async", made.number)

    def write_gauges(self, num_steps: int, interval: float) -> None:
        """Writes the gauges of the first steps, a reading every `interval` seconds."""
        curves, due = self.simulation.curves, self.origin
        for row in telemetry.given_gpus(due):
            self.recorder.write("gauges", row)
        for number in range(num_steps):
            while due < self.origin + curves.start(number + 1):
                for row in telemetry.gauges_at(curves, self.origin, due, number):
                    self.recorder.write("gauges", row)
                due += interval
            self._make_room()

    def _make_room(self) -> None:
        """Waits for the disk before the recorder would drop rows."""
        if self.recorder.health().pending_rows > MOST_PENDING_ROWS // 2:
            self.recorder.flush()

    def end(self, status: str = "finished", error: str | None = None) -> None:
        """Writes the end of the run, in the time of its steps."""
        if error is None:
            write_evals(self, self.status.step)
        else:
            self.status.report(error, "run", "error")
        heldout = [result.accuracy for result in self.results.get(EVALS[0], [])]
        summary = {"heldout_before": heldout[0], "heldout_after": heldout[-1]} if len(heldout) > 1 else {}
        replace_json(self.recorder.files.summary, {"status": status, "steps": self.status.step, **summary})
        text = self.config.to_json()
        self.info = end_run(self.recorder, self.info, status, config_json=text, error=error, ended_at=self.now)

    def write_in_flight(self, number: int, now: float) -> None:
        """Shows what the run does at a time within a step: its samples are those of its batch, or of the next one."""
        made, next_one = (self.simulation.step(one) for one in (number, number + 1))
        groups = [*made.groups, *next_one.groups]
        running = [
            (group, sample)
            for group in groups
            for sample in group.samples
            if sample.started_at <= now < sample.finished_at
        ]
        rows = [
            {
                "sample_id": sample.sample_id, "group_id": group.group_id, "sample_index": sample.sample_index,
                "environment": group.environment, "start_version": number, "started_at": sample.started_at,
                "prompt_tokens": len(group.prompt.token_ids), "server": sample.server_index, "lane": sample.slot,
            }
            for group, sample in running
        ]  # fmt: skip
        self.recorder.set_in_flight(rows)
        status, begins, seconds = self.status, made.start + made.waited, made.end - made.start
        status.phase, status.num_slots, status.num_generating = "training", NUM_SERVERS * GROUP_SIZE, len(running)
        status.num_open_groups = sum(group.opened_at <= now < (group.finished_at or now) for group in groups)
        batch = made.kept if now < begins else next_one.kept
        status.num_finished_groups = sum((group.finished_at or now) <= now for group in batch)
        tokens = sum(sample.num_completion_tokens for group in made.groups for sample in group.samples)
        left = max(0, status.num_steps - status.step)
        self._rates = {"tokens_per_second": tokens / seconds, "seconds_left": seconds * left}
        syncs = now >= made.end - SYNC_SECONDS
        doing = "waiting for a batch" if now < begins else f"training step {number}"
        status.set_component("trainer", "sending weights" if syncs else doing)
        for server in range(NUM_SERVERS):
            serves = "receiving weights" if syncs else "serving"
            down = self.simulation.curves.is_down(server, number)
            status.set_component(f"server {server}", "restarting (loading)" if down else serves)


def config_of(run_dir: Path, story: Story, num_steps: int, num_groups: int, seed: int) -> TelescopeConfig:
    """Returns the config that the run claims to have."""
    return TelescopeConfig.model_validate(
        {
            "model": "Qwen/Qwen3-1.7B", "run_dir": str(run_dir), "wandb_run_name": run_dir.name,
            "wandb_tags": ["demo"],
            "environments": [{"name": task, "weight": weight} for task, weight in WEIGHTS.items()],
            "evals": [
                {"name": name, "eval_every": EVAL_EVERY, "num_samples": NUM_PROBLEMS, "pass_k": PASS_K,
                 "temperature": 0.6}
                for name in EVALS
            ],
            "algorithm": "grpo", "learning_rate": story.learning_rate, "warmup_steps": 20, "seed": seed,
            "number_of_steps": num_steps, "group_size": GROUP_SIZE, "prompts_batch_size_for_trainer": num_groups,
            "max_async_rollout": 1, "discard_group_zero_advantage": True, "checkpoint_every": CHECKPOINT_EVERY,
            "inference_num_workers": NUM_SERVERS, "trainer_num_workers": NUM_RANKS, "max_tokens": 512,
            "use_wandb": False,
        }
    )  # fmt: skip
