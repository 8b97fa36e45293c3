"""Trains the demo for several seeds, of model and run alike, and reports held-out accuracy.

    python benchmarks/demo_learning.py                       three seeds, untied and tied embeddings
    python benchmarks/demo_learning.py --quick               one seed, untied, 20 steps
    python benchmarks/demo_learning.py --json results.json   written after every run; resumes from it

Each run is a `telescope train` process on configs/examples/demo_countdown.yaml, or the file that --config names: Ray,
vLLM, two FSDP2 ranks. The numbers come from its `summary.json`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml
from demo_runs import ACCURACY_COLUMNS, CONFIGS, DemoRun, accuracy_cells, gain, run_all
from rich.console import Console
from rich.table import Table

AIM = 0.2
"""Required absolute gain of held-out accuracy for every seed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of model and run")
    parser.add_argument("--kinds", nargs="+", choices=["untied", "tied"], default=["untied", "tied"], help="embeddings")
    parser.add_argument("--steps", type=int, help="training steps (default: the config's)")
    parser.add_argument("--config", default="demo_countdown.yaml", help="a file of configs/examples for this model")
    parser.add_argument("--kwargs", type=yaml.safe_load, default={}, help="of its environments, as {agent: checker}")
    parser.add_argument("--port", type=int, default=8100, help="inference_base_port")
    parser.add_argument("--quick", action="store_true", help="seed 0, untied, 20 steps")
    parser.add_argument("--json", type=Path, help="write the results here, with machine and commit")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.kinds, arguments.steps = [0], ["untied"], 20

    fields: dict[str, Any] = {} if arguments.steps is None else {"number_of_steps": arguments.steps}
    if arguments.kwargs:
        config = yaml.safe_load((CONFIGS / arguments.config).read_text())
        for name in ("environments", "evals"):
            fields[name] = [{**entry, "kwargs": {**entry["kwargs"], **arguments.kwargs}} for entry in config[name]]
    runs = [
        DemoRun(seed, fields, kind == "tied", config=arguments.config)
        for kind in arguments.kinds
        for seed in arguments.seeds
    ]
    results = run_all(runs, path=arguments.json, port=arguments.port)

    table = Table("embeddings", "seed", *ACCURACY_COLUMNS)
    for run, result in zip(runs, results, strict=True):
        table.add_row("tied" if run.tied else "untied", str(run.seed), *accuracy_cells(result))
    console = Console()
    console.print(table)
    gains = [gain(result) for result in results]
    temperature, items = results[0]["heldout_temperature"], results[0]["heldout_items"]
    console.print(
        f"gain: median {statistics.median(gains):+.3f}, smallest {min(gains):+.3f} (aim {AIM:+.1f}); "
        f"{items} held-out items at temperature {temperature:g}"
    )
    return 0 if min(gains) >= AIM or arguments.quick else 1


if __name__ == "__main__":
    sys.exit(main())
