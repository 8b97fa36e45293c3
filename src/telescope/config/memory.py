"""How much memory a run needs, estimated from the model's shape: trainer per rank, engine per worker.

An estimate for choosing settings before the first start, not a bound: allocators fragment, libraries keep workspaces,
and both are given as one named item. Pure arithmetic; bytes everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from telescope.config.model_shape import DTYPE_BYTES, ModelShape

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

GIB = 1 << 30
CUDA_CONTEXT_BYTES = GIB  # CUDA context, NCCL buffers and cuBLAS workspaces of one process, together
ENGINE_WORKSPACE_BYTES = 2 * GIB  # vLLM's profiled peak of activations, and CUDA graphs
SHARE_OF_CPU_MEMORY_FOR_KV = 0.25


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of one trainer rank at its peak. FSDP shards parameters, gradients and optimizer over all ranks."""

    parameters: int
    gradients: int
    optimizer: int
    """AdamW: two moments, in the dtype of the parameters."""
    unsharded: int
    """The two largest gathered units (one in use, one prefetched) with the gradients of one."""
    activations: int
    """One micro-batch of `seq_len` tokens."""
    logprobs: int
    """The chunked pass over the output layer: a chunk of logits and its gradient in float32."""
    overhead: int

    @property
    def total(self) -> int:
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.unsharded
            + self.activations
            + self.logprobs
            + self.overhead
        )


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one worker of an inference server, and what its KV cache holds."""

    weights: int
    kv_cache: int | None
    """None where the GPU's memory is not known: vLLM takes what its share leaves."""
    overhead: int
    kv_bytes_per_token: int
    lanes_kv: int
    """KV cache that would hold every lane of the server at `max_model_len`. Less means queueing, not failure."""
    longest_sequence_kv: int
    """KV cache of one sequence of `max_model_len`: the least that works."""

    @property
    def tokens(self) -> int | None:
        """Tokens that the KV cache holds."""
        return None if self.kv_cache is None else self.kv_cache // self.kv_bytes_per_token

    @property
    def total(self) -> int | None:
        return None if self.kv_cache is None else self.weights + self.kv_cache + self.overhead


@dataclass(frozen=True)
class MemoryEstimate:
    """Both sides of the run."""

    trainer: TrainerMemory
    engine: EngineMemory
    problems: tuple[str, ...] = ()
    """What may not fit, each naming the field to change. Empty when all fits, or when the memory is not known."""
    kv_cache_problem: str | None = None
    """The KV cache does not hold one sequence, so that the engine would not start. Certain on the CPU, where the size
    of the cache is set; on GPUs an estimate, and among `problems`."""


def estimate_memory(
    config: TelescopeConfig,
    shape: ModelShape,
    *,
    device: Literal["cpu", "cuda"] = "cuda",
    device_memory_bytes: int | None = None,
) -> MemoryEstimate:
    """The estimate for one rank and one engine worker.

    `device_memory_bytes`: memory of one GPU, or of the node on a CPU (which all its workers share). None: not known.
    """
    trainer = _trainer_memory(config, shape, device)
    engine = _engine_memory(config, shape, device, device_memory_bytes)
    problems = _problems(config, trainer, engine, device, device_memory_bytes)
    kv_cache_problem = _kv_cache_problem(config, engine)
    if kv_cache_problem is not None and device == "cuda":
        problems.append(kv_cache_problem)
    return MemoryEstimate(trainer, engine, tuple(problems), kv_cache_problem)


def _trainer_memory(config: TelescopeConfig, shape: ModelShape, device: str) -> TrainerMemory:
    ranks = config.trainer_num_workers
    stored = DTYPE_BYTES[config.model_dtype]
    computed = DTYPE_BYTES[config.mixed_precision_dtype or config.model_dtype]
    shard = -(-shape.num_parameters // ranks)
    # The root unit holds the embeddings; tied or not, both are gathered together at the ends of the model.
    largest_unit = max(shape.parameters_per_layer, shape.embedding_parameters)
    unsharded = (largest_unit + shape.parameters_per_layer + largest_unit) * computed if ranks > 1 else 0
    tokens = config.seq_len
    layer_input = tokens * shape.hidden_size * computed
    layer = tokens * shape.activation_elements_per_token() * computed
    # Recomputed blocks keep their input and, unless that is recomputed too, what attention returned.
    attention = 0 if config.recompute_attention else tokens * shape.num_heads * shape.head_dim * computed
    recomputed = shape.num_layers * (layer_input + attention) + layer
    kept = recomputed if config.gradient_checkpointing else shape.num_layers * layer
    chunk = min(config.entropy_chunk_size, tokens)
    return TrainerMemory(
        parameters=shard * stored,
        gradients=shard * stored,
        optimizer=2 * shard * stored,
        unsharded=unsharded,
        activations=kept,
        logprobs=2 * chunk * shape.vocab_size * 4 + 2 * tokens * shape.hidden_size * 4,
        overhead=CUDA_CONTEXT_BYTES if device == "cuda" else 0,
    )


def _engine_memory(config: TelescopeConfig, shape: ModelShape, device: str, memory: int | None) -> EngineMemory:
    tensor_parallel = config.inference_tensor_parallel_size
    weights = -(-shape.num_parameters * DTYPE_BYTES[config.engine_dtype] // tensor_parallel)
    # KV heads are split over the workers, and repeated where there are fewer heads than workers.
    share = max(shape.num_kv_heads // tensor_parallel, 1) / shape.num_kv_heads
    per_token = int(shape.kv_bytes_per_token(config.engine_dtype) * share)
    lanes = config.max_num_seqs or config.lanes_per_server
    lanes_kv = lanes * config.max_model_len * per_token
    longest = config.max_model_len * per_token
    overhead = ENGINE_WORKSPACE_BYTES if device == "cuda" else 0
    kv_cache: int | None
    if device == "cpu":
        # vLLM takes whole GiB on the CPU.
        if config.inference_kv_cache_gib is not None:
            kv_cache = math.ceil(config.inference_kv_cache_gib) * GIB
        elif memory is None:
            kv_cache = None
        else:
            kv_cache = math.ceil(min(lanes_kv, memory * SHARE_OF_CPU_MEMORY_FOR_KV) / GIB) * GIB
    else:
        kv_cache = None if memory is None else max(int(memory * config.gpu_memory_utilization) - weights - overhead, 0)
    return EngineMemory(weights, kv_cache, overhead, per_token, lanes_kv, longest)


def _problems(
    config: TelescopeConfig, trainer: TrainerMemory, engine: EngineMemory, device: str, memory: int | None
) -> list[str]:
    problems: list[str] = []
    if memory is not None and device == "cuda" and trainer.total > memory:
        problems.append(
            f"A trainer worker needs about {trainer.total / GIB:.1f} GiB, and a GPU has {memory / GIB:.1f} GiB: raise "
            'trainer_num_workers, lower seq_len, or set model_dtype to "bfloat16".'
        )
    if memory is not None and device == "cpu":
        everything = trainer.total * config.trainer_num_workers
        everything += (engine.total or 0) * config.inference_num_workers
        if everything > memory:
            problems.append(
                f"All workers together need about {everything / GIB:.1f} GiB, and the machine has {memory / GIB:.1f} "
                "GiB: choose a smaller model, or lower seq_len, trainer_num_workers or inference_kv_cache_gib."
            )
    return problems


def _kv_cache_problem(config: TelescopeConfig, engine: EngineMemory) -> str | None:
    if engine.kv_cache is None or engine.kv_cache >= engine.longest_sequence_kv:
        return None
    return (
        f"max_model_len is {config.max_model_len}, but the KV cache of a server holds {engine.tokens:,} tokens. Lower "
        "max_model_len, or raise gpu_memory_utilization (on CPU inference_kv_cache_gib) or "
        "inference_tensor_parallel_size"
    )
