"""Trains multi-turn and tool environments for several seeds and reports held-out accuracy.

    python benchmarks/agents.py                            every task, seeds 0, 1 and 2
    python benchmarks/agents.py --quick                    every task, seed 0, 10 steps
    python benchmarks/agents.py --json results.json        written after every run; resumes from it

Each run is a `train.py` process with the settings of configs/examples/demo_countdown.yaml except for the environment
and its needs: Ray, vLLM, two FSDP2 ranks, one step of staleness. `turns` is two puzzles in one conversation
(benchmarks/environments/puzzle_series, scored by the share solved). `tools` is two puzzles submitted through a tool,
whose reply is the next puzzle (benchmarks/environments/checked_puzzles). Both train a tiny model that was warm-started
on conversations of two puzzles. `calculator` is `calculator_agent`, with a tiny model warm-started on it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from demo_runs import ACCURACY_COLUMNS, DemoRun, accuracy_cells, gain, run_all
from rich.console import Console
from rich.table import Table

STEPS = 30

AIM = 0.1
"""Required absolute gain of held-out accuracy for every task and seed."""


def fields_of(name: str, kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the fields of a run that trains on an environment and evaluates 200 items unseen by training and warm
    start."""
    kwargs = kwargs or {}
    return {
        "environments": [{"name": name, "kwargs": {**kwargs, "portion": "train"}}],
        "environments_path": ["benchmarks/environments"],
        "evals": [
            {
                "name": name,
                "kwargs": {**kwargs, "portion": "heldout"},
                "num_samples": 200,
                "separate_eval_samples": True,
                "temperature": 1.0,
            }
        ],
        "max_model_len": 256,
    }


TASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "turns": ({"num_turns": 2}, fields_of("puzzle_series")),
    "tools": ({"num_turns": 2}, fields_of("checked_puzzles")),
    "calculator": (
        {"task": "calculator_agent"},
        fields_of("calculator_agent", {"prompt_style": "short", "max_turns": 4, "max_operations": 2, "max_number": 10}),
    ),
}
"""Task: settings of its tiny model, and the fields of a run."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of model and run")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps (default: {STEPS})")
    parser.add_argument("--port", type=int, default=8100, help="inference_base_port")
    parser.add_argument("--quick", action="store_true", help="seed 0, 10 steps")
    parser.add_argument("--json", type=Path, help="write the results here, with machine and commit")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.steps = [0], 10

    runs = [
        DemoRun(seed, {**TASKS[name][1], "number_of_steps": arguments.steps}, model=TASKS[name][0])
        for seed in arguments.seeds
        for name in arguments.tasks
    ]
    results = run_all(runs, path=arguments.json, port=arguments.port)

    table = Table("task", "seed", *ACCURACY_COLUMNS, "right by turn, before", "after")
    names = [name for _ in arguments.seeds for name in arguments.tasks]
    rows = sorted(zip(names, runs, results, strict=True), key=lambda row: row[0])
    failed = False
    for name, run, result in rows:
        short_of_aim = gain(result) < AIM
        failed |= short_of_aim
        by_turn = [
            " ".join(f"{share:.2f}" for share in result[f"heldout_turns_{when}"]) for when in ("before", "after")
        ]
        table.add_row(name, str(run.seed), *accuracy_cells(result), *by_turn, style="red" if short_of_aim else None)
    console = Console()
    console.print(table)
    for name in arguments.tasks:
        gains = [gain(result) for task_name, _, result in rows if task_name == name]
        console.print(f"{name}: median gain {statistics.median(gains):+.3f}, smallest {min(gains):+.3f}")
    return 1 if failed and not arguments.quick else 0


if __name__ == "__main__":
    sys.exit(main())
