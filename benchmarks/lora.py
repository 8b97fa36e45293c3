"""Measures training with LoRA on one GPU: peak memory, tokens/s, and the trainer's part of a weight sync.

    python benchmarks/lora.py --quick                                  a tiny model on the CPU
    python benchmarks/lora.py --json results.json                      a 14B model with adapters of rank 16
    python benchmarks/lora.py --shapes 4b 14b --adapters none lora     beside full training where that fits

Steps are those of `benchmarks/trainer.py`: random weights of a real Qwen3 shape, one row of `--tokens` per step, all
linear layers adapted, activation checkpointing. Weights are bfloat16 with LoRA and float32 in full training. A case
that is estimated to exceed the GPU's memory is not started. Model FLOPs are 4 N per token with LoRA (frozen weights
have no gradient) and 6 N without, plus attention.

A sync is what the trainer does for one without the engine, in bfloat16, the median of `--syncs`. `merged`: every weight
with its adapter added, gathered and copied into a send buffer, as in full training without the adapters. `adapter`: the
adapters alone, gathered and written to a file. With an engine: `python benchmarks/weight_sync.py --shapes 4b --set
lora_rank=16 model_dtype=bfloat16 lora_sync=adapter`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from measure import positive, provenance, require_gpus
from rich.console import Console
from rich.table import Table
from trainer import gpu_name
from trainer_case import (
    CHECKPOINTING,
    GIB,
    SHAPES,
    Case,
    make_config,
    matmul_tflops,
    run_here,
    write_config,
)

from telescope.config.memory import trainer_memory
from telescope.config.model_shape import ModelShape
from telescope.trainer.worker import Trainer, choose_device

ADAPTERS = ("none", "lora")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["14b"])
    parser.add_argument("--adapters", nargs="+", choices=ADAPTERS, default=["lora"], help="none: full training")
    parser.add_argument("--rank", type=positive, default=16, help="lora_rank")
    parser.add_argument("--tokens", nargs="+", type=positive, default=[16_384], help="tokens of a row")
    parser.add_argument("--load", choices=["single", "packed"], default="packed")
    parser.add_argument("--checkpointing", nargs="+", choices=list(CHECKPOINTING), default=["selective"])
    parser.add_argument("--steps", type=positive, default=3, help="timed steps of a case")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them, after compiling")
    parser.add_argument("--syncs", type=positive, default=3, help="timed syncs of each kind, after one that is not")
    parser.add_argument("--quick", action="store_true", help="the tiny shape on the CPU")
    parser.add_argument("--json", type=Path, help="write the results here, after every case")
    arguments = parser.parse_args()
    require_gpus(parser, quick=arguments.quick)
    if arguments.quick:
        arguments.shapes, arguments.tokens, arguments.adapters = ["tiny"], [512], list(ADAPTERS)

    wanted_device = "cpu" if arguments.quick else "auto"
    device = choose_device(wanted_device, 0)
    matmul = matmul_tflops(device)
    report: dict[str, Any] = {
        "where": provenance(["torch", "transformers"]) | {"gpu": gpu_name(device)},
        "command": " ".join(["benchmarks/lora.py", *sys.argv[1:]]),
        "matmul_tflops": matmul,
        "cases": [],
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for case in cases(arguments):
            started = time.perf_counter()
            row = asdict(case) | {"adapters": adapters_of(case)} | too_large(case, device, folder)
            if "estimate_gib" not in row:

                def measure_syncs(trainer: Trainer) -> dict[str, Any]:
                    return syncs(trainer, folder / "adapter", arguments.syncs)

                row |= run_here(case, wanted_device, matmul, folder, measure_syncs)
            row["case_seconds"] = time.perf_counter() - started
            report["cases"].append(row)
            print(progress(row), file=sys.stderr, flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report)
    return 0


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Returns every combination of the arguments."""
    with_adapters = {"model_dtype": "bfloat16", "options": (("lora_rank", arguments.rank),)}
    return [
        replace(
            Case(shape, tokens, arguments.load, checkpointing, steps=arguments.steps, warmup=arguments.warmup),
            **(with_adapters if adapters == "lora" else {}),  # type: ignore[arg-type]
        )
        for shape, adapters, tokens, checkpointing in product(
            arguments.shapes, arguments.adapters, arguments.tokens, arguments.checkpointing
        )
    ]


def adapters_of(case: Case) -> str:
    """Describes the adapters of a case in a few words."""
    rank = dict(case.options).get("lora_rank")
    return "none" if rank is None else f"rank {rank}"


def too_large(case: Case, device: torch.device, folder: Path) -> dict[str, Any]:
    """Returns the estimate of a case that does not fit this GPU, and nothing for others."""
    if device.type == "cpu":
        return {}
    shape = ModelShape.from_config(write_config(SHAPES[case.shape], folder).to_dict())
    assert shape is not None
    config = make_config(case, device, folder)
    estimate = trainer_memory(config, shape, "cuda", recompute_attention=bool(config.recompute_attention))
    if estimate.total <= torch.cuda.get_device_properties(device).total_memory:
        return {}
    return {"estimate_gib": (estimate.total - estimate.overhead) / GIB}


def syncs(trainer: Trainer, folder: Path, count: int) -> dict[str, Any]:
    """Returns seconds and bytes of the trainer's part of a sync of each kind, and the peak memory of a merged one."""
    on_gpu = trainer.backend.device.type == "cuda"
    kinds: dict[str, Callable[[], int]] = {"merged": lambda: send_all(trainer, torch.bfloat16)}
    if trainer.config.lora_rank:
        kinds["adapter"] = lambda: trainer.sync_adapter(folder, "bfloat16")
    row: dict[str, Any] = {}
    for name, sync in kinds.items():
        seconds, num_bytes = [], 0
        for _ in range(1 + count):
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            num_bytes = sync()
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        row[f"sync_{name}"] = {"seconds": statistics.median(seconds[1:]), "all_seconds": seconds, "bytes": num_bytes}
        if on_gpu:
            row[f"sync_{name}"]["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    shutil.rmtree(folder, ignore_errors=True)
    return row


def send_all(trainer: Trainer, dtype: torch.dtype) -> int:
    """Copies all weights into a buffer, one after the other; returns their bytes."""
    sizes = [meta.shape for meta in trainer.backend.weight_metadata()]
    largest = max(torch.Size(size).numel() for size in sizes)
    buffer = torch.empty(largest, dtype=dtype, device=trainer.backend.device)
    num_bytes = 0
    for _, tensor in trainer.named_weights(dtype):
        buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
        num_bytes += tensor.numel() * dtype.itemsize
    return num_bytes


def progress(row: dict[str, Any]) -> str:
    """Summarizes a case in a few words."""
    outcome = f"{row['seconds']:.3f} s/step" if "seconds" in row else failure(row)
    return f"{row['shape']}, adapters {row['adapters']}, {row['num_tokens']:,} tokens: {outcome}"


def failure(row: dict[str, Any]) -> str:
    """Describes why a case has no numbers."""
    return "out of memory" if "out_of_memory" in row else "does not fit"


def print_table(report: dict[str, Any]) -> None:
    table = Table(
        "shape", "adapters", "weights", "tokens", "recomputed", "s/step", "tokens/s", "TFLOP/s", "peak GiB", "estimate",
        "sync of all weights", "of the adapters",
    )  # fmt: skip
    for row in report["cases"]:
        head = [row["shape"], row["adapters"], row["model_dtype"], f"{row['num_tokens']:,}", row["checkpointing"]]
        estimate = f"{row['estimate_gib']:.1f}" if "estimate_gib" in row else ""
        if "seconds" not in row:
            table.add_row(*head, failure(row), "", "", "", estimate)
            continue
        table.add_row(
            *head, f"{row['seconds']:.3f}", f"{row['tokens_per_second']:,.0f}", f"{row['tflops']:.1f}",
            f"{row['peak_gib']:.1f}" if "peak_gib" in row else "", estimate,
            *(sync_text(row[kind]) if kind in row else "" for kind in ("sync_merged", "sync_adapter")),
        )  # fmt: skip
    console = Console(width=150)
    console.print(table)
    console.print(
        f"matrix product: {report['matmul_tflops']:.1f} TFLOP/s; {report['where']['gpu'] or report['where']['cpu']}"
    )


def sync_text(sync: dict[str, Any]) -> str:
    """Formats seconds and megabytes of a sync."""
    return f"{sync['seconds']:.3f} s, {sync['bytes'] / 1e6:,.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
