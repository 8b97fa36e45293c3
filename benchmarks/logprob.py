"""Compares the fused passes for logprob and entropy with plain PyTorch: time and peak memory.

    python benchmarks/logprob.py --quick              small shapes on the CPU
    python benchmarks/logprob.py --json results.json  the shapes of Qwen3 models on one GPU

"plain": float32 logits of all tokens, log_softmax, gather, autograd. "fused": the trainer's output layer,
`LogprobHead`. "in blocks": the same layer without the kernels that keep logits out of memory, as on GPUs other than
Hopper. All take bfloat16 hidden states and weights on a GPU (float32 on the CPU, where both fused passes are the same),
and both outputs have gradients. Peak memory is what a pass needs beyond its inputs; "beyond gradients" subtracts the
results that every pass needs: the gradients of hidden states and weight in their own dtypes, and the float32 sum of the
weight's gradient. A pass that does not fit into memory is reported as such.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measure import provenance, require_gpus
from rich.console import Console
from rich.table import Table
from torch import nn
from trainer import GIB, gpu_name

from telescope.trainer import logprob
from telescope.trainer.logprob import LogprobHead
from telescope.trainer.worker import choose_device

GPU_SHAPES = (
    (4_096, 1024),
    (16_384, 1024),
    (65_536, 1024),
    (16_384, 2560),
    (65_536, 2560),
    (16_384, 4096),
    (65_536, 4096),
)
"""(tokens, hidden size): Qwen3-0.6B, 4B and 8B."""
GPU_VOCABULARY = 151_936
CPU_SHAPES, CPU_VOCABULARY = ((128, 64), (512, 64)), 4_096

Pass = Callable[[torch.Tensor, nn.Parameter, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def fused(chunk_size: int) -> Pass:
    """Returns a pass through the trainer's own output layer."""

    def run(
        hidden_ND: torch.Tensor, weight_VD: nn.Parameter, targets_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprob_N, entropy_N = LogprobHead(weight_VD, None, chunk_size)(hidden_ND, targets_N, 1.0)
        return logprob_N, entropy_N

    return run


def plain(
    hidden_ND: torch.Tensor, weight_VD: nn.Parameter, targets_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes logits, log-softmax and entropy of all tokens at once, in float32."""
    logp_NV = (hidden_ND @ weight_VD.t()).float().log_softmax(dim=-1)
    entropy_N = -(logp_NV.exp() * logp_NV).sum(dim=-1)
    return logp_NV.gather(1, targets_N[:, None]).squeeze(1), entropy_N


def without_tiles() -> AbstractContextManager[object]:
    """Disables tiles, as on a GPU without tuned ones."""
    return patch.object(logprob, "TILED_CAPABILITIES", frozenset())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk-size", type=int, default=1024, help="entropy_chunk_size")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small shapes on the CPU")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    require_gpus(parser, quick=arguments.quick)
    device = choose_device("cpu" if arguments.quick else "auto", 0)
    on_gpu = device.type == "cuda"
    rows = []
    for num_tokens, width in GPU_SHAPES if on_gpu else CPU_SHAPES:
        head = fused(arguments.chunk_size)
        for name, run in (("fused", head), ("in blocks", head), ("plain", plain)):
            vocab = GPU_VOCABULARY if on_gpu else CPU_VOCABULARY
            row = {"pass": name, "tokens": num_tokens, "hidden": width, "vocabulary": vocab}
            with without_tiles() if name == "in blocks" else nullcontext():
                row |= measure(run, num_tokens, width, vocab, device, arguments.repeats)
            rows.append(row)
            print(json.dumps(row), flush=True)
            if on_gpu:
                torch.cuda.empty_cache()
    if arguments.json:
        where = provenance(["torch"]) | {"gpu": gpu_name(device)}
        report = {"where": where, "chunk_size": arguments.chunk_size, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print_table(rows)
    return 0


def measure(run: Pass, num_tokens: int, width: int, vocab: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """Returns median times of forward and backward, and on a GPU the peak memory of both."""
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    torch.manual_seed(0)
    hidden_ND = torch.randn(num_tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight_VD = nn.Parameter(torch.randn(vocab, width, device=device, dtype=dtype) * width**-0.5)
    targets_N = torch.randint(0, vocab, (num_tokens,), device=device)
    scale_N = torch.randn(num_tokens, device=device)
    forward, backward, peaks = [], [], []
    try:
        for _ in range(repeats + 1):
            hidden_ND.grad = weight_VD.grad = None
            before = _start(on_gpu)
            started = _now(on_gpu)
            logprob_N, entropy_N = run(hidden_ND, weight_VD, targets_N)
            loss = (scale_N * logprob_N).sum() + 0.01 * entropy_N.sum()
            middle = _now(on_gpu)
            loss.backward()
            ended = _now(on_gpu)
            forward.append(middle - started)
            backward.append(ended - middle)
            peaks.append(torch.cuda.max_memory_allocated() - before if on_gpu else 0)
            del logprob_N, entropy_N, loss
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    needed = (hidden_ND.numel() + weight_VD.numel()) * hidden_ND.element_size() + weight_VD.numel() * 4
    row = {"forward_ms": 1e3 * statistics.median(forward[1:]), "backward_ms": 1e3 * statistics.median(backward[1:])}
    if on_gpu:
        row |= {"peak_gib": max(peaks[1:]) / GIB, "beyond_gradients_gib": (max(peaks[1:]) - needed) / GIB}
    return row


def _start(on_gpu: bool) -> int:
    if not on_gpu:
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "tokens", "hidden", "vocabulary", "pass", "forward ms", "backward ms", "peak GiB", "beyond gradients GiB"
    )
    for row in rows:
        head = [f"{row[name]:,}" for name in ("tokens", "hidden", "vocabulary")] + [row["pass"]]
        if "out_of_memory" in row:
            table.add_row(*head, "out of memory")
            continue
        memory = [f"{row[name]:.2f}" if name in row else "" for name in ("peak_gib", "beyond_gradients_gib")]
        table.add_row(*head, f"{row['forward_ms']:.1f}", f"{row['backward_ms']:.1f}", *memory)
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
