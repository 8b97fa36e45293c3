"""LoRA's fields: rules, choice of layers, and parameters of adapters.

Imports no torch: the trainer and the checks before a start choose layers by the same function.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from telescope.config.base import Rule
from telescope.config.model_shape import ModelShape
from telescope.errors import ConfigError
from telescope.utils.text import listed

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

ALL_LINEAR = "all-linear"  # `lora_target_modules` for every linear layer but the output layer
SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM takes as --max-lora-rank, in 0.26 and 0.32
LARGEST_SERVED_RANK = SERVED_RANKS[-1]


def _is_invalid_pattern(config: TelescopeConfig) -> bool:
    if isinstance(config.lora_target_modules, str):
        try:
            with warnings.catch_warnings(action="ignore", category=FutureWarning):
                re.compile(config.lora_target_modules)
        except (re.error, OverflowError, RecursionError):
            return True
    return False


LORA_RULES: tuple[Rule, ...] = (
    Rule(
        ("lora_rank", "train_backend"),
        "must be 0 with train_backend megatron, which trains all weights",
        lambda c: c.train_backend == "megatron" and c.lora_rank > 0,
        lambda c: "Set lora_rank to 0, or train_backend to fsdp",
    ),
    Rule(
        ("lora_target_modules",),
        "must be a list of names, or a valid regular expression",
        _is_invalid_pattern,
        lambda c: "Write names as a list, such as [q_proj, v_proj]",
    ),
    Rule(
        ("lora_sync", "lora_rank"),
        'requires lora_rank above 0 for "adapter"',
        lambda c: c.lora_sync == "adapter" and c.lora_rank == 0,
        lambda c: 'Set lora_rank, or lora_sync to "merged"',
    ),
    Rule(
        ("lora_rank", "lora_sync"),
        f"must be at most {LARGEST_SERVED_RANK} with lora_sync adapter, which is the largest that vLLM serves",
        lambda c: c.lora_sync == "adapter" and c.lora_rank > LARGEST_SERVED_RANK,
        lambda c: f'Lower lora_rank to {LARGEST_SERVED_RANK}, or set lora_sync to "merged"',
    ),
    Rule(
        ("model_dtype", "inference_dtype", "lora_sync"),
        "must be float32 or the dtype of the servers with lora_sync adapter, since they keep the base weights that "
        "they have loaded themselves",
        lambda c: c.lora_sync == "adapter" and c.model_dtype not in ("float32", c.engine_dtype),
        lambda c: f'Set model_dtype to {c.engine_dtype}, or lora_sync to "merged"',
    ),
    Rule(
        ("inference_quantization", "lora_sync"),
        "must be none with lora_sync adapter, since adapters of quantized layers are not tested",
        lambda c: c.lora_sync == "adapter" and c.inference_quantization != "none",
        lambda c: 'Set inference_quantization to "none", or lora_sync to "merged"',
    ),
)


def choose_layers(targets: str | Sequence[str], linear: Sequence[str], others: Iterable[str] = ()) -> list[str]:
    """Returns the linear layers to adapt, in the model's order.

    `all-linear` is every linear layer, another string a regular expression for whole names, and a list has names or
    their ends. `others` are the model's other modules. Raises `ConfigError` for a target that matches one of these, or
    nothing.
    """
    if targets == ALL_LINEAR:
        return list(linear)
    kinds = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
    fix = f'Choose from {kinds}, or use "{ALL_LINEAR}"'
    if isinstance(targets, str):
        fix += (
            "; names are given as a list, such as [q_proj, v_proj], and a text is a regular expression for whole names"
        )
    others, chosen = list(others), set[str]()
    for target in [targets] if isinstance(targets, str) else targets:
        pattern = re.compile(target if isinstance(targets, str) else rf"(.*\.)?{re.escape(target)}")
        found = {name for name in linear if pattern.fullmatch(name)}
        without = sorted(name for name in others if pattern.fullmatch(name))
        if not found:
            what = f"matches {listed(without)}, not linear layers" if without else "matches nothing in the model"
            raise ConfigError(f"lora_target_modules: {target!r} {what}. {fix}")
        if without:
            raise ConfigError(
                f"lora_target_modules: {target!r} also matches {listed(without)}, which can have no adapter. {fix}"
            )
        chosen |= found
    return [name for name in linear if name in chosen]


def linear_layers(shape: ModelShape) -> Iterator[tuple[str, int, int]]:
    """Yields linear layers that can have an adapter: name, inputs, outputs. Experts cannot."""
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    width, inner = shape.hidden_size, shape.intermediate_size
    for index in range(shape.num_layers):
        block = f"model.layers.{index}"
        yield f"{block}.self_attn.q_proj", width, query
        yield f"{block}.self_attn.k_proj", width, key_value
        yield f"{block}.self_attn.v_proj", width, key_value
        yield f"{block}.self_attn.o_proj", query, width
        if not shape.has_experts(index):
            yield f"{block}.mlp.gate_proj", width, inner
            yield f"{block}.mlp.up_proj", width, inner
            yield f"{block}.mlp.down_proj", inner, width


def adapter_parameters(shape: ModelShape, rank: int, targets: str | Sequence[str]) -> int:
    """Returns the parameters of all adapters, those of all layers for targets of another architecture."""
    layers = list(linear_layers(shape))
    names = [name for name, _, _ in layers]
    try:
        chosen = set(choose_layers(targets, names))
    except ConfigError:
        chosen = set(names)
    return sum(rank * (inputs + outputs) for name, inputs, outputs in layers if name in chosen)
