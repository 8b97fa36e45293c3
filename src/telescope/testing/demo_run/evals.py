"""Evals of the generated run: the same held-out problems at every version."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from telescope.config import TelescopeConfig
from telescope.evals.runner import EvalItem, EvalResult, PlannedEval, scores_of
from telescope.evals.statistics import estimate_difference, estimate_mean, metrics_over_items
from telescope.orchestrator import record_rows
from telescope.orchestrator.evaluation import eval_point
from telescope.rollout.sample import RolloutSettings
from telescope.rollout.trajectory import Trajectory
from telescope.testing.demo_run.steps import NUM_SERVERS
from telescope.testing.demo_run.tasks import problems

if TYPE_CHECKING:
    from telescope.testing.demo_run.writer import RunWriter

EVAL_EVERY = 30
EVALS = ("countdown", "algebra", "calculator_agent")
PASS_K = {"at_k": {"metrics": ["correct"], "k": [1, 2, 4]}, "pow_k": {"metrics": ["correct"], "k": [2, 4]}}
SECONDS = 6.0


def plans_of(config: TelescopeConfig) -> list[PlannedEval]:
    """Returns the evals of the run."""
    sampling = replace(RolloutSettings.from_config(config).sampling, temperature=0.6, top_p=0.95)
    return [
        PlannedEval(
            name, name, [EvalItem(index, problem.prompt) for index, problem in enumerate(problems("heldout")[name])],
            sampling, held_out=True, number=number, is_multi_turn=name == "calculator_agent", pass_k=PASS_K,
        )
        for number, name in enumerate(EVALS)
    ]  # fmt: skip


def write_evals(writer: RunWriter, version: int) -> None:
    """Writes and reports the evals of a policy version with their samples. They end at the writer's time."""
    start, end = writer.now - SECONDS, {"ended_at": writer.now}
    for plan in writer.plans:
        if version == writer.simulation.curves.story.skipped_eval:
            busy = "its servers serve rollouts"
            row = record_rows.eval_row(plan, version, start, status="skipped", error=busy)
            writer.recorder.write("evals", row | end)
            writer.status.report(f"eval {plan.name} at version {version} was skipped: {busy}", "eval", "warning")
            continue
        samples = [
            [_sample(writer, plan, version, item, number) for number in range(plan.num_completions)]
            for item in plan.items
        ]
        for item, of_item in zip(plan.items, samples, strict=True):
            for sample in of_item:
                for table, row in record_rows.rows_of_eval_sample(plan, version, item, sample):
                    writer.recorder.write(table, row)
        scores = [[scores_of(sample) or {} for sample in of_item] for of_item in samples]
        by_item = {
            item.prompt.sample_uid: sum(score["correct"] for score in of_item) / len(of_item)
            for item, of_item in zip(plan.items, scores, strict=True)
        }
        result = EvalResult(
            plan.name, version, num_items=len(plan.items), num_scored=plan.num_samples, seconds=SECONDS,
            temperature=plan.sampling.temperature, metrics=metrics_over_items(scores, plan.pass_k),
            held_out=plan.held_out, number=plan.number, num_completions=plan.num_completions, by_item=by_item,
            estimate=estimate_mean(list(by_item.values())),
        )  # fmt: skip
        results = writer.results.setdefault(plan.name, [])
        if results:
            result = replace(result, gain=estimate_difference(by_item, results[0].by_item))
        results.append(result)
        row = record_rows.eval_row(plan, version, start, result, servers=range(NUM_SERVERS))
        writer.recorder.write("evals", row | end)
        attributes = {"eval": plan.name, "accuracy": f"{result.accuracy:.4f}"}
        span = {"name": "eval", "component": "orchestrator", "step": version - 1, "attributes": attributes}
        writer.recorder.write("spans", {**span, "start": start, "end": writer.now})
        writer.status.report(f"{plan.name} at version {version}: accuracy {result.accuracy:.3f}", "eval")
        writer.status.evaluated(eval_point(result, plan.name))


def _sample(writer: RunWriter, plan: PlannedEval, version: int, item: EvalItem, number: int) -> Trajectory:
    # The same numbers at every version, so that an item flips because the policy changed.
    chosen = random.Random(f"{plan.name} {item.index} {number}")
    group_id = -1 - item.index - len(plan.items) * plan.number
    sample = writer.simulation.sample(
        chosen, problems("heldout")[plan.name][item.index], version, f"{plan.id_at(version)}-{item.index}-{number}",
        group_id, number,
    )  # fmt: skip
    wave, lane = divmod(item.index * plan.num_completions + number, 8 * NUM_SERVERS)
    sample.server_index, sample.slot = lane % NUM_SERVERS, lane // NUM_SERVERS
    sample.started_at = writer.now - SECONDS * (1 - wave / 8)
    seconds = SECONDS / 9 / len(sample.turns)
    for place, turn in enumerate(sample.turns):
        turn.started_at = sample.started_at + place * seconds
        turn.ended_at = turn.started_at + 0.9 * seconds
    sample.generated_at = sample.turns[-1].ended_at
    sample.finished_at = sample.generated_at + 0.01
    return sample
