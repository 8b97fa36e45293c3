"""Trains the demo with every algorithm and several seeds; reports held-out accuracy.

    python benchmarks/algorithms.py                            every algorithm, seeds 0, 1 and 2
    python benchmarks/algorithms.py --quick                    every algorithm, seed 0, 15 steps
    python benchmarks/algorithms.py --algorithms gspo sapo --seeds 3 4
    python benchmarks/algorithms.py --json results.json        written after every run; resumes from it

Each run is a `train.py` process on configs/examples/demo_countdown.yaml, with a model warm-started with the same seed:
Ray, vLLM, two FSDP2 ranks, one step of staleness. All share its settings except for `STEPS` and `SETTINGS`. Nothing was
tuned to rank algorithms, and the numbers do not.
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
"""Half of the demo's: enough to distinguish learning from noise."""

AIM = 0.1
"""Required absolute gain of held-out accuracy for every algorithm and seed. The standard error of a difference of two
accuracies over 500 items is about 0.03."""

SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "rloo": {},
    "reinforce_pp": {"advantage_norm": "batch"},
    "dr_grpo": {},
    "cispo": {},
    # The paper's bounds apply to updates within a batch: the ratio is relative to the trainer's own logprobs before the
    # first of four updates, since one step of staleness alone moves it further.
    "gspo": {
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "ppo_clip_ref_logprobs": "batch",
        "number_of_minibatches": 4,
    },
    "sapo": {},
}
"""Fields of each algorithm that differ from the demo's config and the defaults."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of model and run")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps (default: {STEPS})")
    parser.add_argument("--port", type=int, default=8100, help="inference_base_port")
    parser.add_argument("--quick", action="store_true", help="seed 0, 15 steps")
    parser.add_argument("--json", type=Path, help="write the results here, with machine and commit")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.steps = [0], 15

    # Seeds in the outer loop, so that an interrupted benchmark has every algorithm once.
    runs = [
        DemoRun(seed, {"algorithm": name, "number_of_steps": arguments.steps, **SETTINGS[name]})
        for seed in arguments.seeds
        for name in arguments.algorithms
    ]
    results = run_all(runs, path=arguments.json, port=arguments.port)

    table = Table("algorithm", "seed", *ACCURACY_COLUMNS)
    failed = False
    rows = sorted(zip(runs, results, strict=True), key=lambda row: list(SETTINGS).index(row[0].fields["algorithm"]))
    for run, result in rows:
        short_of_aim = gain(result) < AIM
        failed |= short_of_aim
        table.add_row(
            run.fields["algorithm"], str(run.seed), *accuracy_cells(result), style="red" if short_of_aim else None
        )
    console = Console()
    console.print(table)
    for name in arguments.algorithms:
        gains = [gain(result) for run, result in rows if run.fields["algorithm"] == name]
        console.print(f"{name}: median gain {statistics.median(gains):+.3f}, smallest {min(gains):+.3f}")
    temperature, items = results[0]["heldout_temperature"], results[0]["heldout_items"]
    console.print(f"aim {AIM:+.2f} each; {items} held-out items at temperature {temperature:g}")
    return 1 if failed and not arguments.quick else 0


if __name__ == "__main__":
    sys.exit(main())
