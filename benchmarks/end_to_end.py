"""Measures a whole run under load: idle engines, waiting trainer, wasted tokens.

    python benchmarks/end_to_end.py --quick                                   the tiny model on the CPU, two minutes
    python benchmarks/end_to_end.py --json benchmarks/results/end_to_end.json      the README's example on four GPUs

Runs `telescope train` on the README's example, with a model of the same shape and random weights, an environment with
random rewards, and answers of log-normal length (mean 1,000 tokens, p99 3,500, cut at 7,936). All numbers come from the
run's record and the engines' step meters.

The measured steps come after --warm-up (the request slots fill) and before the last `max_async_rollout` + 1, in which a
run opens fewer groups and then none, because no step is left for them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from typing import Any

from command_line import fields_of, parser_of, positive, require_gpus, show
from whole_run import Case, WholeRun, add_case_arguments

from telescope.utils.text import pluralize

AIM_IDLE, AIM_THROWN_AWAY = 0.03, 0.02

EPILOG = """\
rows
  engine idle       share of wall time in which no step of the engine was scheduled, pauses for weights included
  idle in pauses    share of wall time between the pause and the resume of weight syncs, mean over servers; the step
                    running when the pause is requested still counts as busy, so it can exceed the row above
  running, mean     requests in the engine's batch
  trainer waiting   share of wall time in which the trainer had no batch
  pause, stall      of a weight sync: the engine's pause (slowest server), and the delay of the trainer's next step,
                    sending included; medians
  discarded         tokens that were not trained (too old, no signal, masked, from a failed server), of all with a
                    known fate; those in flight at the end of the run are separate"""


def main() -> int:
    arguments = parse()
    case = Case.of(arguments)
    ahead = case.fields.get("max_async_rollout", 2)
    case.fields["number_of_steps"] = arguments.warm_up + arguments.steps + ahead + 1
    with case.prepared("end-to-end") as run:
        with run:
            steps = run.wait(arguments.timeout)
        results = results_of(run, arguments.warm_up, min(arguments.steps, steps - arguments.warm_up))
    print_results(results)
    case.report(results=results)
    return 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "the tiny model on the CPU", EPILOG)
    add_case_arguments(parser, port=8850)
    add = parser.add_argument
    add("--steps", type=positive, help="measured training steps (default: 30, with --quick 6)")
    add("--timeout", type=float, default=1800.0, help="seconds after which it is stopped; the steps so far count")
    arguments = parser.parse_args()
    require_gpus(parser, quick=arguments.quick)
    if "number_of_steps" in fields_of(arguments.set):
        parser.error("--set number_of_steps: it follows from --steps and --warm-up, use these")
    arguments.steps = arguments.steps or (6 if arguments.quick else 30)
    return arguments


def results_of(run: WholeRun, warm_up: int, num_steps: int) -> dict[str, Any]:
    """Returns the numbers of the measured steps, from the record and the meters."""
    steps = run.steps()
    if num_steps <= 0:
        raise RuntimeError(
            f"only {pluralize(len(steps), 'step')} ended, of which {warm_up} do not count: raise --timeout"
        )
    measured = steps[warm_up : warm_up + num_steps]
    start, end = steps[warm_up - 1]["ended_at"] if warm_up else steps[0]["started_at"], measured[-1]["ended_at"]
    seconds = end - start

    def median(name: str) -> float:
        return statistics.median(step["metrics"][name] for step in measured)

    return {
        "steps": num_steps,
        "seconds": seconds,
        "engine_idle": statistics.mean(meter.idle_share(start, end) for meter in run.meters),
        "engine_idle_by_server": [meter.idle_share(start, end) for meter in run.meters],
        "idle_in_pauses": paused_share(measured, len(run.meters), seconds),
        "running_mean": [
            statistics.mean(r.running for at, r in zip(m.times, m.readings, strict=True) if start <= at < end)
            for m in run.meters
        ],
        "engine_tokens_per_second": sum(meter.tokens_per_second(start, end) for meter in run.meters),
        "trained_tokens_per_second": sum(step["num_tokens_trained"] for step in measured) / seconds,
        "tokens_per_sample": sum(s["num_tokens_trained"] for s in measured) / sum(s["num_samples"] for s in measured),
        "steps_per_hour": 3600 * num_steps / seconds,
        "step_seconds": statistics.median(step["metrics"]["timing_step_total"] for step in measured),
        "trainer_waiting": sum(step["metrics"]["timing_waiting_for_data"] for step in measured) / seconds,
        "pause_seconds": median("timing_weight_sync_inference_total"),
        "sending_seconds": median("timing_weight_sync_trainer_total"),
        "stall_seconds": median("timing_weight_sync_total"),
        **thrown_away(run, steps),
        "step_times": [[step["started_at"], step["ended_at"], step["metrics"]] for step in steps],
    }


def paused_share(steps: list[dict[str, Any]], num_servers: int, seconds: float) -> float:
    """Returns the share of `seconds` in pauses for weight syncs, mean over servers.

    From the metrics of the steps: the trainer's ranks also have spans named `weight_sync`, which take as long as the
    whole transfer.
    """
    paused = sum(
        value
        for step in steps
        for name, value in step["metrics"].items()
        if name.startswith("weight_sync/pause_seconds/server_")
    )
    return paused / num_servers / seconds


def thrown_away(run: WholeRun, steps: list[dict[str, Any]], first_step: int = 0) -> dict[str, Any]:
    """Counts tokens by fate over the whole run, or from a step."""
    tokens: Counter[str] = Counter()
    for fate in ("retried", "lost"):  # these tokens belong to no sample row
        tokens[fate] = int(
            sum(step["metrics"].get(f"{fate}/tokens", 0.0) for step in steps if step["step"] >= first_step)
        )
    columns = ["step", "status", "reason", "completion_tokens"]
    for row in run.record.table("samples", columns=columns).to_pylist():
        if row["step"] is not None and row["step"] < first_step:
            continue
        fate = row["status"] if row["reason"] is None else f"{row['status']}/{row['reason']}"
        tokens[fate] += row["completion_tokens"] or 0
    at_end = sum(count for fate, count in tokens.items() if fate.endswith("/run_ended"))
    known = sum(tokens.values()) - at_end
    return {
        "thrown_away": (known - tokens["kept"]) / known,
        "under_way_at_end": at_end / (known + at_end),
        "tokens_by_fate": dict(tokens),
    }


def print_results(results: dict[str, Any]) -> None:
    rows = (
        ("engine idle", f"{results['engine_idle']:.1%}", f"{AIM_IDLE:.0%}"),
        ("  by server", " ".join(f"{share:.1%}" for share in results["engine_idle_by_server"]), ""),
        ("  idle in pauses", f"{results['idle_in_pauses']:.1%}", ""),
        ("running, mean", " ".join(f"{running:.0f}" for running in results["running_mean"]), ""),
        ("trainer waiting", f"{results['trainer_waiting']:.1%}", ""),
        ("discarded", f"{results['thrown_away']:.2%}", f"{AIM_THROWN_AWAY:.0%}"),
        ("in flight at the end", f"{results['under_way_at_end']:.2%}", ""),
        ("steps/h", f"{results['steps_per_hour']:,.0f}", ""),
        ("s/step, median", f"{results['step_seconds']:.2f}", ""),
        ("tokens/s of the engines", f"{results['engine_tokens_per_second']:,.0f}", ""),
        ("tokens/s trained", f"{results['trained_tokens_per_second']:,.0f}", ""),
        ("tokens per answer", f"{results['tokens_per_sample']:,.0f}", ""),
        ("pause of a sync, ms", f"{1000 * results['pause_seconds']:.0f}", ""),
        ("stall of a sync, ms", f"{1000 * results['stall_seconds']:.0f}", ""),
        ("  sending, ms", f"{1000 * results['sending_seconds']:.0f}", ""),
    )
    show(("", "measured", "aim"), rows, f"End to end, {pluralize(results['steps'], 'step')}")


if __name__ == "__main__":
    sys.exit(main())
