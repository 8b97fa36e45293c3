"""How `train_backend: megatron` divides a model: what is possible, and the memory of one rank.

Imports neither torch nor megatron-core, so that a configuration is checked before anything starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from telescope.config.memory import CUDA_CONTEXT_BYTES, SUM_BYTES, TrainerMemory, logprob_bytes
from telescope.config.model_shape import DTYPE_BYTES, ModelShape, uneven_heads
from telescope.errors import ConfigError
from telescope.utils.packages import installed_version

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""The families with a table in `trainer.backends.megatron.families`."""

MASTER_BYTES = 4
"""Beside weights in half precision the optimizer keeps them, and both moments, in float32."""

NEEDS_TRANSFORMER_ENGINE = (
    "megatron_use_transformer_engine", "megatron_fp8", "megatron_use_precision_aware_optimizer",
)  # fmt: skip
NEEDS_GPU = (*NEEDS_TRANSFORMER_ENGINE, "megatron_optimizer_cpu_offload")

OPTIMIZER_DTYPE_FIELDS = (
    "megatron_main_grads_dtype", "megatron_main_params_dtype", "megatron_exp_avg_dtype", "megatron_exp_avg_sq_dtype",
)  # fmt: skip
"""Dtypes of the precision-aware optimizer."""
OPTIMIZER_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}

TRANSFORMER_ENGINE = ("transformer-engine", "transformer-engine-torch")
"""The Python package and its torch extension, a distribution of its own inside the same folder."""
TRANSFORMER_ENGINE_FIX = "install transformer-engine and build transformer-engine-torch as in docs/gpu.md"

FP8_MULTIPLE = 16
"""Sizes of an FP8 product are multiples of this, also the tokens of a row."""


def check_transformer_engine(config: TelescopeConfig) -> None:
    """Raises `ConfigError` when a field needs Transformer Engine and it is not installed here."""
    if config.train_backend != "megatron" or all(map(installed_version, TRANSFORMER_ENGINE)):
        return
    for field in NEEDS_TRANSFORMER_ENGINE:
        if getattr(config, field):
            raise ConfigError(
                f"{field} is true, which needs Transformer Engine: {TRANSFORMER_ENGINE_FIX}, or set {field} to false"
            )


def check_gpu_fields(config: TelescopeConfig, device: str) -> None:
    """Raises `ConfigError` for a field that needs a GPU where training runs on the CPU."""
    for field in NEEDS_GPU:
        if config.train_backend == "megatron" and device == "cpu" and getattr(config, field):
            raise ConfigError(f"{field} is true, which needs a GPU, and training runs on the CPU here. Set it to false")


def check_model_type(config: TelescopeConfig, model_type: str) -> None:
    """Raises `ConfigError` for a model that the backend cannot train."""
    if config.train_backend == "megatron" and model_type not in MODEL_TYPES:
        raise ConfigError(
            f"model is {config.model!r} of type {model_type}, but train_backend megatron trains "
            f"{', '.join(MODEL_TYPES)}. Choose one of these, or train_backend fsdp"
        )


def check_division(config: TelescopeConfig, shape: ModelShape) -> None:
    """Raises `ConfigError` when layers, heads or experts cannot be divided as configured."""
    if config.train_backend != "megatron":
        return
    tensor, context = config.megatron_tensor_parallel_size, config.megatron_context_parallel_size
    divided = [
        ("megatron_tensor_parallel_size", "attention heads", shape.num_heads),
        ("megatron_tensor_parallel_size", "key and value heads", shape.num_kv_heads),
        ("megatron_pipeline_parallel_size", "layers", shape.num_layers),
    ]
    if shape.num_dense_layers():
        divided.append(("megatron_tensor_parallel_size", "rows in an MLP", shape.intermediate_size))
    if shape.num_experts:
        divided.append(("megatron_expert_parallel_size", "experts", shape.num_experts))
    for field, what, number in divided:
        if number % (size := getattr(config, field)):
            raise ConfigError(f"{field} is {size}, but {config.model} has {number} {what}, which it must divide")
    if heads := uneven_heads(context, shape.num_heads // tensor, shape.num_kv_heads // tensor):
        raise ConfigError(
            f"megatron_context_parallel_size is {context}, but with megatron_tensor_parallel_size {tensor} a rank of "
            f"{config.model} has {heads}. Choose another size"
        )
    if config.megatron_fp8:
        _check_fp8(config, shape)
    if config.megatron_expert_parallel_size > 1 and not shape.num_experts:
        raise ConfigError(
            f"megatron_expert_parallel_size is {config.megatron_expert_parallel_size}, but {config.model} has no "
            "experts. Set it to 1"
        )
    if shape.num_experts and tensor > 1 and not config.megatron_sequence_parallel:
        raise ConfigError(
            f"megatron_sequence_parallel is false, but {config.model} has experts, which need it with "
            "megatron_tensor_parallel_size above 1. Set it to true"
        )


def _check_fp8(config: TelescopeConfig, shape: ModelShape) -> None:
    """Raises `ConfigError` for products of a layer whose sizes FP8 does not take."""
    tensor = config.megatron_tensor_parallel_size
    sizes = {
        "elements in a hidden state": shape.hidden_size,
        "query elements on a rank": shape.num_heads * shape.head_dim // tensor,
        "query, key and value elements on a rank": (
            (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim // tensor
        ),
    }
    if shape.num_dense_layers():
        sizes["MLP rows on a rank"] = shape.intermediate_size // tensor
    if shape.num_experts:
        sizes["rows in an expert"] = shape.expert_intermediate_size
    for what, number in sizes.items():
        if number % FP8_MULTIPLE:
            raise ConfigError(
                f"megatron_fp8 is true, but {config.model} has {number} {what}, which must be a multiple of "
                f"{FP8_MULTIPLE}. Set megatron_fp8 to false, or change megatron_tensor_parallel_size"
            )


def _optimizer_bytes(config: TelescopeConfig, computed: int) -> int:
    """Returns the optimizer's bytes for a parameter: both moments, and the weight beside one in half precision."""
    if config.megatron_use_precision_aware_optimizer:
        fields = ("megatron_main_params_dtype", "megatron_exp_avg_dtype", "megatron_exp_avg_sq_dtype")
        return sum(OPTIMIZER_DTYPE_BYTES[getattr(config, field)] for field in fields)
    return 2 * SUM_BYTES + (MASTER_BYTES if computed < SUM_BYTES else 0)


def megatron_memory(config: TelescopeConfig, shape: ModelShape, device: str) -> TrainerMemory:
    """Estimates the memory of one rank: the activations of the first stage, and the output layer of the last.

    No rank needs more.
    """
    tensor, stages = config.megatron_tensor_parallel_size, config.megatron_pipeline_parallel_size
    context, experts = config.megatron_context_parallel_size, config.megatron_expert_parallel_size
    computed = DTYPE_BYTES[config.compute_dtype]
    ranks = config.trainer_num_workers // stages
    matrices = 3 * shape.num_experts * shape.hidden_size * shape.expert_intermediate_size * shape.num_sparse_layers()
    table = shape.vocab_size * shape.hidden_size
    tables = table if stages > 1 or shape.tied_embeddings else 2 * table
    dense = (shape.num_parameters - shape.embedding_parameters - matrices) // stages
    shared_part, expert_part = (dense + tables) // tensor, matrices // (stages * experts)
    parameters = shared_part + expert_part
    # The distributed optimizer divides its state over the ranks that have the same parameters.
    if config.megatron_use_distributed_optimizer:
        kept_moments = shared_part // max(1, ranks // tensor) + expert_part // max(1, ranks // experts)
    else:
        kept_moments = parameters
    moments = _optimizer_bytes(config, computed)
    on_host = config.megatron_optimizer_offload_fraction if config.megatron_optimizer_cpu_offload else 0.0
    gradient = SUM_BYTES if config.megatron_grad_reduce_in_fp32 else computed

    tokens = -(-config.seq_len // context)
    # Between the products of a layer, sequence parallelism divides the tokens, and tensor parallelism the arrays.
    sequence_shards = tensor if config.megatron_sequence_parallel else 1
    elements = max(shape.activation_elements_per_token(width, compiled=False) for width in shape.mlp_widths)
    block = tokens * computed * elements // tensor
    layers = shape.num_layers // stages
    num_kept = stages  # micro-batches of which the first stage keeps activations
    boundary = tokens * shape.hidden_size * computed // sequence_shards
    kept = layers * num_kept * (boundary if config.megatron_gradient_checkpointing else block)
    return TrainerMemory(
        parameters=parameters * computed,
        gradients=parameters * gradient,
        optimizer=int(kept_moments * moments * (1 - on_host)),
        unsharded=0,
        activations=kept,
        recomputes_attention=config.megatron_gradient_checkpointing,
        layer=2 * block,
        logprobs=logprob_bytes(config, shape, device, computed, tokens) // tensor,
        tables=0,
        overhead=CUDA_CONTEXT_BYTES if device == "cuda" else 0,
    )
