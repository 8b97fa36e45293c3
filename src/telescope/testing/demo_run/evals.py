"""Evals of the generated run: the same held-out problems at every version."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from telescope.evals.statistics import estimate_difference, estimate_mean, metrics_over_items
from telescope.health.rules import EvalPoint
from telescope.orchestrator import record_rows
from telescope.rollout.trajectory import Trajectory
from telescope.testing.demo_run.steps import NUM_SERVERS, Simulation
from telescope.testing.demo_run.tasks import Problem

if TYPE_CHECKING:
    from telescope.testing.demo_run.writer import RunWriter

EVAL_EVERY = 50
EVALS = ("countdown", "algebra", "calculator_agent")
NUM_ITEMS = 60
NUM_COMPLETIONS = 4
PASS_K = {"at_k": {"metrics": ["correct"], "k": [1, 2, 4]}, "pow_k": {"metrics": ["correct"], "k": [2, 4]}}
SECONDS = 6.0


def write_evals(writer: RunWriter, version: int) -> None:
    """Writes and reports the evals of a policy version. They end at the writer's time."""
    for number, name in enumerate(EVALS):
        eval_id = id_of(name, version)
        common: dict[str, Any] = {
            "eval_id": eval_id, "name": name, "number": number, "source": "live", "step": version - 1,
            "version": version, "num_items": NUM_ITEMS, "num_completions": NUM_COMPLETIONS, "temperature": 0.6,
            "top_p": 0.95, "max_tokens": 512, "held_out": True, "servers": list(range(NUM_SERVERS)),
            "started_at": writer.now - SECONDS, "ended_at": writer.now,
        }  # fmt: skip
        if version == writer.simulation.curves.story.skipped_eval:
            busy = "its servers serve rollouts"
            writer.recorder.write("evals", {**common, "status": "skipped", "error": busy})
            writer.status.report(f"eval {name} at version {version} was skipped: {busy}", "eval", "warning")
            continue
        items = _items(writer.simulation, name, version)
        metrics = metrics_over_items([[_metrics(sample) for sample in samples] for samples in items], PASS_K)
        by_item = {
            str(i): sum(_metrics(s)["correct"] for s in samples) / len(samples) for i, samples in enumerate(items)
        }
        estimate, baseline = estimate_mean(list(by_item.values())), writer.baselines.setdefault(name, by_item)
        row = {
            **common, "status": "finished", "num_scored": NUM_ITEMS * NUM_COMPLETIONS, "metric": "correct",
            "accuracy": estimate.mean, "accuracy_low": estimate.low, "accuracy_high": estimate.high, "metrics": metrics,
        }  # fmt: skip
        if baseline is not by_item:
            gain = estimate_difference(by_item, baseline)
            row |= {"gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high}
        writer.recorder.write("evals", row)
        attributes = {"eval": name, "accuracy": f"{estimate.mean:.4f}"}
        span = {"name": "eval", "component": "orchestrator", "step": version - 1, "attributes": attributes}
        writer.recorder.write("spans", {**span, "start": writer.now - SECONDS, "end": writer.now})
        writer.accuracies.setdefault(name, []).append(estimate.mean)
        interval = f"({estimate.low:.3f} to {estimate.high:.3f})"
        writer.status.report(f"{name} at version {version}: accuracy {estimate.mean:.3f} {interval}", "eval")
        writer.status.evaluated(EvalPoint(name, version - 1, estimate.mean, estimate.low, estimate.high))


def write_eval_samples(writer: RunWriter, version: int, end: float) -> None:
    """Writes the samples of the evals that ended at `end`."""
    for name in EVALS:
        if version == writer.simulation.curves.story.skipped_eval:
            continue
        eval_id = id_of(name, version)
        for index, samples in enumerate(_items(writer.simulation, name, version)):
            problem = writer.simulation.held_out[name][index]
            for sample in samples:
                _place(sample, index, end)
                for table, row in record_rows.detail_rows(sample):
                    writer.recorder.write(table, row)
                fate: dict[str, Any] = {"status": "eval", "reason": None, "step": version - 1, "eval_name": name}
                writer.recorder.write("samples", record_rows.sample_row(sample, problem.prompt, **fate))
                link = {"eval_id": eval_id, "sample_id": sample.sample_id, "step": version - 1, "item": index}
                uid = {"completion": sample.sample_index, "sample_uid": f"{name}-{index}"}
                writer.recorder.write("eval_samples", {**link, **uid})


def id_of(name: str, version: int) -> str:
    """Returns the id of an eval."""
    return f"eval{EVALS.index(name)}-{name}-v{version}"


def _items(simulation: Simulation, name: str, version: int) -> list[list[Trajectory]]:
    """Returns the completions of each item."""
    return [
        [_sample(simulation, problem, version, index, at) for at in range(NUM_COMPLETIONS)]
        for index, problem in enumerate(simulation.held_out[name][:NUM_ITEMS])
    ]


def _sample(simulation: Simulation, problem: Problem, version: int, index: int, at: int) -> Trajectory:
    # The same numbers at every version, so that an item flips because the policy changed.
    chosen = random.Random(f"{problem.task} {index} {at}")
    group_id = -1 - index - NUM_ITEMS * EVALS.index(problem.task)
    sample_id = f"{id_of(problem.task, version)}-{index}-{at}"
    return simulation.sample(chosen, problem, version, sample_id, group_id, at, can_fail=False)


def _place(sample: Trajectory, index: int, end: float) -> None:
    lane = index * NUM_COMPLETIONS + sample.sample_index
    sample.server_index, sample.slot = lane % NUM_SERVERS, (lane // NUM_SERVERS) % 8
    sample.started_at = end - SECONDS + (lane // 32) * SECONDS / 8
    seconds = SECONDS / 9 / len(sample.turns)
    for number, turn in enumerate(sample.turns):
        turn.started_at = sample.started_at + number * seconds
        turn.ended_at = turn.started_at + 0.9 * seconds
    sample.generated_at = sample.turns[-1].ended_at
    sample.finished_at = sample.generated_at + 0.01


def _metrics(sample: Trajectory) -> dict[str, float]:
    assert sample.reward is not None
    return sample.reward.sample_metrics
