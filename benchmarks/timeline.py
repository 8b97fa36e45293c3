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
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import provenance, require_gpus
from rich.console import Console
from rich.table import Table
from trainer import SHAPES, free_port, gpu_name, write_model

from telescope.config import TelescopeConfig
from telescope.trainer import step as rl_step
from telescope.trainer.batch import StepInput, TrainSample
from telescope.trainer.packing import pack_step
from telescope.trainer.worker import Trainer, choose_device
from telescope.utils.timeline import Timeline

SPANS = 10_000
"""Number of empty spans that are timed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.6b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 8192], help="tokens of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each kind")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="the tiny shape on the CPU")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    require_gpus(parser, quick=arguments.quick)
    if arguments.quick:
        arguments.shapes, arguments.tokens, arguments.steps, arguments.warmup = ["tiny"], [64, 256], 10, 1
        arguments.micro_batches = 4
    device = choose_device("cpu" if arguments.quick else "auto", 0)
    report: dict[str, Any] = {
        "where": provenance(["torch", "transformers"]) | {"gpu": gpu_name(device)},
        "command": " ".join(["benchmarks/timeline.py", *sys.argv[1:]]),
        "microseconds_per_span": span_microseconds(device),
        "cases": [],
    }
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            write_model(SHAPES[shape], Path(folder), device)
            for num_tokens in arguments.tokens:
                report["cases"].append(run(shape, num_tokens, folder, device, arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report)
    return 0


def run(shape: str, num_tokens: int, model: str, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns one row of the report."""
    trainer = make_trainer(model, num_tokens, device)
    batch = make_batch(arguments.micro_batches, num_tokens, SHAPES[shape]["vocab_size"])
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    seconds: dict[bool, list[float]] = {True: [], False: []}
    num_spans, covered = 0, 0.0
    try:
        for step in range(arguments.warmup + arguments.steps):
            for tracked in (True, False) if step % 2 else (False, True):
                rl_step.Timeline = partial(Timeline, enabled=tracked)  # type: ignore[assignment, misc]
                if device.type == "cuda":
                    torch.cuda.synchronize()
                started = clock()
                result = trainer.train_step(batch)
                elapsed = clock() - started
                if step >= arguments.warmup:
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
    print(json.dumps(row), flush=True)
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


def make_trainer(model: str, num_tokens: int, device: torch.device) -> Trainer:
    config = TelescopeConfig(
        model=model,
        environments=[{"name": "countdown"}],  # type: ignore[list-item]
        model_dtype="bfloat16" if device.type == "cuda" else "float32",
        mixed_precision_dtype="bfloat16" if device.type == "cuda" else None,
        device=device.type,  # type: ignore[arg-type]
        trainer_threads=1 if device.type == "cpu" else None,
        seq_len=num_tokens,
        max_model_len=num_tokens,
        max_tokens=num_tokens // 2,
        compare_first_steps=0,  # the batch's logprobs are random
    )
    trainer = Trainer(config, 0, 1, "127.0.0.1", free_port())
    trainer.setup()
    return trainer


def make_batch(num_micro_batches: int, num_tokens: int, vocab_size: int) -> StepInput:
    """Returns micro-batches of one sequence each."""
    rng = np.random.default_rng(0)
    trained_L = np.arange(num_tokens) > 0
    samples = [
        TrainSample(
            sample_id=f"s{index}",
            group_id=index,
            environment="countdown",
            token_ids_L=rng.integers(0, vocab_size, num_tokens),
            trained_L=trained_L,
            engine_logprob_L=np.where(trained_L, -np.log(vocab_size), 0.0),
            version_L=np.where(trained_L, 0, -1),
            reward=0.0,
            advantage=float(rng.normal()),
        )
        for index in range(num_micro_batches)
    ]
    (batch,) = pack_step(samples, step=0, version=0, seq_len=num_tokens, num_ranks=1, pad_to_multiple_of=64)
    return batch


def print_table(report: dict[str, Any]) -> None:
    table = Table("shape", "tokens", "micro-batches", "spans", "covered", "without", "with", "cost", "share")
    for row in report["cases"]:
        table.add_row(
            row["shape"], f"{row['tokens']:,}", str(row["micro_batches"]), str(row["spans"]),
            f"{row['covered_share']:.0%}", f"{row['seconds_without'] * 1e3:.2f} ms",
            f"{row['seconds_with'] * 1e3:.2f} ms",
            f"{row['cost_seconds'] * 1e3:+.2f} +- {row['cost_error_seconds'] * 1e3:.2f} ms",
            f"{row['cost_share']:+.2%}",
        )  # fmt: skip
    console = Console(width=140)
    console.print(table)
    where = report["where"]["gpu"] or report["where"]["cpu"]
    console.print(f"one empty span: {report['microseconds_per_span']:.1f} us of host time; {where}")


if __name__ == "__main__":
    sys.exit(main())
