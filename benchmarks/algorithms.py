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

import sys
from typing import Any

from demo_runs import DemoRun, compare, parse_runs, parser_of_runs

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
    parser = parser_of_runs(__doc__, "seed 0, 15 steps", str(STEPS))
    parser.add_argument("--algorithms", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    arguments = parse_runs(parser, quick_steps=15)
    steps = {"number_of_steps": arguments.steps or STEPS}
    # Seeds in the outer loop, so that an interrupted benchmark has every algorithm once.
    runs = [
        (name, DemoRun(seed, {"algorithm": name, **steps, **SETTINGS[name]}))
        for seed in arguments.seeds
        for name in arguments.algorithms
    ]
    return compare("algorithm", runs, arguments, AIM)


if __name__ == "__main__":
    sys.exit(main())
