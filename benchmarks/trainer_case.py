"""One case of the trainer benchmark: a model of a real shape, a load, and its ranks.

Owns shapes, loads, the count of floating-point operations, and timing steps on the ranks. Does not own the choice of
cases nor the report (`trainer`).
"""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import multiprocessing.connection
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from random_model import SHAPES, config_of
from transformers import AutoModelForCausalLM

from telescope.config import TelescopeConfig
from telescope.config.memory import recomputes_attention, trainer_memory
from telescope.config.model_shape import ModelShape
from telescope.trainer.backends.fsdp import sharding
from telescope.trainer.batch import MicroBatch, OptimizerStepBatch, StepInput, TrainSample
from telescope.trainer.model import PREFIX, PolicyModel, load_causal_lm
from telescope.trainer.packing import pack_step, untrained_sample
from telescope.trainer.worker import Trainer, choose_device

PEAK_TFLOPS = 989.0
"""H100 SXM, dense bfloat16."""
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
MEAN_ANSWER, SIGMA_ANSWER, LONGEST_ANSWER = 1000, 0.8, 8192
GIB = 2**30
OUT_OF_MEMORY = 3
"""Exit code of a rank that runs out of memory."""

SHARING = (
    "fsdp_context_parallel_size", "megatron_tensor_parallel_size", "megatron_pipeline_parallel_size",
    "megatron_context_parallel_size",
)  # fmt: skip
"""Fields whose product is the number of ranks that share a row."""

CHECKPOINTING = {
    "none": {"gradient_checkpointing": False},
    "selective": {"gradient_checkpointing": True, "recompute_attention": False},
    "full": {"gradient_checkpointing": True, "recompute_attention": True},
}


@dataclass(slots=True, frozen=True)
class Case:
    """A model, a load and the number of steps."""

    shape: str
    num_tokens: int
    """Tokens of one micro-batch of one rank."""
    load: str
    checkpointing: str
    ranks: int = 1
    micro_batches: int = 1
    """Micro-batches of each rank in a step."""
    model_dtype: str = "float32"
    compiled: bool = True
    reshard: bool | str = "auto"
    prefetch: int = 1
    backend: str = "fsdp"
    options: tuple[tuple[str, Any], ...] = ()
    """Further fields of the config, such as the parallel sizes of Megatron."""
    checkpointing_layers: int | None = None
    """Number of recomputed blocks; None: all, unless `checkpointing` is none."""
    steps: int = 5
    warmup: int = 3

    @property
    def lengths(self) -> list[int]:
        """Sequence lengths of a micro-batch. All micro-batches are alike, so that no rank waits for a longer one."""
        return [self.num_tokens] if self.load == "single" else answer_lengths(self.num_tokens)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, each counted once where several ranks share a row."""
        return self.num_tokens * self.data_ranks * self.micro_batches

    @property
    def data_ranks(self) -> int:
        """Ranks with rows of their own."""
        sizes = [int(value) for name, value in self.options if name in SHARING]
        return self.ranks // math.prod(sizes)


def run_here(
    case: Case,
    wanted_device: str,
    matmul: float,
    folder: Path,
    afterwards: Callable[[Trainer], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Measures a case of one rank in this process; `out_of_memory` if it does not fit.

    Adds what `afterwards` returns for the trainer after its steps.
    """
    device, trainer = choose_device(wanted_device, 0), None
    try:
        trainer = make_trainer(case, device, folder, 0, 0)
        found = time_steps(trainer, case, device, matmul)
        return found if afterwards is None else found | afterwards(trainer)
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    finally:
        if trainer is not None:
            trainer.shutdown()
        del trainer
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def run_on_ranks(case: Case, wanted_device: str, matmul: float, folder: Path, deadline: float) -> dict[str, Any]:
    """Measures a case on several ranks, each in a new process. When one exits early, the others are killed."""
    results = folder / "numbers.json"
    results.unlink(missing_ok=True)
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    arguments = (case, wanted_device, matmul, folder, port)
    processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(case.ranks)]
    for process in processes:
        process.start()
    ends = time.monotonic() + deadline
    try:
        while any(process.is_alive() for process in processes) and time.monotonic() < ends:
            if any(process.exitcode for process in processes):
                break  # the others would wait for it
            multiprocessing.connection.wait([p.sentinel for p in processes if p.is_alive()], timeout=1.0)
    finally:
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
    if OUT_OF_MEMORY in codes:
        return {"out_of_memory": True}
    if not results.exists():
        return {"failed": f"exit codes of the ranks after {deadline:.0f} s at most: {codes}"}
    return json.loads(results.read_text())


def _rank(rank: int, case: Case, wanted_device: str, matmul: float, folder: Path, port: int) -> None:
    device = choose_device(wanted_device, rank)
    try:
        trainer = make_trainer(case, device, folder, rank, port)
        found = time_steps(trainer, case, device, matmul)
    except torch.OutOfMemoryError:
        raise SystemExit(OUT_OF_MEMORY) from None
    if rank == 0:
        partial = folder / "numbers.part"
        partial.write_text(json.dumps(found))
        partial.rename(folder / "numbers.json")
    trainer.shutdown()


def make_trainer(case: Case, device: torch.device, folder: Path, rank: int, port: int) -> Trainer:
    """Returns a rank as in a training run, except for mixed precision on the CPU and random weights, which are drawn in
    place: writing and reading those of a large model takes minutes."""
    config_of(case.shape).save_pretrained(folder)
    load = load_causal_lm

    def without_weights(model: str, dtype: torch.dtype, *, with_weights: bool, **options: Any) -> Any:
        return None if with_weights else load(model, dtype, with_weights=False, **options)

    if case.backend == "megatron":
        from telescope.trainer.backends.megatron import backend, conversion

        backend.model_folder = Path
        conversion.Conversion.load = draw_stage  # type: ignore[method-assign, assignment]
    else:
        sharding.load_causal_lm = without_weights
        sharding.fill = draw_weights
    config = make_config(case, device, folder)
    if device.type == "cuda":
        torch.set_num_threads(int(config.ray_trainer_cpus_per_worker))  # as Ray does for a rank of a run
    trainer = Trainer(config, rank, case.ranks, "127.0.0.1", port)
    trainer.setup()
    return trainer


@torch.no_grad()
def draw_weights(policy: PolicyModel, source: Any, mesh: Any, device: torch.device) -> None:
    """Replaces `sharding.fill`: matrices of small random numbers, norms of ones, correct buffers."""
    torch.manual_seed(dist.get_rank())
    for parameter in policy.parameters():
        local = sharding.local_tensor(parameter)
        if parameter.ndim > 1:
            local.normal_(0.0, 0.02)
        else:
            local.fill_(1.0)
    # Buffers (rotary frequencies) depend on neither depth nor vocabulary.
    smallest = policy.causal_lm.config.to_dict() | {
        "num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8, "layer_types": None,
        "num_experts": 2, "num_experts_per_tok": 1,
    }  # fmt: skip
    buffers = dict(AutoModelForCausalLM.from_config(type(policy.causal_lm.config)(**smallest)).named_buffers())
    for name, buffer in policy.named_buffers():
        buffer.copy_(buffers[name.removeprefix(PREFIX)])


@torch.no_grad()
def draw_stage(_: Any, stage: torch.nn.Module, folder: Path) -> None:
    """Replaces `Conversion.load` of Megatron, with weights as `draw_weights` has them."""
    torch.manual_seed(dist.get_rank())
    for parameter in stage.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.02)
        else:
            parameter.fill_(1.0)


def make_config(case: Case, device: torch.device, folder: Path) -> TelescopeConfig:
    settings: dict[str, Any] = {
        "model": str(folder),
        "environments": [{"name": "countdown"}],
        "train_backend": case.backend,
        "trainer_num_workers": case.ranks,
        "model_dtype": case.model_dtype,
        "mixed_precision_dtype": "bfloat16" if device.type == "cuda" else None,
        "device": device.type,
        "compile_blocks": case.compiled,
        "fsdp_reshard_after_forward": case.reshard,
        "fsdp_prefetch_layers": case.prefetch,
        "gradient_checkpointing_layers": case.checkpointing_layers,
        "seq_len": case.num_tokens,
        "max_model_len": case.num_tokens,
        "max_tokens": case.num_tokens // 2,
        "compare_first_steps": 0,  # the rows' logprobs are random
    }
    if case.backend == "megatron":
        recomputation = {"megatron_gradient_checkpointing": case.checkpointing == "full"}
    else:
        recomputation = CHECKPOINTING[case.checkpointing]
    return TelescopeConfig(**(settings | recomputation | dict(case.options)))


def time_steps(trainer: Trainer, case: Case, device: torch.device, matmul: float) -> dict[str, Any]:
    """Returns the numbers of a case, equal on every rank except for the seconds. Collective."""
    shape, seconds, steps = SHAPES[case.shape], [], []
    compiling = compile_seconds(trainer)
    rows = [make_row(case, index) for index in range(case.micro_batches)]
    for step in range(case.warmup + case.steps):
        now(device)
        if step == case.warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        started = time.perf_counter()
        steps.append(trainer.train_step(make_step(case, rows, step)).metrics)
        seconds.append(time.perf_counter() - started)
    timed = seconds[case.warmup :]
    frozen = bool(trainer.config.lora_rank)
    flops = model_flops(shape, case.lengths, frozen=frozen) * case.micro_batches * case.data_ranks
    tflops = flops / statistics.median(timed) / 1e12 / case.ranks
    times = {name: statistics.median(m[name] for m in steps[case.warmup :]) for name in steps[-1] if "_total" in name}
    row = {
        "sequences": len(case.lengths),
        "seconds": statistics.median(timed),
        "seconds_min": min(timed),
        "seconds_max": max(timed),
        "first_step_seconds": seconds[0],
        "tokens_per_second": case.tokens_per_step / statistics.median(timed),
        "tflops": tflops,
        "mfu": tflops / PEAK_TFLOPS,
        "share_of_matmul": tflops / matmul,
        "kernel": trainer.backend.kernel,  # type: ignore[attr-defined]
        "timing": {name: value for name, value in times.items() if value},
    }
    return row | compiling | memory_of_ranks(trainer, device)


def compile_seconds(trainer: Trainer) -> dict[str, Any]:
    """Returns the seconds of a warm-up, and torch's count of its phases, some of which contain others. Collective."""
    if not trainer.backend.compiles:
        return {}
    from torch._dynamo.utils import calculate_time_spent

    span = trainer.warm_up()
    return {"compile_seconds": span.end - span.start, "compile_phases": calculate_time_spent()}


def memory_of_ranks(trainer: Trainer, device: torch.device) -> dict[str, Any]:
    """Returns the estimate without libraries, and on GPUs each rank's allocator peak. Collective."""
    text = (Path(trainer.config.model) / "config.json").read_text()
    shape = ModelShape.from_config(json.loads(text))
    assert shape is not None
    attention = recomputes_attention(trainer.config.recompute_attention, trainer.config, shape, None)
    kind: Literal["cuda", "cpu"] = "cuda" if device.type == "cuda" else "cpu"
    estimate = trainer_memory(trainer.config, shape, kind, recompute_attention=attention)
    row: dict[str, Any] = {"estimate_gib": (estimate.total - estimate.overhead) / GIB}
    if device.type == "cuda":
        mine = (torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB)
        ranks: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(ranks, mine)
        row |= {"peak_gib": max(peak for peak, _ in ranks), "peak_reserved_gib": max(held for _, held in ranks)}
        row |= {"peak_gib_of_ranks": [peak for peak, _ in ranks]}
    return row


def make_row(case: Case, seed: int) -> MicroBatch:
    """Returns a micro-batch in which all tokens but the first of each sequence are trained."""
    samples = random_samples(case.lengths, SHAPES[case.shape]["vocab_size"], seed)
    (batch,) = pack_step(samples, step=0, version=0, seq_len=case.num_tokens, num_ranks=1, pad_to_multiple_of=64)
    (row,) = batch.minibatches[0].micro_batches
    return row


def random_samples(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[TrainSample]:
    """Returns samples of random tokens with random advantages, and the logprobs of an even distribution."""
    rng = np.random.default_rng(seed)
    samples = [untrained_sample(f"s{i}", rng.integers(0, vocab_size, length)) for i, length in enumerate(lengths)]
    for sample in samples:
        sample.engine_logprob_L = np.where(sample.trained_L, -np.log(vocab_size), 0.0)
        sample.advantage = float(rng.normal())
    return samples


def make_step(case: Case, rows: list[MicroBatch], step: int) -> StepInput:
    """Returns the input of one rank; all ranks have the same."""
    trained = sum(int(row.trained_T.sum()) for row in rows) * case.data_ranks
    samples = sum(len(row.sample_ids) for row in rows) * case.data_ranks
    return StepInput(step, 0, [OptimizerStepBatch(list(rows), trained, samples)])


def answer_lengths(num_tokens: int, seed: int = 0) -> list[int]:
    """Returns log-normal lengths that add up to `num_tokens`; the last is cut to fit."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (missing := num_tokens - sum(lengths)) > 1:
        drawn = rng.lognormal(np.log(MEAN_ANSWER) - SIGMA_ANSWER**2 / 2, SIGMA_ANSWER)
        lengths.append(min(missing, max(2, min(LONGEST_ANSWER, int(drawn)))))
    return lengths


def model_flops(shape: dict[str, Any], lengths: list[int], *, frozen: bool = False) -> float:
    """Returns floating-point operations of forward and backward, recomputation not counted.

    `frozen`: weights have no gradients, as with LoRA, whose adapters are too small to count.
    """
    width, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    head_dim = shape.get("head_dim", width // shape["num_attention_heads"])
    queries, keys = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    if experts := shape.get("num_experts_per_tok"):  # those that see a token, and the router
        inner = experts * shape["moe_intermediate_size"] + shape["num_experts"] / 3
    per_layer = width * (2 * queries + 2 * keys) + 3 * width * inner + 2 * width + 2 * head_dim
    parameters = layers * per_layer + width + width * shape["vocab_size"]
    attention = 6 * layers * queries * sum(length * length for length in lengths)
    return (4.0 if frozen else 6.0) * parameters * sum(lengths) + attention


def matmul_tflops(device: torch.device) -> float:
    """Returns TFLOP/s of one large square product in the model's dtype."""
    size = MATMUL_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(20):
        started = now(device)
        for _ in range(10):
            left @ right
        seconds.append((now(device) - started) / 10)
    return 2 * size**3 / statistics.median(seconds) / 1e12


def now(device: torch.device) -> float:
    """Returns the time in seconds when everything before is computed."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
