"""Measures a training step: tokens/s, model FLOPs utilization, peak memory.

    python benchmarks/trainer.py --quick --ranks 2                           a tiny model on the CPU, two processes
    python benchmarks/trainer.py --shapes 0.6b --tokens 16384 65536          on one GPU
    python benchmarks/trainer.py --backend fsdp megatron --shapes 4b --tokens 16384 --checkpointing full none
    python benchmarks/trainer.py --shapes 14b --ranks 4 --tokens 16384 32768 --loads single --json results.json

Runs `Trainer.train_step`, as a training run does, on random weights of a real shape: a step is `--micro-batches` rows
of the given tokens on each rank, forward, backward, gradient norm, clipping and AdamW. Two loads: `single`, one
sequence of the whole length, and `packed`, answers of log-normal length (mean 1,000 tokens, sigma 0.8, at most 8,192)
packed end to end. All tokens but each sequence's first are trained. Tokens/s are of all ranks; a row that several ranks
share counts once. `--backend megatron` recomputes all of a layer (`full`) or nothing (`none`).

Model FLOPs of a step: 6 N per token, N being all parameters but the embedding table, the output layer included (also
where it shares the table), plus causal attention, 6 x layers x heads x head dimension x length per token of a sequence
of that length. Recomputation, by choice or by the backward pass of attention and of the output layer, does not count.
Utilization is relative to 989 TFLOP/s per GPU (H100, bfloat16, without sparsity), and to the matrix product measured in
the same run. Seconds are the median over the timed steps, of wall time up to the step's metrics. Peak memory is what
torch's allocator handed out on the rank with the most, next to the estimate of `--dry-run` without its share for
libraries.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from command_line import command, parser_of, positive, require_gpus, show, write_json
from measure import machine, provenance
from random_model import SHAPES
from trainer_case import CHECKPOINTING, Case, matmul_tflops, run_here, run_on_ranks

from telescope.trainer.worker import choose_device

RESHARD: dict[str, bool | str] = {"auto": "auto", "true": True, "false": False}


def main() -> int:
    parser = parser_of(__doc__, "the tiny shape on the CPU")
    add = parser.add_argument
    add("--shapes", nargs="+", choices=list(SHAPES), default=["0.6b"])
    add("--backend", nargs="+", choices=["fsdp", "megatron"], default=["fsdp"])
    add("--set", nargs="+", default=[], metavar="FIELD=VALUE", dest="options", help="further fields of the config")
    add("--ranks", type=positive, default=1, help="GPUs, with --quick processes on the CPU")
    add("--micro-batches", type=positive, default=1, help="micro-batches of each rank in a step")
    add("--tokens", nargs="+", type=positive, default=[16_384, 65_536], help="tokens of a micro-batch")
    add("--loads", nargs="+", choices=["single", "packed"], default=["single", "packed"])
    add("--checkpointing", nargs="+", choices=list(CHECKPOINTING), default=["selective"])
    add("--checkpointing-layers", nargs="+", type=int, default=[None], help="blocks that are recomputed")
    add("--reshard", nargs="+", choices=list(RESHARD), default=["auto"])
    add("--prefetch", nargs="+", type=int, default=[1], help="fsdp_prefetch_layers")
    add("--model-dtype", default="float32", help="dtype of weights and optimizer state")
    add("--no-compile", action="store_true", help="compile_blocks: false")
    add("--steps", type=positive, default=5, help="timed steps of a case")
    add("--warmup", type=int, default=3, help="steps before them, after compiling")
    add("--case-seconds", type=float, default=300, help="deadline of a case of several ranks")
    arguments = parser.parse_args()
    require_gpus(parser, quick=arguments.quick)
    if arguments.quick:
        arguments.shapes, arguments.tokens, arguments.steps, arguments.warmup = ["tiny"], [512, 2048], 3, 1
        arguments.checkpointing = list(CHECKPOINTING) if arguments.ranks == 1 else ["selective"]

    wanted_device = "cpu" if arguments.quick else "auto"
    device = choose_device(wanted_device, 0)
    matmul = matmul_tflops(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the ranks are separate processes
    rows: list[dict[str, Any]] = []
    where = provenance(["torch", "transformers"])
    report = {"where": where, "command": command(), "matmul_tflops": matmul}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for case in cases(arguments):
            if case.ranks == 1:
                found = run_here(case, wanted_device, matmul, folder)
            else:
                found = run_on_ranks(case, wanted_device, matmul, folder, arguments.case_seconds)
            rows.append(asdict(case) | {"tokens": case.num_tokens} | found)
            print(*cells(rows[-1]), sep=", ", file=sys.stderr, flush=True)
            write_json(arguments.json, report | {"cases": rows})
    titles = (
        "backend", "shape", "ranks", "tokens", "load", "recomputed", "reshard, ahead", "attention", "s/step",
        "tokens/s", "TFLOP/s", "MFU", "of matmul", "peak GiB", "estimate",
    )  # fmt: skip
    show(titles, map(cells, rows), width=155)
    print(f"matrix product: {matmul:.1f} TFLOP/s; {machine(where)}")
    return int(any("failed" in row for row in rows))


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Returns every combination of the arguments."""
    pairs = [option.partition("=") for option in arguments.options]
    options = tuple((name, yaml.safe_load(value)) for name, _, value in pairs)
    return [
        Case(
            shape, num_tokens, load, checkpointing, backend=backend, options=options, ranks=arguments.ranks,
            micro_batches=arguments.micro_batches,
            model_dtype=arguments.model_dtype, compiled=not arguments.no_compile, reshard=RESHARD[reshard],
            prefetch=prefetch, checkpointing_layers=layers, steps=arguments.steps, warmup=arguments.warmup,
        )
        for backend, shape, checkpointing, num_tokens, load, reshard, prefetch, layers in product(
            arguments.backend, arguments.shapes, arguments.checkpointing, arguments.tokens, arguments.loads,
            arguments.reshard, arguments.prefetch, arguments.checkpointing_layers,
        )
    ]  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """Returns a row of the table, without numbers for a case that has none."""
    recomputed = row["checkpointing"] + (f", {row['checkpointing_layers']}" if row["checkpointing_layers"] else "")
    head = [row["backend"], row["shape"], str(row["ranks"]), f"{row['tokens']:,}", row["load"], recomputed]
    head.append(f"{row['reshard']}, {row['prefetch']}".lower())
    if "seconds" not in row:
        return [*head, "", "out of memory" if "out_of_memory" in row else "failed"]
    return [
        *head, row["kernel"], f"{row['seconds']:.3f}", f"{row['tokens_per_second']:,.0f}", f"{row['tflops']:.1f}",
        f"{row['mfu']:.1%}", f"{row['share_of_matmul']:.1%}", f"{row['peak_gib']:.1f}" if "peak_gib" in row else "",
        f"{row['estimate_gib']:.1f}",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
