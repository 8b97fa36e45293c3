"""Trains the demo for several seeds, of model and run alike, and reports held-out accuracy.

    python benchmarks/demo_learning.py                       three seeds, untied and tied embeddings
    python benchmarks/demo_learning.py --quick               one seed, untied, 20 steps
    python benchmarks/demo_learning.py --json results.json   written after every run; resumes from it

Each run is a `telescope train` process on configs/examples/demo_countdown.yaml, or the file that --config names: Ray,
vLLM, two FSDP2 ranks. The numbers come from its `summary.json`.
"""

from __future__ import annotations

import sys
from typing import Any

import yaml
from demo_runs import CONFIGS, DemoRun, compare, parse_runs, parser_of_runs

AIM = 0.2
"""Required absolute gain of held-out accuracy for every seed."""


def main() -> int:
    parser = parser_of_runs(__doc__, "seed 0, untied, 20 steps", "the config's")
    parser.add_argument("--kinds", nargs="+", choices=["untied", "tied"], help="embeddings (default: both)")
    parser.add_argument("--config", default="demo_countdown.yaml", help="a file of configs/examples for this model")
    parser.add_argument("--kwargs", type=yaml.safe_load, default={}, help="of its environments, as {agent: checker}")
    arguments = parse_runs(parser, quick_steps=20)
    arguments.kinds = arguments.kinds or (["untied"] if arguments.quick else ["untied", "tied"])
    fields: dict[str, Any] = {} if arguments.steps is None else {"number_of_steps": arguments.steps}
    if arguments.kwargs:
        config = yaml.safe_load((CONFIGS / arguments.config).read_text())
        for name in ("environments", "evals"):
            fields[name] = [{**entry, "kwargs": {**entry["kwargs"], **arguments.kwargs}} for entry in config[name]]
    runs = [
        (kind, DemoRun(seed, fields, kind == "tied", config=arguments.config))
        for kind in arguments.kinds
        for seed in arguments.seeds
    ]
    return compare("embeddings", runs, arguments, AIM)


if __name__ == "__main__":
    sys.exit(main())
