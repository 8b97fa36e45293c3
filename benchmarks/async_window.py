"""Measures how far generation should run ahead: speed, age of tokens and waste for several windows.

    python benchmarks/async_window.py --quick                          the tiny model on the CPU
    python benchmarks/async_window.py --json results.json              one engine and one trainer rank on two GPUs
    python benchmarks/async_window.py --cases 3:8 3:-1 --json results.json     these, added to the file

A case is `max_async_rollout`:`max_off_policy_steps`. Each is a `telescope train` process with the fields of the
README's example, a model of the shape of Qwen2.5-1.5B with random weights, an environment with random rewards, and
answers of log-normal length: mean 500 tokens, sigma 1.0 (p99 3,100), cut at 4,096. After --warm-up steps it is measured
for --seconds, then stopped. A case that is in the file is not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

from command_line import fields_of, parser_of, require_gpus, show
from end_to_end import results_of, thrown_away
from forced_lengths import Lengths
from whole_run import Case, WholeRun, add_case_arguments

LENGTHS = Lengths(500, 3100)
CASES = ("2:8", "4:8", "3:8", "6:8", "4:-1", "3:-1", "2:-1")
"""In the order of their value: the bound of the default first."""
FIELDS = {
    "inference_num_workers": 1,
    "trainer_num_workers": 1,
    "max_tokens": 4096,
    "max_model_len": 4352,
    "number_of_steps": 100_000,  # it is stopped
}


def main() -> int:
    arguments = parse()
    case = Case.of(arguments)
    if not arguments.quick:
        case = replace(case, shape=arguments.shape or "qwen2.5-1.5b", lengths=LENGTHS)
    path = arguments.json
    results = json.loads(path.read_text())["results"] if path and path.exists() else {}
    for name in arguments.cases:
        if name in results:
            continue
        ahead, bound = (int(number) for number in name.split(":"))
        given = {"number_of_steps": FIELDS["number_of_steps"]} if arguments.quick else FIELDS
        window = {"max_async_rollout": ahead, "max_off_policy_steps": bound}
        one = replace(case, fields={**case.fields, **given, **fields_of(arguments.set), **window})
        with one.prepared(f"ahead-{ahead}-bound-{bound}") as run:
            try:
                with run:
                    measure(run, arguments)
            except RuntimeError as error:  # the other cases may still be measured
                print(f"{name}: {error}", file=sys.stderr)
                continue
            results[name] = numbers_of(run, arguments.warm_up)
        print_results(results)
        case.report(results=results)
    return int(any(name not in results for name in arguments.cases))


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "the tiny model on the CPU")
    add_case_arguments(parser, port=8890)
    parser.set_defaults(warm_up=6)
    add = parser.add_argument
    add("--cases", nargs="+", default=list(CASES), metavar="AHEAD:BOUND", help=f"default: {' '.join(CASES)}")
    add("--seconds", type=float, default=90.0, help="seconds of training that are measured in each case (default: 90)")
    add("--timeout", type=float, default=400.0, help="seconds for the start and the warm-up of a case (default: 400)")
    arguments = parser.parse_args()
    require_gpus(parser, quick=arguments.quick)
    return arguments


def measure(run: WholeRun, arguments: argparse.Namespace) -> None:
    """Lets the run train for the measured seconds and stops it."""
    run.wait_until(f"step {arguments.warm_up}", lambda: len(run.steps()) >= arguments.warm_up, arguments.timeout)
    end = time.monotonic() + arguments.seconds
    run.reaches(lambda: time.monotonic() > end, arguments.seconds + 60)
    run.stop()


def numbers_of(run: WholeRun, warm_up: int) -> dict[str, Any]:
    """Returns the numbers of the steps after the warm-up."""
    steps = run.steps()
    results = results_of(run, warm_up, len(steps) - warm_up)
    del results["step_times"]  # with every metric of every step
    ages = [step["metrics"]["staleness/token_age_mean"] for step in steps[warm_up:]]
    oldest = [step["metrics"]["staleness/token_age_max"] for step in steps[warm_up:]]
    discarded = thrown_away(run, steps, first_step=steps[warm_up]["step"])
    return {**results, **discarded, "token_age_mean": statistics.mean(ages), "token_age_max": max(oldest)}


def print_results(results: dict[str, dict[str, Any]]) -> None:
    titles = (
        "ahead:bound", "steps/h", "trainer waiting", "engine idle", "running", "age, mean", "oldest", "discarded",
        "steps", "tokens",
    )  # fmt: skip
    rows = [
        (
            name, f"{result['steps_per_hour']:,.0f}", f"{result['trainer_waiting']:.1%}",
            f"{result['engine_idle']:.1%}", f"{statistics.mean(result['running_mean']):.0f}",
            f"{result['token_age_mean']:.2f}", f"{result['token_age_max']:.0f}", f"{result['thrown_away']:.2%}",
            str(result["steps"]), f"{result['tokens_per_sample']:,.0f}",
        )
        for name, result in sorted(results.items())
    ]  # fmt: skip
    show(titles, rows, "How far generation runs ahead")


if __name__ == "__main__":
    sys.exit(main())
