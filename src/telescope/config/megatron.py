"""The Megatron backend's fields: rules, checks, memory of a rank.

Imports neither torch nor megatron-core, so that a configuration is checked before anything starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from telescope.config.base import Rule, requires, up_to_multiple
from telescope.config.memory import CUDA_CONTEXT_BYTES, SUM_BYTES, TrainerMemory, logprob_bytes
from telescope.config.model_shape import DTYPE_BYTES, ModelShape, uneven_heads
from telescope.errors import ConfigError
from telescope.utils.packages import installed_version

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""The families with a table in `trainer.backends.megatron.families`."""

MASTER_BYTES = 4  # beside weights in half precision the optimizer keeps them, and both moments, in float32

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

HOPPER = 9.0  # compute capability of the first GPUs with FP8 scaled by blocks

FIXED_ROPE_TYPES = ("default", "linear", "llama3")
"""Kinds of `rope_scaling` whose frequencies depend on the model alone, and that leave attention's scale."""
USUAL_WINDOW_LAYERS = 28  # Qwen's `max_window_layers` where its `config.json` does not say

FP8_MULTIPLE = 16  # sizes of an FP8 product are multiples of this, also the tokens of a row


MODEL_PARALLEL_SIZES = (
    "megatron_tensor_parallel_size", "megatron_pipeline_parallel_size", "megatron_context_parallel_size",
)  # fmt: skip


def megatron_model_parallel_size(config: TelescopeConfig) -> int:
    """Ranks of one model copy: tensor x pipeline x context."""
    return math.prod(getattr(config, name) for name in MODEL_PARALLEL_SIZES)


def _ranks_share_parameters(config: TelescopeConfig) -> bool:
    return config.trainer_num_workers > config.megatron_tensor_parallel_size * config.megatron_pipeline_parallel_size


OWN_WEIGHTS = ("megatron_use_precision_aware_optimizer", "megatron_optimizer_cpu_offload")
"""With one of these the optimizer has weights of its own, beside those in bfloat16."""


def _needs_bfloat16(field: str) -> Rule:
    return Rule(
        (field, "mixed_precision_dtype", "model_dtype"),
        "requires weights in bfloat16",
        lambda c: getattr(c, field) and c.compute_dtype != "bfloat16",
        lambda c: f"Set mixed_precision_dtype to bfloat16, or {field} to false",
    )


def _needs_distributed_optimizer(field: str) -> Rule:
    return Rule(
        (field, "megatron_use_distributed_optimizer"),
        "requires megatron_use_distributed_optimizer where several ranks have the same parameters",
        lambda c: getattr(c, field) and _ranks_share_parameters(c) and not c.megatron_use_distributed_optimizer,
        lambda c: f"Set megatron_use_distributed_optimizer to true, or {field} to false",
    )


def _needs_precision_aware_optimizer(field: str) -> Rule:
    return Rule(
        (field, "megatron_use_precision_aware_optimizer"),
        "must be float32 without megatron_use_precision_aware_optimizer",
        lambda c: not c.megatron_use_precision_aware_optimizer and getattr(c, field) != "float32",
        lambda c: f"Set megatron_use_precision_aware_optimizer to true, or {field} to float32",
    )


_RULES: tuple[Rule, ...] = (
    Rule(
        ("trainer_num_workers", *MODEL_PARALLEL_SIZES),
        "must be divisible by the product of the megatron tensor, pipeline and context parallel sizes",
        lambda c: c.trainer_num_workers % megatron_model_parallel_size(c) != 0,
        lambda c: (
            "Set trainer_num_workers to "
            f"{up_to_multiple(c.trainer_num_workers, megatron_model_parallel_size(c))}, or lower a parallel size"
        ),
        lambda c: up_to_multiple(c.trainer_num_workers, megatron_model_parallel_size(c)),
    ),
    Rule(
        ("megatron_sequence_parallel", "megatron_tensor_parallel_size"),
        "requires megatron_tensor_parallel_size above 1",
        lambda c: c.megatron_sequence_parallel and c.megatron_tensor_parallel_size == 1,
        lambda c: "Set megatron_sequence_parallel to false, or raise megatron_tensor_parallel_size",
        lambda c: False,
    ),
    Rule(
        ("megatron_use_distributed_optimizer", "trainer_num_workers"),
        "requires several ranks with the same parameters: trainer_num_workers above the product of the megatron tensor "
        "and pipeline parallel sizes",
        lambda c: c.megatron_use_distributed_optimizer and not _ranks_share_parameters(c),
        lambda c: "Set megatron_use_distributed_optimizer to false, or raise trainer_num_workers",
        lambda c: False,
    ),
    Rule(
        ("megatron_expert_parallel_size", "megatron_pipeline_parallel_size", "trainer_num_workers"),
        "times megatron_pipeline_parallel_size must divide trainer_num_workers",
        lambda c: (
            c.megatron_expert_parallel_size > 1
            and c.trainer_num_workers % (c.megatron_expert_parallel_size * c.megatron_pipeline_parallel_size) != 0
        ),
        lambda c: (
            "Lower megatron_expert_parallel_size, or set trainer_num_workers to a multiple of "
            f"{c.megatron_expert_parallel_size * c.megatron_pipeline_parallel_size}"
        ),
    ),
    Rule(
        ("megatron_global_batch_size", "prompts_batch_size_for_trainer"),
        "must be null or prompts_batch_size_for_trainer, since a step trains the whole batch",
        lambda c: c.megatron_global_batch_size not in (None, c.prompts_batch_size_for_trainer),
        lambda c: "Set megatron_global_batch_size to null, or change prompts_batch_size_for_trainer",
    ),
    Rule(
        ("mixed_precision_dtype", "model_dtype"),
        "cannot be float16 with train_backend megatron, which would scale its losses",
        lambda c: c.compute_dtype == "float16",
        lambda c: "Set it to bfloat16",
    ),
    requires("megatron_fp8", "megatron_use_transformer_engine"),
    *map(_needs_bfloat16, ("megatron_fp8", *OWN_WEIGHTS)),
    *map(_needs_distributed_optimizer, OWN_WEIGHTS),
    Rule(
        ("megatron_use_precision_aware_optimizer", "megatron_optimizer_cpu_offload"),
        "cannot be combined with megatron_optimizer_cpu_offload, whose states are all float32",
        lambda c: c.megatron_use_precision_aware_optimizer and c.megatron_optimizer_cpu_offload,
        lambda c: "Set one of them to false",
    ),
    *map(_needs_precision_aware_optimizer, OPTIMIZER_DTYPE_FIELDS),
    Rule(
        ("megatron_main_params_dtype",),
        "must be float32 or float16, which the optimizer of Transformer Engine has for weights",
        lambda c: c.megatron_main_params_dtype not in ("float32", "float16"),
        lambda c: "Set it to float32",
    ),
    Rule(
        ("megatron_main_grads_dtype", "megatron_grad_reduce_in_fp32"),
        "must be the dtype that gradients are summed in: float32 with megatron_grad_reduce_in_fp32, else bfloat16",
        lambda c: (
            c.megatron_use_precision_aware_optimizer
            and c.megatron_main_grads_dtype != ("float32" if c.megatron_grad_reduce_in_fp32 else "bfloat16")
        ),
        lambda c: "Change megatron_main_grads_dtype or megatron_grad_reduce_in_fp32",
        lambda c: "float32" if c.megatron_grad_reduce_in_fp32 else "bfloat16",
    ),
)


def _only_with_megatron(rule: Rule) -> Rule:
    return replace(rule, broken=lambda c: c.train_backend == "megatron" and rule.broken(c))


MEGATRON_RULES = tuple(map(_only_with_megatron, _RULES))


def check_transformer_engine(config: TelescopeConfig) -> None:
    """Raises `ConfigError` when a field needs a missing Transformer Engine."""
    if config.train_backend != "megatron" or all(map(installed_version, TRANSFORMER_ENGINE)):
        return
    for field in NEEDS_TRANSFORMER_ENGINE:
        if getattr(config, field):
            raise ConfigError(
                f"{field} is true, which needs Transformer Engine: {TRANSFORMER_ENGINE_FIX}, or set {field} to false"
            )


def check_gpu_fields(config: TelescopeConfig, device: str, capabilities: Sequence[float] = ()) -> None:
    """Raises `ConfigError` for a field that needs GPUs of other compute capabilities than `capabilities`."""
    if config.train_backend != "megatron":
        return
    for field in NEEDS_GPU:
        if device == "cpu" and getattr(config, field):
            raise ConfigError(f"{field} is true, which needs a GPU, and training runs on the CPU here. Set it to false")
    lowest = min(capabilities, default=HOPPER)
    if config.megatron_fp8 and lowest < HOPPER:
        raise ConfigError(
            f"megatron_fp8 is true, which needs GPUs of the Hopper generation or newer (compute capability {HOPPER:g} "
            f"or more), and a GPU here has {lowest:g}. Set megatron_fp8 to false"
        )


def check_architecture(config: TelescopeConfig, data: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a model, by its `config.json`, that the backend would not compute as it should."""
    if config.train_backend != "megatron":
        return
    model_type = data.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError(
            f"model is {config.model!r} of type {model_type}, but train_backend megatron trains "
            f"{', '.join(MODEL_TYPES)}. Choose one of these, or train_backend fsdp"
        )
    if (difference := _difference(data, str(model_type))) is not None:
        raise ConfigError(
            f"model is {config.model!r}, whose config.json has {difference}: train_backend megatron lacks that. Choose "
            "another model, or train_backend fsdp"
        )


def _difference(data: Mapping[str, Any], model_type: str) -> str | None:
    """Returns what in `config.json` the backend does not compute, with its value."""
    if (activation := data.get("hidden_act", "silu")) != "silu":
        return f"hidden_act {activation}"
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else rope
    if kind not in FIXED_ROPE_TYPES:
        return f"rope_scaling of type {kind} (attention is scaled, or frequencies change with the length of a row)"
    # Qwen2 has these biases whatever its config.json says.
    for name in ("attention_bias", "mlp_bias"):
        if data.get(name) and model_type != "qwen2":
            return f"{name} true"
    if _slides(data, model_type):
        return "sliding attention"
    if layers := data.get("mlp_only_layers"):
        return f"mlp_only_layers {layers} (experts in some layers only)"
    if (step := data.get("decoder_sparse_step", 1)) != 1:
        return f"decoder_sparse_step {step} (experts in some layers only)"
    return None


def _slides(data: Mapping[str, Any], model_type: str) -> bool:
    """Returns whether a layer has sliding attention, as transformers reads `config.json`."""
    if (layers := data.get("layer_types")) is not None:
        return "sliding_attention" in layers
    if not data.get("use_sliding_window") or data.get("sliding_window", 1) is None:
        return False
    first = 0 if model_type == "qwen3_moe" else data.get("max_window_layers", USUAL_WINDOW_LAYERS)
    return first < data.get("num_hidden_layers", 0)


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


def _optimizer_bytes(config: TelescopeConfig, computed: int) -> int:
    """Returns the optimizer's bytes for a parameter: moments, and perhaps a master weight."""
    if config.megatron_use_precision_aware_optimizer:
        fields = ("megatron_main_params_dtype", "megatron_exp_avg_dtype", "megatron_exp_avg_sq_dtype")
        return sum(OPTIMIZER_DTYPE_BYTES[getattr(config, field)] for field in fields)
    return 2 * SUM_BYTES + (MASTER_BYTES if computed < SUM_BYTES else 0)


def megatron_memory(config: TelescopeConfig, shape: ModelShape, device: str) -> TrainerMemory:
    """Estimates memory of a rank with the first stage's activations and the last's output layer: none needs more."""
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
    if config.megatron_gradient_checkpointing:
        of_layer = boundary
    elif device == "cpu":
        of_layer = block
    else:  # norms, rotary embeddings and gated MLPs are compiled
        elements = max(shape.activation_elements_per_token(width) for width in shape.mlp_widths)
        if shape.qk_norm:  # these norms keep the array of which their inputs are parts
            elements += (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        of_layer = tokens * computed * elements // tensor
    kept = layers * num_kept * of_layer
    # Transformer Engine keeps a copy of the matrices that it multiplies in FP8.
    in_fp8 = dense // tensor + expert_part if config.megatron_fp8 else 0
    # An update of weights in half precision makes gradients in float32, unless the optimizer reads them as they are.
    reads_them = config.megatron_use_precision_aware_optimizer or config.megatron_optimizer_cpu_offload
    update = kept_moments * SUM_BYTES if gradient < SUM_BYTES and not reads_them else 0
    return TrainerMemory(
        parameters=parameters * computed + in_fp8,
        gradients=parameters * gradient,
        optimizer=int(kept_moments * moments * (1 - on_host)),
        unsharded=0,
        activations=kept,
        recomputes_attention=config.megatron_gradient_checkpointing,
        layer=2 * block,
        logprobs=logprob_bytes(config, shape, device, computed, tokens) // tensor,
        tables=update,
        overhead=CUDA_CONTEXT_BYTES if device == "cuda" else 0,
    )
