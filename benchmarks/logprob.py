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

import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from command_line import parser_of, require_gpus, show, write_json
from measure import provenance
from torch import nn
from trainer_case import GIB, now

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
CHUNK_SIZE, REPEATS = 1024, 5
CPU_SHAPES, CPU_VOCABULARY = ((128, 64), (512, 64)), 4_096

Pass = Callable[[torch.Tensor, nn.Parameter, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def fused(
    hidden_ND: torch.Tensor, weight_VD: nn.Parameter, targets_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Passes through the trainer's own output layer."""
    logprob_N, entropy_N = LogprobHead(weight_VD, None, CHUNK_SIZE)(hidden_ND, targets_N, 1.0)
    return logprob_N, entropy_N


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
    parser = parser_of(__doc__, "small shapes on the CPU")
    arguments = parser.parse_args()
    require_gpus(parser, quick=arguments.quick)
    device = choose_device("cpu" if arguments.quick else "auto", 0)
    on_gpu = device.type == "cuda"
    vocab = GPU_VOCABULARY if on_gpu else CPU_VOCABULARY
    rows = []
    for num_tokens, width in GPU_SHAPES if on_gpu else CPU_SHAPES:
        for name, run in (("fused", fused), ("in blocks", fused), ("plain", plain)):
            row = {"pass": name, "tokens": num_tokens, "hidden": width, "vocabulary": vocab}
            with without_tiles() if name == "in blocks" else nullcontext():
                row |= measure(run, num_tokens, width, vocab, device)
            rows.append(row)
            print(row, flush=True)
            if on_gpu:
                torch.cuda.empty_cache()
    write_json(arguments.json, {"where": provenance(["torch"]), "chunk_size": CHUNK_SIZE, "rows": rows})
    titles = ("pass", "tokens", "hidden", "vocabulary", "forward ms", "backward ms", "peak GiB", "beyond gradients GiB")
    show(titles, map(cells, rows))
    return 0


def measure(run: Pass, num_tokens: int, width: int, vocab: int, device: torch.device) -> dict[str, Any]:
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
        for _ in range(REPEATS + 1):
            hidden_ND.grad = weight_VD.grad = None
            started = now(device)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if on_gpu else 0
            logprob_N, entropy_N = run(hidden_ND, weight_VD, targets_N)
            loss = (scale_N * logprob_N).sum() + 0.01 * entropy_N.sum()
            middle = now(device)
            loss.backward()
            ended = now(device)
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


def cells(row: dict[str, Any]) -> list[str]:
    """Returns a row of the table."""
    head = [row["pass"], *(f"{row[name]:,}" for name in ("tokens", "hidden", "vocabulary"))]
    if "out_of_memory" in row:
        return [*head, "out of memory"]
    memory = [f"{row[name]:.2f}" if name in row else "" for name in ("peak_gib", "beyond_gradients_gib")]
    return [*head, f"{row['forward_ms']:.1f}", f"{row['backward_ms']:.1f}", *memory]


if __name__ == "__main__":
    sys.exit(main())
