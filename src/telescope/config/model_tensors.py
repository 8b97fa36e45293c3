"""Compares the tensors in a model's weight files with its `config.json`.

A checkpoint that lacks a tensor loads without an error: the tensor keeps its random initial values. Pure functions of
parsed JSON and of safetensors headers. Other architectures than those in `CAUSAL_LM_CLASSES` are checked by the trainer
when it loads them (`telescope.trainer.model`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from telescope.config.model_shape import ModelShape
from telescope.utils.text import pluralize

Shapes = Mapping[str, tuple[int, ...]]

CAUSAL_LM_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""`model_type` to the class with an output layer, for the architectures whose tensors are known here."""

IGNORED_SUFFIX = "rotary_emb.inv_freq"
"""Buffers in old checkpoints that every loader computes anew."""

MAX_NAMES_IN_MESSAGE = 4


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Name and shape of each tensor of the model; None for an architecture that is not known here.

    Holds the output layer of tied embeddings too, which a checkpoint may leave out.
    """
    shape = ModelShape.from_config(config)
    model_type = config.get("model_type")
    if shape is None or model_type not in CAUSAL_LM_CLASSES:
        return None
    width = shape.hidden_size
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    projections = {"q": (query, width), "k": (key_value, width), "v": (key_value, width), "o": (width, query)}
    # Qwen2 has these biases whatever its config.json has, and none on the output projection; Mistral has none.
    attention_bias = bool(config.get("attention_bias")) and model_type not in ("qwen2", "mistral")
    biased = "qkv" if model_type == "qwen2" else "qkvo" if attention_bias else ""
    mlp_bias = model_type == "llama" and bool(config.get("mlp_bias"))

    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, width)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for name, size in projections.items():
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = size
            if name in biased:
                tensors[f"{prefix}.self_attn.{name}_proj.bias"] = size[:1]
        if shape.qk_norm:
            tensors |= {f"{prefix}.self_attn.{name}_norm.weight": (shape.head_dim,) for name in "qk"}
        tensors |= {f"{prefix}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        if shape.has_experts(layer):
            tensors[f"{prefix}.mlp.gate.weight"] = (shape.num_experts, width)
            for expert in range(shape.num_experts):
                tensors |= _mlp(f"{prefix}.mlp.experts.{expert}", width, shape.expert_intermediate_size)
        else:
            tensors |= _mlp(f"{prefix}.mlp", width, shape.intermediate_size, bias=mlp_bias)
    return tensors | {"model.norm.weight": (width,), "lm_head.weight": (shape.vocab_size, width)}


def _mlp(prefix: str, width: int, inner: int, *, bias: bool = False) -> dict[str, tuple[int, ...]]:
    sizes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    tensors: dict[str, tuple[int, ...]] = {f"{prefix}.{name}_proj.weight": size for name, size in sizes.items()}
    return tensors | ({f"{prefix}.{name}_proj.bias": size[:1] for name, size in sizes.items()} if bias else {})


def tensor_problem(expected: Shapes, present: Shapes, *, tied: bool) -> str | None:
    """Describes missing, misshapen and unknown tensors as a predicate; None if there are none."""
    missing = [name for name in expected if name not in present and not (tied and name == "lm_head.weight")]
    unexpected = [name for name in present if name not in expected and not name.endswith(IGNORED_SUFFIX)]
    mismatched = [
        f"{name} with {list(present[name])} instead of {list(size)}"
        for name, size in expected.items()
        if name in present and present[name] != size
    ]
    found = [
        f"{verb} {pluralize(len(names), 'tensor')} {what}: {listed(names)}"
        for verb, what, names in (
            ("lack", "that config.json describes", missing),
            ("hold", "in sizes that config.json contradicts", mismatched),
            ("hold", "that config.json does not describe", unexpected),
        )
        if names
    ]
    return "; they ".join(found) or None


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    all_names = list(names)
    text = ", ".join(all_names[:MAX_NAMES_IN_MESSAGE])
    left = len(all_names) - MAX_NAMES_IN_MESSAGE
    return text if left <= 0 else f"{text} and {left} more"
