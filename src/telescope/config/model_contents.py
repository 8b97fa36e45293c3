"""Checks a tokenizer, and tensors in weight files against `config.json`.

Pure functions of parsed JSON and of the files' first bytes; no weights are read. `model_files` finds the files and
words the errors. A checkpoint that lacks a tensor loads without an error: the tensor keeps its random initial values.
Other architectures than those in `CAUSAL_LM_CLASSES` are checked by the trainer when it loads them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from telescope.config.model_shape import ModelShape
from telescope.utils.text import pluralize

HEADER_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # limit of the format: https://github.com/huggingface/safetensors#format

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that are not quantized, as a safetensors header names them."""


class StoredTensor(NamedTuple):
    """A tensor as the header of its file describes it."""

    dtype: str
    shape: tuple[int, ...]


def safetensors_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors in a safetensors file by name. Reads the header only.

    The format: the header's length as an unsigned 64-bit little-endian number, the header as a JSON object of
    `{name: {dtype, shape, data_offsets: [begin, end]}}`, and the data, which the offsets count from 0.

    Raises `ValueError` with the reason when the file cannot hold what its header lists.
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(HEADER_LENGTH_BYTES)
        if len(prefix) < HEADER_LENGTH_BYTES:
            raise ValueError(f"it has {num_bytes} bytes, which is no safetensors file")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES or HEADER_LENGTH_BYTES + length > num_bytes:
            raise ValueError(
                f"its header would take {length:,} bytes, and the file has {num_bytes:,}: it is cut off or damaged"
            )
        text = file.read(length)
    try:
        entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        ends = [int(entry["data_offsets"][1]) for entry in entries.values()]
        tensors = {
            name: StoredTensor(str(entry["dtype"]), tuple(map(int, entry["shape"]))) for name, entry in entries.items()
        }
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise ValueError("its header does not follow the format: it is damaged, or no safetensors file") from None
    wanted = HEADER_LENGTH_BYTES + length + max(ends, default=0)
    if num_bytes < wanted:
        raise ValueError(f"its header lists {wanted:,} bytes, and the file has {num_bytes:,}: it is cut off")
    return tensors


def quantized_tensors(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Returns the names and dtypes of quantized weights. Buffers, such as masks, may be whole numbers."""
    return [
        f"{name} ({tensor.dtype})"
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.dtype not in FLOAT_DTYPES
    ]


def tokenizer_problem(tokenizer: Any) -> str | None:
    """Returns why a parsed tokenizer.json is invalid."""
    if not isinstance(tokenizer, Mapping) or not isinstance(tokenizer.get("model"), Mapping):
        return "it does not describe a tokenizer (it has no `model`)"
    if not tokenizer["model"].get("vocab"):
        return "its vocabulary is empty"
    return None


def largest_token_id(tokenizer: Mapping[str, Any], tokenizer_config: Mapping[str, Any], template: str) -> int | None:
    """Returns the largest token id of a valid tokenizer.json; None if unknown.

    That is the largest of the vocabulary, of the special tokens, and of the added tokens that the chat template writes.
    Other added tokens do not count: models for text may keep some of their relatives for images, beyond their own
    vocabulary.
    """
    vocabulary = tokenizer["model"]["vocab"]
    ids: list[int] = []
    if isinstance(vocabulary, Mapping):
        ids += [number for number in vocabulary.values() if isinstance(number, int)]
    elif isinstance(vocabulary, list):  # a unigram model: the id is the position
        ids.append(len(vocabulary) - 1)
    special = {token_text(tokenizer_config.get(name)) for name in SPECIAL_TOKENS}
    for entry in tokenizer.get("added_tokens") or []:
        if isinstance(entry, Mapping) and isinstance(entry.get("id"), int) and isinstance(entry.get("content"), str):
            text = entry["content"]
            if text in special or (text and text in template):
                ids.append(entry["id"])
    return max(ids, default=None)


def token_text(token: Any) -> str | None:
    """Returns a special token's text, given as text or object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


Shapes = Mapping[str, tuple[int, ...]]

CAUSAL_LM_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""`model_type` to the class with an output layer, for the architectures whose tensors are known here."""

IGNORED_SUFFIX = "rotary_emb.inv_freq"  # buffers in old checkpoints that every loader computes anew

MAX_NAMES_IN_MESSAGE = 4


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the model's tensors, with the output layer of tied embeddings. None for an unknown architecture."""
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
    """Describes missing, misshapen and unknown tensors as a predicate. None if there are none."""
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
