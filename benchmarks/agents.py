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

import sys
from typing import Any

from demo_runs import DemoRun, compare, fields_of_environment, parse_runs, parser_of_runs

STEPS = 30

AIM = 0.1
"""Required absolute gain of held-out accuracy for every task and seed."""


def fields_of(name: str, **kwargs: Any) -> dict[str, Any]:
    """Returns the fields of a run of an environment."""
    return fields_of_environment(name, 200, **kwargs) | {"max_model_len": 256}


TASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "turns": ({"num_turns": 2}, fields_of("puzzle_series")),
    "tools": ({"num_turns": 2}, fields_of("checked_puzzles")),
    "calculator": (
        {"task": "calculator_agent"},
        fields_of("calculator_agent", prompt_style="short", max_turns=4, max_operations=2, max_number=10),
    ),
}
"""Task: settings of its tiny model, and the fields of a run."""


def main() -> int:
    parser = parser_of_runs(__doc__, "seed 0, 10 steps", str(STEPS))
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    arguments = parse_runs(parser, quick_steps=10)
    steps = {"number_of_steps": arguments.steps or STEPS}
    runs = [
        (name, DemoRun(seed, {**TASKS[name][1], **steps}, model=TASKS[name][0]))
        for seed in arguments.seeds
        for name in arguments.tasks
    ]
    return compare("task", runs, arguments, AIM)


if __name__ == "__main__":
    sys.exit(main())
