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

import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from command_line import fields_of, require_gpus, show
from demo_runs import DemoRun, fields_of_environment, gain, parse_runs, parser_of_runs, run_all

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


def main() -> int:
    parser = parser_of_runs(__doc__, "two CPU cores, seed 0", "40, with --quick 12")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of the configuration")
    arguments = parse_runs(parser)
    require_gpus(parser, quick=arguments.quick)
    fields = {
        **fields_of_environment("sums", 200 if arguments.quick else 1000),
        "max_tokens": 16,
        "max_model_len": 128,
        "seq_len": 2048,
        "trainer_num_workers": 1,
        "trainer_threads": 2,
        "inference_threads": 2,
        "checkpoint_every": 0,
        "save_final_model": False,
        **(CPU if arguments.quick else GPU),
    }
    if arguments.steps is not None:
        fields["number_of_steps"] = arguments.steps
    fields |= fields_of(arguments.set)
    results = run_all([DemoRun(seed, fields, released="smollm2-135m") for seed in arguments.seeds], arguments)
    print_results(arguments.seeds, results)
    return 0 if min(map(gain, results)) >= AIM or arguments.quick else 1


def print_results(seeds: Sequence[int], results: Sequence[dict[str, Any]]) -> None:
    """Prints a row for each seed, and the mean gain."""
    rows = []
    for seed, result in zip(seeds, results, strict=True):
        accuracies = [
            f"{accuracy:.3f} ({low:.3f} to {high:.3f})"
            for accuracy in (result["heldout_before"], result["heldout_after"])
            for low, high in [wilson(accuracy, result["heldout_items"])]
        ]
        low, high = result["heldout_gain_interval"]
        numbers = [str(result["steps"]), f"{result['training_seconds']:.0f}", f"{result['seconds']:.0f}"]
        rows.append([str(seed), *accuracies, f"{gain(result):+.3f} ({low:+.3f} to {high:+.3f})", *numbers])
    show(("seed", "before", "after", "gain", "steps", "training s", "whole run s"), rows)
    gains = [gain(result) for result in results]
    mean = f"mean gain {statistics.mean(gains):+.3f}"
    if 1 < len(gains) <= len(STUDENT_T):
        margin = STUDENT_T[len(gains) - 1] * statistics.stdev(gains) / math.sqrt(len(gains))
        mean += f" ± {margin:.3f}"
    print(
        f"{mean}, smallest {min(gains):+.3f} (aim {AIM:+.1f}); {results[0]['heldout_items']} held-out items at "
        f"temperature {results[0]['heldout_temperature']:g}"
    )


def wilson(share: float, count: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a share of `count` items."""
    middle, margin = share + Z**2 / (2 * count), Z * math.sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2)
    return (middle - margin) / (1 + Z**2 / count), (middle + margin) / (1 + Z**2 / count)


if __name__ == "__main__":
    sys.exit(main())
