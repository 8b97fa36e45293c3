"""Trains SmolLM2-135M-Instruct on sums for several seeds and reports held-out accuracy, before and after.

    python benchmarks/real_model.py                          one GPU, seeds 0, 1 and 2
    python benchmarks/real_model.py --quick                  two CPU cores, seed 0, fewer and smaller steps
    python benchmarks/real_model.py --json results.json      written after every run; resumes from it

`telescope tiny-model --from smollm2-135m` makes the model, with its own tokenizer and chat template. Each run is a
`train.py` process: Ray, vLLM, a trainer rank, one step of staleness. The items (benchmarks/environments/sums) are sums
of two numbers below 100 after one worked example; the held-out ones are never trained. Answers are sampled at
temperature 1. Intervals are 95 %: Wilson's for an accuracy, paired over the items for the gain of a run, and Student's
t over the seeds for the mean gain.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo_runs import DemoRun, gain, run_all
from measure import positive, require_gpus
from rich.console import Console
from rich.table import Table
from whole_run import fields_of

AIM = 0.1
"""Required absolute gain of held-out accuracy for every seed."""

GPU: dict[str, Any] = {
    "device": "cuda",
    "share_gpus": True,
    "mixed_precision_dtype": "bfloat16",
    "inference_threads": None,
    "trainer_threads": None,
    "ray_inference_cpus_per_worker": 2,
    "ray_trainer_cpus_per_worker": 2,
    "inference_enforce_eager": True,  # the answers are short, and compilation would take longer than the training
    "compile_blocks": False,
    "prompts_batch_size_for_trainer": 32,
    "number_of_steps": 40,
    "learning_rate": 5e-6,
}
CPU: dict[str, Any] = {"prompts_batch_size_for_trainer": 8, "number_of_steps": 12, "learning_rate": 1e-5}
Z = 1.959964
"""97.5 % quantile of the standard normal distribution."""
STUDENT_T = (math.nan, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31)
"""97.5 % quantiles of Student's t with 0 (none), 1, 2, ... degrees of freedom."""


def fields(*, quick: bool) -> dict[str, Any]:
    """Returns the fields in which a run differs from the demo's config."""
    return {
        "environments": [{"name": "sums", "kwargs": {"portion": "train"}}],
        "environments_path": ["benchmarks/environments"],
        "evals": [
            {
                "name": "sums",
                "kwargs": {"portion": "heldout"},
                "num_samples": 200 if quick else 1000,
                "separate_eval_samples": True,
                "temperature": 1.0,
            }
        ],
        "max_tokens": 16,
        "max_model_len": 128,
        "seq_len": 2048,
        "trainer_num_workers": 1,
        "trainer_threads": 2,
        "inference_threads": 2,
        "checkpoint_every": 0,
        "save_final_model": False,
        **(CPU if quick else GPU),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seeds", type=positive, help="number of seeds, from 0 (default: 3, with --quick 1)")
    add("--first-seed", type=int, default=0, help="the first of them (default: 0)")
    add("--steps", type=positive, help="training steps (default: 40, with --quick 20)")
    add("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of the configuration")
    add("--port", type=int, default=8100, help="inference_base_port")
    add("--quick", action="store_true", help="two CPU cores")
    add("--json", type=Path, metavar="FILE", help="write the results here, with machine and commit")
    arguments = parser.parse_args()
    require_gpus(parser, quick=arguments.quick)

    given = fields(quick=arguments.quick)
    if arguments.steps is not None:
        given["number_of_steps"] = arguments.steps
    given |= fields_of(arguments.set)
    num_seeds = arguments.seeds or (1 if arguments.quick else 3)
    runs = [
        DemoRun(seed, given, released="smollm2-135m")
        for seed in range(arguments.first_seed, arguments.first_seed + num_seeds)
    ]
    results = run_all(runs, path=arguments.json, port=arguments.port)
    show([run.seed for run in runs], results)
    return 0 if min(map(gain, results)) >= AIM or arguments.quick else 1


def show(seeds: Sequence[int], results: Sequence[dict[str, Any]]) -> None:
    """Prints a row for each seed, and the mean gain."""
    table = Table("seed", "before", "after", "gain", "steps", "training s", "whole run s")
    for seed, result in zip(seeds, results, strict=True):
        accuracies = [
            f"{accuracy:.3f} ({low:.3f} to {high:.3f})"
            for accuracy in (result["heldout_before"], result["heldout_after"])
            for low, high in [wilson(accuracy, result["heldout_items"])]
        ]
        low, high = result["heldout_gain_interval"]
        numbers = [str(result["steps"]), f"{result['training_seconds']:.0f}", f"{result['seconds']:.0f}"]
        table.add_row(str(seed), *accuracies, f"{gain(result):+.3f} ({low:+.3f} to {high:+.3f})", *numbers)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    gains = [gain(result) for result in results]
    mean = f"mean gain {statistics.mean(gains):+.3f}"
    if 1 < len(gains) <= len(STUDENT_T):
        margin = STUDENT_T[len(gains) - 1] * statistics.stdev(gains) / math.sqrt(len(gains))
        mean += f" ± {margin:.3f}"
    console.print(
        f"{mean}, smallest {min(gains):+.3f} (aim {AIM:+.1f}); {results[0]['heldout_items']} held-out items at "
        f"temperature {results[0]['heldout_temperature']:g}"
    )


def wilson(share: float, count: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a share of `count` items."""
    middle, margin = share + Z**2 / (2 * count), Z * math.sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2)
    return (middle - margin) / (1 + Z**2 / count), (middle + margin) / (1 + Z**2 / count)


if __name__ == "__main__":
    sys.exit(main())
