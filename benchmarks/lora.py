"""Measures training with LoRA on one GPU: peak memory, tokens/s, and the trainer's part of a weight sync.

    python benchmarks/lora.py --quick                                  a tiny model on the CPU
    python benchmarks/lora.py --json results.json                      a 14B model with adapters of rank 16
    python benchmarks/lora.py --shapes 4b 14b --adapters none lora     beside full training where that fits

Steps are those of `benchmarks/trainer.py`: random weights of a real Qwen3 shape, one row of `--tokens` per step, all
linear layers adapted, activation checkpointing. Weights are bfloat16 with LoRA and float32 in full training. A case
that is estimated to exceed the GPU's memory is not started. Model FLOPs are 4 N per token with LoRA (frozen weights
have no gradient) and 6 N without, plus attention.

A sync is what the trainer does for one without the engine, in bfloat16, the median of three. `merged`: every weight
with its adapter added, gathered and copied into a send buffer, as in full training without the adapters. `adapter`: the
adapters alone, gathered and written to a file. With an engine: `python benchmarks/weight_sync.py --shapes 4b --set
lora_rank=16 model_dtype=bfloat16 lora_sync=adapter`.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from command_line import command, parser_of, positive, require_gpus, show, write_json
from measure import machine, provenance
from random_model import SHAPES, config_of
from trainer_case import GIB, Case, make_config, matmul_tflops, now, run_here

from telescope.config.memory import trainer_memory
from telescope.config.model_shape import ModelShape
from telescope.trainer.worker import Trainer, choose_device

RANK = 16
ADAPTERS: dict[str, dict[str, Any]] = {
    "none": {}, "lora": {"model_dtype": "bfloat16", "options": (("lora_rank", RANK),)}
}  # fmt: skip
SYNCS = 3
"""Timed syncs of each kind, after one that is not."""


def main() -> int:
    parser = parser_of(__doc__, "the tiny shape on the CPU")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["14b"])
    parser.add_argument("--adapters", nargs="+", choices=list(ADAPTERS), default=["lora"], help="none: full training")
    parser.add_argument("--tokens", nargs="+", type=positive, default=[16_384], help="tokens of a row")
    arguments = parser.parse_args()
    require_gpus(parser, quick=arguments.quick)
    if arguments.quick:
        arguments.shapes, arguments.tokens, arguments.adapters = ["tiny"], [512], list(ADAPTERS)

    wanted_device = "cpu" if arguments.quick else "auto"
    device = choose_device(wanted_device, 0)
    matmul = matmul_tflops(device)
    rows: list[dict[str, Any]] = []
    where = provenance(["torch", "transformers"])
    report = {"where": where, "command": command(), "matmul_tflops": matmul}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for shape, adapters, tokens in product(arguments.shapes, arguments.adapters, arguments.tokens):
            case = Case(shape, tokens, "packed", "selective", steps=3, warmup=2, **ADAPTERS[adapters])
            started = time.perf_counter()
            row = asdict(case) | {"adapters": f"rank {RANK}" if case.options else "none"}
            row |= too_large(case, device, folder) or run_here(
                case, wanted_device, matmul, folder, lambda trainer: syncs(trainer, folder / "adapter")
            )
            row["case_seconds"] = time.perf_counter() - started
            rows.append(row)
            print(*cells(row), sep=", ", file=sys.stderr, flush=True)
            write_json(arguments.json, report | {"cases": rows})
    titles = (
        "shape", "adapters", "weights", "tokens", "recomputed", "s/step", "tokens/s", "TFLOP/s", "peak GiB", "estimate",
        "sync of all weights", "of the adapters",
    )  # fmt: skip
    show(titles, map(cells, rows), width=150)
    print(f"matrix product: {matmul:.1f} TFLOP/s; {machine(where)}")
    return 0


def too_large(case: Case, device: torch.device, folder: Path) -> dict[str, Any]:
    """Returns the estimate of a case that does not fit this GPU, and nothing for others."""
    if device.type == "cpu":
        return {}
    shape = ModelShape.from_config(config_of(case.shape).to_dict())
    assert shape is not None
    config = make_config(case, device, folder)
    estimate = trainer_memory(config, shape, "cuda", recompute_attention=bool(config.recompute_attention))
    if estimate.total <= torch.cuda.get_device_properties(device).total_memory:
        return {}
    return {"estimate_gib": (estimate.total - estimate.overhead) / GIB}


def syncs(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Returns seconds and bytes of the trainer's part of a sync of each kind, and the peak memory of a merged one."""
    device = trainer.backend.device
    kinds: dict[str, Callable[[], int]] = {"merged": lambda: send_all(trainer, torch.bfloat16)}
    if trainer.config.lora_rank:
        kinds["adapter"] = lambda: trainer.sync_adapter(folder, "bfloat16")
    row: dict[str, Any] = {}
    for name, sync in kinds.items():
        seconds, num_bytes = [], 0
        for _ in range(1 + SYNCS):
            started = now(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            num_bytes = sync()
            seconds.append(now(device) - started)
        row[f"sync_{name}"] = {"seconds": statistics.median(seconds[1:]), "all_seconds": seconds, "bytes": num_bytes}
        if device.type == "cuda":
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


def cells(row: dict[str, Any]) -> list[str]:
    """Returns a row of the table, without numbers for a case that has none."""
    head = [row["shape"], row["adapters"], row["model_dtype"], f"{row['num_tokens']:,}", row["checkpointing"]]
    estimate = f"{row['estimate_gib']:.1f}" if "estimate_gib" in row else ""
    if "seconds" not in row:
        return [*head, "out of memory" if "out_of_memory" in row else "does not fit", "", "", "", estimate]
    return [
        *head, f"{row['seconds']:.3f}", f"{row['tokens_per_second']:,.0f}", f"{row['tflops']:.1f}",
        f"{row['peak_gib']:.1f}" if "peak_gib" in row else "", estimate,
        *(sync_text(row[kind]) if kind in row else "" for kind in ("sync_merged", "sync_adapter")),
    ]  # fmt: skip


def sync_text(sync: dict[str, Any]) -> str:
    """Formats seconds and megabytes of a sync."""
    return f"{sync['seconds']:.3f} s, {sync['bytes'] / 1e6:,.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
