"""Estimates the memory of a trainer rank and of an engine worker.

Computed from the model's shape. For choosing settings before the first start, not a bound: allocators fragment and
libraries keep workspaces. All sizes are in bytes.

Trainer: what stays allocated during a step (shards of weights, gradients and optimizer, gathered weights, the
activations of every layer) is counted once. The largest of three peaks that do not coincide is added: the backward
pass of the output layer, that of one block, and the reduction of the embedding gradients, after the activations are
freed. Sizes are those of a second micro-batch, when the gradients of the first exist.

Checked against all tensors of real steps (`tests/integration/trainer/test_memory_of_a_step.py`) and against peaks
measured on GPUs (`tests/unit/config/test_memory.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from telescope.config.lora import adapter_parameters
from telescope.config.model_shape import DTYPE_BYTES, ModelShape

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

GIB = 1 << 30
CUDA_CONTEXT_BYTES = GIB  # CUDA context, NCCL buffers and cuBLAS workspaces of one process, together
UNUSED_SHARE = 0.1
"""Share of a GPU that `recompute_attention: auto` leaves free: torch's allocator reserves more than it gives out."""
SUM_BYTES = 4  # Gradients are reduced over ranks, and sums of products kept, in float32
VOCABULARY_BLOCKS = 8
"""Blocks that the output layer's pass cuts the vocabulary into on a GPU; its gradient is summed up block by block."""


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of one trainer rank. FSDP shards parameters, gradients and optimizer over all ranks."""

    parameters: int
    gradients: int
    optimizer: int
    """AdamW: two moments, in the dtype of the parameters."""
    unsharded: int
    """Weights that are gathered all through a micro-batch: a table that is tied, or everything if it stays gathered."""
    activations: int
    """What all layers keep of one micro-batch of `seq_len` tokens, or of this rank's part of it."""
    recomputes_attention: bool
    """Whether recomputed layers compute attention twice instead of keeping its output."""
    layer: int
    """The backward pass of one block: what it recomputes and its gradients, gathered weights, their reduction."""
    logprobs: int
    """The chunked pass over the output layer and its gradient."""
    tables: int
    """What comes when the activations are gone: reducing the gradients of embedding and output layer, or with Megatron
    the update's copy of gradients in float32."""
    overhead: int

    @property
    def states(self) -> int:
        """Bytes that a rank always uses, whatever the batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def moment(self) -> int:
        """The largest peak, in addition to what stays allocated during a step."""
        return max(self.activations + max(self.layer, self.logprobs), self.tables) - self.activations

    @property
    def total(self) -> int:
        return self.states + self.unsharded + self.activations + self.moment + self.overhead


def reshards_after_forward(choice: bool | Literal["auto"], device: str) -> bool:
    """Resolves `fsdp_reshard_after_forward`: whether weights are dropped between forward and backward pass.

    On the CPU memory is rarely what is short, and a gather over gloo costs more than it is worth.
    """
    return device == "cuda" if choice == "auto" else choice


def num_recomputed(config: TelescopeConfig, num_layers: int) -> int:
    """Blocks that are recomputed in backward, counted from the first."""
    if not config.gradient_checkpointing:
        return 0
    return min(config.gradient_checkpointing_layers or num_layers, num_layers)


def recomputes_attention(
    choice: bool | Literal["auto"], config: TelescopeConfig, shape: ModelShape | None, gpu_memory: int | None
) -> bool:
    """Resolves `recompute_attention` for a GPU of `gpu_memory` bytes. None: no GPU, or its memory is not known."""
    if choice != "auto":
        return choice
    if not config.gradient_checkpointing or shape is None or gpu_memory is None:
        return False
    kept = trainer_memory(config, shape, "cuda", recompute_attention=False)
    return kept.total > (1 - UNUSED_SHARE) * _memory_of_a_rank(config, gpu_memory)


def trainer_memory(
    config: TelescopeConfig, shape: ModelShape, device: Literal["cpu", "cuda"], *, recompute_attention: bool
) -> TrainerMemory:
    """Estimates the memory of one rank. `recompute_attention`: see `recomputes_attention`."""
    if config.train_backend == "megatron":
        from telescope.config.megatron import megatron_memory

        return megatron_memory(config, shape, device)
    ranks, width, share = config.trainer_num_workers, shape.hidden_size, config.fsdp_context_parallel_size
    tokens = -(-config.seq_len // share)
    stored = DTYPE_BYTES[config.model_dtype]
    computed = DTYPE_BYTES[config.compute_dtype]
    shard = -(-shape.num_parameters // ranks) * stored
    adapters = _adapter_bytes(config, shape)  # in float32
    trained = -(-adapters // ranks) if adapters else shard
    table, layer = shape.vocab_size * width, shape.largest_layer_parameters
    drops = reshards_after_forward(config.fsdp_reshard_after_forward, device)
    compiled = config.compile_blocks and device == "cuda" and computed == 2
    unsharded = (table if shape.tied_embeddings else 0) if drops else shape.num_parameters
    # One rank has nothing to send: it copies its weights when it needs them.
    ahead = config.fsdp_prefetch_layers * layer * computed if drops and ranks > 1 else 0
    # The whole gradient of a tied table is there from the head's backward pass to the embedding's.
    whole_gradient = table * computed if shape.tied_embeddings and not adapters else 0

    # Ranks that share a row exchange tokens for heads: queries, and keys and values, which they may have to repeat.
    query, key_value = shape.num_heads * shape.head_dim, max(shape.num_kv_heads, share) * shape.head_dim
    repeated = 2 * (key_value - shape.num_kv_heads * shape.head_dim)
    # Attention keeps its output by heads, and the product after it by tokens.
    exchanged = query + repeated if share > 1 else 0
    dense, sparse = (
        tokens * computed * (shape.activation_elements_per_token(mlp_width, compiled=compiled) + exchanged)
        for mlp_width in shape.mlp_widths
    )
    # Recomputed blocks keep their input and, unless that is recomputed too, what attention returned.
    recomputed = num_recomputed(config, shape.num_layers)
    attention = 0 if recompute_attention else shape.num_heads * (shape.head_dim * computed + SUM_BYTES)
    kept = recomputed * tokens * (width * computed + attention)
    kept += shape.num_dense_layers(recomputed) * dense + shape.num_sparse_layers(recomputed) * sparse
    # A last block that is not recomputed has what its backward pass needs, which meets what all others keep.
    block = max(dense, sparse) if recomputed == shape.num_layers else 0
    # Beside what a block saves: gradients of the widest arrays, of its input and of its output.
    block += tokens * computed * (2 * max(shape.mlp_widths) + 2 * width)
    weights_of_block = layer * computed if drops else 0  # gathered
    if adapters:
        reduced = 2 * adapters // shape.num_layers  # of a block: the gradient, and its copy for the reduction
    else:
        weights_of_block += layer * computed  # their gradients
        # A copy for the reduction lives until the next one: the last block still meets that of an untied output layer.
        reduced = SUM_BYTES * (layer if shape.tied_embeddings else max(layer, table))

    logprobs = logprob_bytes(config, shape, device, computed, tokens)
    if not shape.tied_embeddings:
        # The output layer is a unit by itself: its gradient is reduced right after its pass.
        reduction = 0 if adapters else _reduction(table, computed, ranks)
        logprobs = max(logprobs + (table * computed if drops else 0), reduction)

    return TrainerMemory(
        parameters=shard + (trained if adapters else 0),
        gradients=trained,
        optimizer=2 * trained,
        unsharded=unsharded * computed,
        activations=kept,
        recomputes_attention=recompute_attention and recomputed > 0,
        layer=block + weights_of_block + reduced + ahead + whole_gradient,
        logprobs=logprobs + ahead,
        tables=0 if adapters else _reduction(table, computed, ranks) + whole_gradient,
        overhead=CUDA_CONTEXT_BYTES if device == "cuda" else 0,
    )


def logprob_bytes(config: TelescopeConfig, shape: ModelShape, device: str, computed: int, tokens: int) -> int:
    """The output layer's backward pass over `tokens`, its gathered weight not counted."""
    table = shape.vocab_size * shape.hidden_size
    chunk = min(config.entropy_chunk_size, tokens) * shape.vocab_size
    if device == "cuda":
        logits = chunk * (SUM_BYTES + computed)  # and their gradient, which on Hopper is all that there is
        blocks = max(1, min(VOCABULARY_BLOCKS, -(-tokens // config.entropy_chunk_size)))
    else:
        logits, blocks = chunk * 3 * SUM_BYTES, 1  # without kernels of our own an array more
    gradient, sums = table * computed, 0 if computed == SUM_BYTES else table * SUM_BYTES // blocks
    if config.lora_rank:  # the table is frozen
        gradient = sums = 0
    # Final norm's input, the predicting rows of its output, and two gradients, one of them in float32.
    hidden = tokens * shape.hidden_size * (3 * computed + 2 * SUM_BYTES)
    return logits + gradient + sums + hidden


def _adapter_bytes(config: TelescopeConfig, shape: ModelShape) -> int:
    """Bytes of all adapters in the trainer. 0 without LoRA."""
    if not config.lora_rank:
        return 0
    return adapter_parameters(shape, config.lora_rank, config.lora_target_modules) * SUM_BYTES


def _reduction(parameters: int, computed: int, ranks: int) -> int:
    """Bytes of a gradient's reduction: the gradient, its copy, this rank's share."""
    return parameters * (computed + SUM_BYTES) + -(-parameters * SUM_BYTES // ranks)


ENGINE_WORKSPACE_BYTES = 2 * GIB  # vLLM's profiled peak of activations, and CUDA graphs
SHARE_OF_CPU_MEMORY_FOR_KV = 0.25
UNKNOWN_KV_CACHE_BYTES = 4 * GIB  # of a server on the CPU whose model's sizes are not known


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of an inference server's worker, and its KV cache's capacity."""

    weights: int
    staging: int
    """The second copy of the weights that a sync is received into, and two buckets. 0: weights come in place."""
    kv_cache: int | None
    """None where the GPU's memory is not known: vLLM uses the rest of its share."""
    overhead: int
    kv_bytes_per_token: int
    all_slots_kv: int
    """KV cache for every request slot of the server at `max_model_len`. Less means queueing, not failure."""
    longest_sequence_kv: int
    """KV cache of one sequence of `max_model_len`: the least that works."""

    @property
    def tokens(self) -> int | None:
        """Tokens that the KV cache holds."""
        return None if self.kv_cache is None else self.kv_cache // self.kv_bytes_per_token

    @property
    def total(self) -> int | None:
        return None if self.kv_cache is None else self.weights + self.staging + self.kv_cache + self.overhead


@dataclass(frozen=True)
class StagingPlan:
    """Bytes that a GPU server reserves for receiving weights, or why it cannot."""

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
    gpu_memory = device_memory_bytes if device == "cuda" else None
    attention = recomputes_attention(config.recompute_attention, config, shape, gpu_memory)
    trainer = trainer_memory(config, shape, device, recompute_attention=attention)
    engine = _engine_memory(config, shape, device, device_memory_bytes)
    problems = _problems(config, trainer, engine, device, device_memory_bytes)
    kv_cache_problem = _kv_cache_problem(config, engine, device)
    if kv_cache_problem is not None and device == "cuda":
        problems.append(kv_cache_problem)
    return MemoryEstimate(trainer, engine, tuple(problems), kv_cache_problem)


def _engine_memory(config: TelescopeConfig, shape: ModelShape, device: str, memory: int | None) -> EngineMemory:
    tensor_parallel = config.inference_tensor_parallel_size
    weights = -(-_engine_weight_bytes(config, shape) // tensor_parallel)
    if config.lora_sync == "adapter":
        weights += _adapter_bytes(config, shape) // SUM_BYTES * DTYPE_BYTES[config.engine_dtype] // tensor_parallel
    per_token = _kv_bytes_per_token(config, shape)
    longest = config.max_model_len * per_token
    overhead = ENGINE_WORKSPACE_BYTES if device == "cuda" else 0
    staging = 0
    kv_cache: int | None
    if device == "cpu":
        is_known = memory is not None or config.inference_kv_cache_gib is not None
        kv_cache = cpu_kv_cache_gib(config, shape, memory or 0) * GIB if is_known else None
    else:
        staging = plan_staging(config, shape, memory).num_bytes
        room = None if memory is None else int(memory * config.gpu_memory_utilization) - weights - overhead
        kv_cache = None if room is None else max(room - staging, 0)
    return EngineMemory(weights, staging, kv_cache, overhead, per_token, _num_sequences(config) * longest, longest)


def cpu_kv_cache_gib(config: TelescopeConfig, shape: ModelShape | None, memory: int) -> int:
    """Returns the whole GiB of KV cache that a worker of a server on the CPU takes of `memory` bytes.

    A server's workers share the configured size, or else what all request slots need, at most a quarter of the memory.
    """
    workers = config.inference_tensor_parallel_size
    if config.inference_kv_cache_gib is not None:
        return math.ceil(config.inference_kv_cache_gib / workers)
    wanted = UNKNOWN_KV_CACHE_BYTES / workers
    if shape is not None:
        wanted = _num_sequences(config) * config.max_model_len * _kv_bytes_per_token(config, shape)
    return math.ceil(min(wanted, memory * SHARE_OF_CPU_MEMORY_FOR_KV / workers) / GIB)


def _kv_bytes_per_token(config: TelescopeConfig, shape: ModelShape) -> int:
    """Returns a worker's bytes. KV heads are split over workers, and repeated where there are fewer of them."""
    heads = max(shape.num_kv_heads // config.inference_tensor_parallel_size, 1)
    return shape.kv_bytes_per_token(config.engine_dtype) * heads // shape.num_kv_heads


def _num_sequences(config: TelescopeConfig) -> int:
    return config.max_num_seqs or config.lanes_per_server


FP8_BLOCK_ELEMENTS = 128 * 128


def _engine_weight_bytes(config: TelescopeConfig, shape: ModelShape) -> int:
    """Bytes of the weights of one server, over all its workers."""
    item = DTYPE_BYTES[config.engine_dtype]
    if config.inference_quantization == "none":
        return shape.num_parameters * item
    # Embeddings and the output layer stay as they are; norms and biases are too small to count.
    quantized = shape.num_parameters - shape.embedding_parameters
    return quantized + quantized * SUM_BYTES // FP8_BLOCK_ELEMENTS + shape.embedding_parameters * item


def plan_staging(config: TelescopeConfig, shape: ModelShape | None, memory: int | None) -> StagingPlan:
    """Resolves `weight_transfer` for a GPU of `memory` bytes.

    `auto` takes the background where that leaves KV cache for all request slots at full length, or half of what there
    would be. `background` is not checked here, so that its size is known even where `memory` is not; a KV cache that is
    then too small is a problem like any other.
    """
    if config.weight_transfer == "in_place":
        return StagingPlan(0, "weight_transfer is in_place")
    if config.inference_quantization != "none":
        return StagingPlan(0, "the weights are quantized as they arrive")
    if config.lora_sync == "adapter":
        return StagingPlan(0, "the base weights do not change")
    if config.inference_tensor_parallel_size > 1:
        return StagingPlan(0, "collectives of a tensor-parallel engine must not run beside a transfer")
    if shape is not None and shape.num_experts:
        return StagingPlan(0, "the model has experts")
    wanted = config.weight_transfer == "background"
    if shape is None or (memory is None and not wanted):
        why = f"the {'sizes of the model' if shape is None else 'memory of the GPU'} could not be read beforehand"
        return StagingPlan(0, None if wanted else why)
    item = DTYPE_BYTES[config.engine_dtype]
    weights = shape.num_parameters * item
    bucket = config.weight_broadcast_bucket_mb << 20
    matrix = max(bucket, shape.vocab_size * shape.hidden_size * item)  # a larger tensor has a bucket of its own
    needed = weights + matrix + (bucket if shape.tied_embeddings else matrix)
    if memory is None or wanted:
        return StagingPlan(needed)
    without = int(memory * config.gpu_memory_utilization) - weights - ENGINE_WORKSPACE_BYTES
    all_slots_kv = _num_sequences(config) * config.max_model_len * _kv_bytes_per_token(config, shape)
    if without - needed < min(all_slots_kv, without // 2):
        return StagingPlan(
            0,
            f"a second copy of the weights takes {needed / GIB:.1f} GiB of the {max(without, 0) / GIB:.1f} GiB that "
            "gpu_memory_utilization leaves for the KV cache",
        )
    return StagingPlan(needed)


def trainer_share(config: TelescopeConfig, memory: int) -> int:
    """Bytes that a rank on a shared GPU may allocate. The GPU has `memory` bytes.

    What `gpu_memory_utilization` leaves, less the CUDA contexts of both processes: neither torch nor vLLM counts its
    own, and a server that is started again must find its whole share free.
    """
    return max(int(memory * (1 - config.gpu_memory_utilization)) - 2 * CUDA_CONTEXT_BYTES, 0)


def checkpoint_bytes(config: TelescopeConfig, shape: ModelShape) -> int:
    """Estimates the bytes of one checkpoint. FSDP copies as many to shared memory."""
    if config.train_backend == "megatron":
        computed = DTYPE_BYTES[config.compute_dtype]
        # Both moments, and beside weights in half precision those of the optimizer, all of them in float32.
        states = (3 if computed < SUM_BYTES else 2) if config.checkpoint_save_training_state else 0
        return shape.num_parameters * (computed + states * SUM_BYTES)
    weights = _adapter_bytes(config, shape) or shape.num_parameters * DTYPE_BYTES[config.model_dtype]
    return weights * (3 if config.checkpoint_save_training_state else 1)  # AdamW: two moments


def less_trainer_memory(config: TelescopeConfig, recomputes_attention: bool) -> list[str]:
    """Returns advice that lowers the memory of a trainer rank with the same ranks and `seq_len`, cheapest first."""
    advice = []
    if config.train_backend == "megatron":
        if not config.megatron_gradient_checkpointing:
            advice.append("set megatron_gradient_checkpointing to true")
        # The two exclude each other.
        if not (config.megatron_optimizer_cpu_offload or config.megatron_use_precision_aware_optimizer):
            advice.append("set megatron_optimizer_cpu_offload to true")
        return advice
    if not config.gradient_checkpointing:
        advice.append("set gradient_checkpointing to true")
    elif config.gradient_checkpointing_layers is not None:
        advice.append("remove gradient_checkpointing_layers")
    if config.gradient_checkpointing and not recomputes_attention:
        advice.append("set recompute_attention to true")
    if config.model_dtype != "bfloat16":
        advice.append('set model_dtype to "bfloat16"')
    return advice + ([] if config.lora_rank else ["set lora_rank to train adapters"])


def _memory_of_a_rank(config: TelescopeConfig, gpu_memory: int) -> int:
    """Returns a GPU's bytes for a rank, with its CUDA context."""
    return trainer_share(config, gpu_memory) + CUDA_CONTEXT_BYTES if config.share_gpus else gpu_memory


def _problems(
    config: TelescopeConfig, trainer: TrainerMemory, engine: EngineMemory, device: str, memory: int | None
) -> list[str]:
    problems: list[str] = []
    left = _memory_of_a_rank(config, memory or 0)
    advice = less_trainer_memory(config, trainer.recomputes_attention)
    can_share = config.fsdp_context_parallel_size < config.trainer_num_workers
    share = ", raise fsdp_context_parallel_size" if can_share else ""
    if config.train_backend == "megatron":
        share = ", raise a megatron parallel size"
    if memory is not None and device == "cuda" and trainer.total > left:
        place = f"a GPU has {memory / GIB:.1f} GiB: raise trainer_num_workers, lower seq_len{share}"
        if config.share_gpus:
            place = f"share_gpus leaves it {left / GIB:.1f} of a GPU's {memory / GIB:.1f} GiB: lower "
            place += "gpu_memory_utilization or seq_len"
        problems.append(
            f"A trainer worker needs about {trainer.total / GIB:.1f} GiB (weights, gradients, optimizer "
            f"{trainer.states / GIB:.1f}), and {', '.join([place, *advice])}, or choose a smaller model."
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


def _kv_cache_problem(config: TelescopeConfig, engine: EngineMemory, device: str) -> str | None:
    size, workers = engine.kv_cache, config.inference_tensor_parallel_size
    if device == "cpu" and config.inference_kv_cache_gib is not None:
        size = int(config.inference_kv_cache_gib / workers * GIB)  # as it is set: vLLM rounds it up
    if size is None or size >= engine.longest_sequence_kv:
        return None
    needed = math.ceil(engine.longest_sequence_kv * workers / GIB * 1e4) / 1e4
    return (
        f"max_model_len is {config.max_model_len}, but the KV cache of a server holds "
        f"{size // engine.kv_bytes_per_token:,} tokens; one sequence takes {needed:g} GiB. Lower max_model_len, or "
        "raise gpu_memory_utilization (on CPU inference_kv_cache_gib) or inference_tensor_parallel_size"
        + (
            f", or set weight_transfer to in_place, which saves {engine.staging / GIB:.1f} GiB"
            if engine.staging
            else ""
        )
    )
