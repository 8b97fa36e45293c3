"""Measures the cost of the timeline (`track_gpu_events`) in a training step.

    python benchmarks/timeline.py --quick                       a tiny model on the CPU, some seconds
    python benchmarks/timeline.py --shapes 0.6b --tokens 1024   on one GPU: short micro-batches show it most
    python benchmarks/timeline.py --json results.json

Runs `Trainer.train_step`, as a training run does, on one rank with random weights of a real shape: a step is some
micro-batches of the given tokens. Steps with and without the timeline alternate, so that warming up and other load slow
both. On a GPU the wall time of a step is measured, on the CPU its processor time, which other processes hardly change.
The cost is the difference of the medians; its error is that of a median, 1.25 standard deviations of a step over the
root of the number of steps, of both kinds together.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from command_line import command, parser_of, require_gpus, show, write_json
from measure import machine, provenance
from random_model import SHAPES
from trainer_case import Case, make_row, make_step, make_trainer

from telescope.trainer import step as rl_step
from telescope.trainer.worker import choose_device
from telescope.utils.timeline import Timeline

SPANS = 10_000
"""Number of empty spans that are timed."""


def main() -> int:
    parser = parser_of(__doc__, "the tiny shape on the CPU")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.6b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 8192], help="tokens of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each kind")
    arguments = parser.parse_args()
    require_gpus(parser, quick=arguments.quick)
    if arguments.quick:
        arguments.shapes, arguments.tokens, arguments.steps, arguments.micro_batches = ["tiny"], [64, 256], 10, 4
    device = choose_device("cpu" if arguments.quick else "auto", 0)
    report: dict[str, Any] = {
        "where": provenance(["torch", "transformers"]),
        "command": command(),
        "microseconds_per_span": span_microseconds(device),
    }
    rows = [run(shape, tokens, device, arguments) for shape in arguments.shapes for tokens in arguments.tokens]
    write_json(arguments.json, report | {"cases": rows})
    show(
        ("shape", "tokens", "micro-batches", "spans", "covered", "without", "with", "cost", "share"),
        [
            (
                row["shape"], f"{row['tokens']:,}", str(row["micro_batches"]), str(row["spans"]),
                f"{row['covered_share']:.0%}", f"{row['seconds_without'] * 1e3:.2f} ms",
                f"{row['seconds_with'] * 1e3:.2f} ms",
                f"{row['cost_seconds'] * 1e3:+.2f} +- {row['cost_error_seconds'] * 1e3:.2f} ms",
                f"{row['cost_share']:+.2%}",
            )
            for row in rows
        ],
    )  # fmt: skip
    print(f"one empty span: {report['microseconds_per_span']:.1f} us of host time; {machine(report['where'])}")
    return 0


def run(shape: str, num_tokens: int, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns one row of the report."""
    on_gpu, warm_up = device.type == "cuda", 1 if arguments.quick else 3
    options = () if on_gpu else (("trainer_threads", 1),)
    case = Case(
        shape, num_tokens, "single", "selective", micro_batches=arguments.micro_batches, options=options,
        model_dtype="bfloat16" if on_gpu else "float32",
    )  # fmt: skip
    rows = [make_row(case, index) for index in range(case.micro_batches)]
    clock = time.perf_counter if on_gpu else time.process_time
    seconds: dict[bool, list[float]] = {True: [], False: []}
    num_spans, covered = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, device, Path(folder), 0, 0)
        try:
            for step in range(warm_up + arguments.steps):
                for tracked in (True, False) if step % 2 else (False, True):
                    rl_step.Timeline = partial(Timeline, enabled=tracked)  # type: ignore[assignment, misc]
                    if on_gpu:
                        torch.cuda.synchronize()
                    started = clock()
                    result = trainer.train_step(make_step(case, rows, 0))
                    elapsed = clock() - started
                    if step >= warm_up:
                        seconds[tracked].append(elapsed)
                    if tracked:
                        (whole,) = (span for span in result.spans if span.name == "step")
                        inside = [span for span in result.spans if span.name not in ("step", "waiting_for_data")]
                        num_spans = len(inside)
                        covered = sum(span.end - span.start for span in inside) / (whole.end - whole.start)
        finally:
            trainer.shutdown()
    medians = {tracked: statistics.median(values) for tracked, values in seconds.items()}
    error = 1.25 * (sum(statistics.stdev(values) ** 2 / len(values) for values in seconds.values()) ** 0.5)
    row = {
        "shape": shape,
        "tokens": num_tokens,
        "micro_batches": arguments.micro_batches,
        "spans": num_spans,
        "covered_share": covered,
        "seconds_without": medians[False],
        "seconds_with": medians[True],
        "cost_seconds": medians[True] - medians[False],
        "cost_error_seconds": error,
        "cost_share": (medians[True] - medians[False]) / medians[False],
    }
    print(row, flush=True)
    return row


def span_microseconds(device: torch.device) -> float:
    """Returns the host time of one empty span, reading it included."""
    timeline = Timeline(device, 0)
    started = time.perf_counter()
    for index in range(SPANS):
        with timeline.span("forward", index):
            pass
    timeline.finish()
    return (time.perf_counter() - started) / SPANS * 1e6


if __name__ == "__main__":
    sys.exit(main())
