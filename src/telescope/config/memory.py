"""How much memory a run needs, estimated from the model's shape: per engine worker, and per rank (`trainer_memory`).

An estimate for choosing settings before the first start, not a bound: allocators fragment, libraries keep workspaces,
and both are given as one named item. Pure arithmetic; bytes everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from telescope.config.model_shape import DTYPE_BYTES, ModelShape
from telescope.config.trainer_memory import CUDA_CONTEXT_BYTES, GIB, TrainerMemory, trainer_memory

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

ENGINE_WORKSPACE_BYTES = 2 * GIB  # vLLM's profiled peak of activations, and CUDA graphs
SHARE_OF_CPU_MEMORY_FOR_KV = 0.25


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one worker of an inference server, and what its KV cache holds."""

    weights: int
    shadows: int
    """The second copy of the weights that a sync is received into, and two buckets. 0: weights come in place."""
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
        return None if self.kv_cache is None else self.weights + self.shadows + self.kv_cache + self.overhead


@dataclass(frozen=True)
class ShadowPlan:
    """Whether a server on a GPU is given its weights in the background: bytes to keep free of KV cache for that, or
    why they come in place."""

    num_bytes: int
    in_place_because: str | None = None


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
    trainer = trainer_memory(config, shape, device)
    engine = _engine_memory(config, shape, device, device_memory_bytes)
    problems = _problems(config, trainer, engine, device, device_memory_bytes)
    kv_cache_problem = _kv_cache_problem(config, engine)
    if kv_cache_problem is not None and device == "cuda":
        problems.append(kv_cache_problem)
    return MemoryEstimate(trainer, engine, tuple(problems), kv_cache_problem)


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
    shadows = 0
    kv_cache: int | None
    if device == "cpu":
        # vLLM takes whole GiB on the CPU.
        if config.inference_kv_cache_gib is not None:
            kv_cache = math.ceil(config.inference_kv_cache_gib / tensor_parallel) * GIB
        elif memory is None:
            kv_cache = None
        else:
            kv_cache = math.ceil(min(lanes_kv, memory * SHARE_OF_CPU_MEMORY_FOR_KV) / GIB) * GIB
    else:
        shadows = plan_shadows(config, shape, memory).num_bytes
        room = None if memory is None else int(memory * config.gpu_memory_utilization) - weights - overhead
        kv_cache = None if room is None else max(room - shadows, 0)
    return EngineMemory(weights, shadows, kv_cache, overhead, per_token, lanes_kv, longest)


def plan_shadows(config: TelescopeConfig, shape: ModelShape | None, memory: int | None) -> ShadowPlan:
    """What `weight_transfer` comes to on a GPU of `memory` bytes.

    `auto` takes the background where that leaves KV cache for all lanes at full length, or half of what there would be.
    `background` is taken at its word here, so that its price is known even where `memory` is not; a KV cache that is
    then too small is a problem like any other.
    """
    if config.weight_transfer == "in_place":
        return ShadowPlan(0, "weight_transfer is in_place")
    if config.inference_tensor_parallel_size > 1:
        return ShadowPlan(0, "collectives of a tensor-parallel engine must not run beside a transfer")
    if shape is not None and shape.num_experts:
        return ShadowPlan(0, "the model has experts")
    wanted = config.weight_transfer == "background"
    if shape is None or (memory is None and not wanted):
        why = f"the {'sizes of the model' if shape is None else 'memory of the GPU'} could not be read beforehand"
        return ShadowPlan(0, None if wanted else why)
    item = DTYPE_BYTES[config.engine_dtype]
    weights = shape.num_parameters * item
    bucket = config.weight_broadcast_bucket_mb << 20
    matrix = max(bucket, shape.vocab_size * shape.hidden_size * item)  # a larger tensor has a bucket of its own
    needed = weights + matrix + (bucket if shape.tied_embeddings else matrix)
    if memory is None or wanted:
        return ShadowPlan(needed)
    without = int(memory * config.gpu_memory_utilization) - weights - ENGINE_WORKSPACE_BYTES
    lanes = config.max_num_seqs or config.lanes_per_server
    lanes_kv = lanes * config.max_model_len * shape.kv_bytes_per_token(config.engine_dtype)
    if without - needed < min(lanes_kv, without // 2):
        return ShadowPlan(
            0,
            f"a second copy of the weights takes {needed / GIB:.1f} GiB of the {max(without, 0) / GIB:.1f} GiB that "
            "gpu_memory_utilization leaves for the KV cache",
        )
    return ShadowPlan(needed)


def trainer_share(config: TelescopeConfig, memory: int) -> int:
    """Bytes that torch may allocate in a rank that shares a GPU of `memory` bytes with a server.

    What `gpu_memory_utilization` leaves, less the CUDA contexts of both processes: neither torch nor vLLM counts its
    own, and a server that is started again must find its whole share free.
    """
    return max(int(memory * (1 - config.gpu_memory_utilization)) - 2 * CUDA_CONTEXT_BYTES, 0)


def _problems(
    config: TelescopeConfig, trainer: TrainerMemory, engine: EngineMemory, device: str, memory: int | None
) -> list[str]:
    problems: list[str] = []
    shared = config.share_gpus and device == "cuda"
    left = trainer_share(config, memory or 0) + CUDA_CONTEXT_BYTES  # with the rank's own context, as in its total
    if shared and memory is not None and trainer.total > left:
        problems.append(
            f"A trainer worker needs about {trainer.total / GIB:.1f} GiB (weights, gradients, optimizer "
            f"{trainer.states / GIB:.1f}), and share_gpus leaves it {left / GIB:.1f} of a GPU's {memory / GIB:.1f} "
            'GiB: lower gpu_memory_utilization or seq_len, set model_dtype to "bfloat16", or choose a smaller model.'
        )
    elif memory is not None and device == "cuda" and trainer.total > memory:
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
        + (
            f", or set weight_transfer to in_place, which saves {engine.shadows / GIB:.1f} GiB"
            if engine.shadows
            else ""
        )
    )
