"""How fast a training step is, and what it takes: tokens/s, model FLOPs utilisation, peak memory.

    python benchmarks/trainer.py --quick                                     a tiny model on the CPU, half a minute
    python benchmarks/trainer.py --shapes 0.6b --tokens 16384 65536          on one GPU
    python benchmarks/trainer.py --shapes 4b --model-dtype bfloat16 --json results.json

Runs `Trainer.train_step`, the very call that a training run makes, on one rank with random weights of a true shape: a
step is one micro-batch of the given tokens, forward, backward, gradient norm, clipping and AdamW. Two loads: `single`,
one sequence of the whole length, and `packed`, answers of log-normal length (mean 1,000 tokens, sigma 0.8, at most
8,192) laid end to end. All tokens but each sequence's first are trained.

Model FLOPs of a step: 6 N per token, N being all parameters but the embedding table, the output layer included (also
where it shares the table), plus causal attention, 6 x layers x heads x head dimension x length per token of a sequence
of that length. What is computed twice, by choice or by the backward pass of attention and of the output layer, does
not count. The utilisation is a share of 989 TFLOP/s (H100, bfloat16, without sparsity), and of the matrix product that
is measured in the same run. Seconds are the median over the timed steps, of wall time up to the step's metrics.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import provenance
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config

from telescope.config import TelescopeConfig
from telescope.trainer.batch import StepInput, TrainSample
from telescope.trainer.packing import pack_step
from telescope.trainer.worker import Trainer, choose_device

PEAK_TFLOPS = 989.0
"""H100 SXM, dense bfloat16."""
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
MEAN_ANSWER, SIGMA_ANSWER, LONGEST_ANSWER = 1000, 0.8, 8192
GIB = 2**30

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2048, "tie_word_embeddings": True,
    },
    "0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "4b": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False,
    },
    "14b": {
        "hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 40, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False,
    },
    "32b": {
        "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Those of Qwen3 (Qwen3 Technical Report, arXiv:2505.09388), and one that a CPU can train."""

CHECKPOINTING = {
    "none": {"gradient_checkpointing": False},
    "selective": {"gradient_checkpointing": True},
    "full": {"gradient_checkpointing": True, "recompute_attention": True},
}


@dataclass(slots=True, frozen=True)
class Case:
    shape: str
    num_tokens: int
    load: str
    checkpointing: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.6b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[16_384, 65_536], help="tokens of the micro-batch")
    parser.add_argument("--loads", nargs="+", choices=["single", "packed"], default=["single", "packed"])
    parser.add_argument("--checkpointing", nargs="+", choices=list(CHECKPOINTING), default=["selective"])
    parser.add_argument("--model-dtype", default="float32", help="of weights and optimizer state")
    parser.add_argument("--chunk-size", type=int, default=1024, help="entropy_chunk_size")
    parser.add_argument("--no-compile", action="store_true", help="compile_blocks: false")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a case")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them, the compiling one among them")
    parser.add_argument("--quick", action="store_true", help="the tiny shape on the CPU")
    parser.add_argument("--json", type=Path, help="write the results here, after every case")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.shapes, arguments.tokens, arguments.steps, arguments.warmup = ["tiny"], [512, 2048], 3, 1
        arguments.checkpointing = list(CHECKPOINTING)

    device = choose_device("cpu" if arguments.quick else "auto", 0)
    matmul = matmul_tflops(device)
    report: dict[str, Any] = {
        "where": provenance(["torch", "transformers"]) | {"gpu": gpu_name(device)},
        "command": " ".join(["benchmarks/trainer.py", *sys.argv[1:]]),
        "matmul_tflops": matmul,
        "cases": [],
    }
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            write_model(SHAPES[shape], Path(folder), device)
            for checkpointing in arguments.checkpointing:
                for num_tokens in arguments.tokens:
                    for load in arguments.loads:
                        case = Case(shape, num_tokens, load, checkpointing)
                        report["cases"].append(run(case, folder, device, matmul, arguments))
                        if arguments.json:
                            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report)
    return 0


def run(case: Case, model: str, device: torch.device, matmul: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """One row of the report; a case that does not fit the memory has `out_of_memory` instead of numbers."""
    row: dict[str, Any] = {
        "shape": case.shape,
        "tokens": case.num_tokens,
        "load": case.load,
        "checkpointing": case.checkpointing,
        "model_dtype": arguments.model_dtype,
        "compiled": not arguments.no_compile,
    }
    trainer = make_trainer(case, model, device, arguments)
    try:
        row |= time_steps(trainer, case, device, matmul, arguments)
    except torch.OutOfMemoryError:
        row["out_of_memory"] = True
    finally:
        trainer.shutdown()
        del trainer
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(json.dumps(row), flush=True)
    return row


def make_trainer(case: Case, model: str, device: torch.device, arguments: argparse.Namespace) -> Trainer:
    """A rank like those of a training run, but for its mixed precision on the CPU."""
    config = TelescopeConfig(
        model=model,
        environments=[{"name": "countdown"}],  # type: ignore[list-item]
        model_dtype=arguments.model_dtype,
        mixed_precision_dtype="bfloat16" if device.type == "cuda" else None,
        device=device.type,  # type: ignore[arg-type]
        entropy_chunk_size=arguments.chunk_size,
        compile_blocks=not arguments.no_compile,
        seq_len=case.num_tokens,
        max_model_len=case.num_tokens,
        max_tokens=case.num_tokens // 2,
        **CHECKPOINTING[case.checkpointing],  # type: ignore[arg-type]
    )
    trainer = Trainer(config, 0, 1, "127.0.0.1", free_port())
    trainer.setup()
    return trainer


def time_steps(
    trainer: Trainer, case: Case, device: torch.device, matmul: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    lengths = [case.num_tokens] if case.load == "single" else answer_lengths(case.num_tokens)
    seconds, steps = [], []
    for step in range(arguments.warmup + arguments.steps):
        batch = make_batch(lengths, SHAPES[case.shape]["vocab_size"], case.num_tokens, step)
        if device.type == "cuda":
            torch.cuda.synchronize()
            if step == arguments.warmup:
                torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        steps.append(trainer.train_step(batch).metrics)
        seconds.append(time.perf_counter() - started)
    timed = seconds[arguments.warmup :]
    flops = model_flops(SHAPES[case.shape], lengths)
    tflops = flops / statistics.median(timed) / 1e12
    times = {
        name: statistics.median(m[name] for m in steps[arguments.warmup :]) for name in steps[-1] if "_total" in name
    }
    row = {
        "sequences": len(lengths),
        "seconds": statistics.median(timed),
        "seconds_min": min(timed),
        "seconds_max": max(timed),
        "first_step_seconds": seconds[0],
        "tokens_per_second": case.num_tokens / statistics.median(timed),
        "tflops": tflops,
        "mfu": tflops / PEAK_TFLOPS,
        "share_of_matmul": tflops / matmul,
        "kernel": trainer.backend.kernel,  # type: ignore[attr-defined]
        "timing": {name: value for name, value in times.items() if value},
    }
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return row


def answer_lengths(num_tokens: int, seed: int = 0) -> list[int]:
    """Log-normal lengths that add up to `num_tokens`; the last is cut to fit."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (missing := num_tokens - sum(lengths)) > 1:
        drawn = rng.lognormal(np.log(MEAN_ANSWER) - SIGMA_ANSWER**2 / 2, SIGMA_ANSWER)
        lengths.append(min(missing, max(2, min(LONGEST_ANSWER, int(drawn)))))
    return lengths


def make_batch(lengths: list[int], vocab_size: int, seq_len: int, step: int) -> StepInput:
    """One micro-batch in which every token but the first of each sequence is trained."""
    rng = np.random.default_rng(step)
    samples = []
    for index, length in enumerate(lengths):
        trained_L = np.arange(length) > 0
        samples.append(
            TrainSample(
                sample_id=f"s{index}",
                group_id=0,
                environment="countdown",
                token_ids_L=rng.integers(0, vocab_size, length),
                trained_L=trained_L,
                engine_logprob_L=np.where(trained_L, -np.log(vocab_size), 0.0),
                version_L=np.where(trained_L, step, -1),
                reward=0.0,
                advantage=float(rng.normal()),
            )
        )
    (batch,) = pack_step(samples, step=step, version=step, seq_len=seq_len, num_ranks=1, pad_to_multiple_of=64)
    assert len(batch.minibatches[0].micro_batches) == 1
    return batch


def model_flops(shape: dict[str, Any], lengths: list[int]) -> float:
    """Floating-point operations of forward and backward that the model needs, whatever is computed twice."""
    width, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    queries, keys = shape["num_attention_heads"] * shape["head_dim"], shape["num_key_value_heads"] * shape["head_dim"]
    per_layer = width * (2 * queries + 2 * keys) + 3 * width * inner + 2 * width + 2 * shape["head_dim"]
    parameters = layers * per_layer + width + width * shape["vocab_size"]
    attention = 6 * layers * queries * sum(length * length for length in lengths)
    return 6.0 * parameters * sum(lengths) + attention


def write_model(shape: dict[str, Any], folder: Path, device: torch.device) -> None:
    """A checkpoint with random bfloat16 weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape, max_position_embeddings=131_072, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def matmul_tflops(device: torch.device) -> float:
    """Rate of one large square product, in the dtype that the model computes in."""
    size = MATMUL_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(20):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(10):
            left @ right
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - started) / 10)
    return 2 * size**3 / statistics.median(seconds) / 1e12


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gpu_name(device: torch.device) -> str | None:
    """Name and driver, None on the CPU."""
    if device.type == "cpu" or shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def print_table(report: dict[str, Any]) -> None:
    table = Table(
        "shape", "tokens", "load", "checkpointing", "s/step", "tokens/s", "TFLOP/s", "MFU", "of matmul", "peak GiB"
    )
    for row in report["cases"]:
        head = [row["shape"], f"{row['tokens']:,}", row["load"], row["checkpointing"]]
        if "out_of_memory" in row:
            table.add_row(*head, "out of memory")
            continue
        table.add_row(
            *head, f"{row['seconds']:.3f}", f"{row['tokens_per_second']:,.0f}", f"{row['tflops']:.1f}",
            f"{row['mfu']:.1%}", f"{row['share_of_matmul']:.1%}", f"{row.get('peak_gib', float('nan')):.1f}",
        )  # fmt: skip
    console = Console(width=140)
    console.print(table)
    console.print(
        f"matrix product: {report['matmul_tflops']:.1f} TFLOP/s; {report['where']['gpu'] or report['where']['cpu']}"
    )


if __name__ == "__main__":
    sys.exit(main())
