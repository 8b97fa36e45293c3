"""A model folder without data: its files pass every check that is made before a model is loaded."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from telescope.config.model_contents import CAUSAL_LM_CLASSES, expected_tensors

MODEL_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
TEMPLATE = "{% for message in messages %}<|start|>{{ message.content }}{% endfor %}"


def safetensors(shapes: Mapping[str, Sequence[int]], num_bytes: int = 16, dtype: str = "F32") -> bytes:
    """A safetensors file whose header lists these shapes, each with the same `num_bytes` bytes of data."""
    header = {
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": [0, num_bytes]} for name, shape in shapes.items()
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * num_bytes


def tensors_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of a complete checkpoint with this config.json, with the output layer left out if it is tied."""
    shapes = expected_tensors(config) or {}
    if config.get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    return shapes


def tokenizer(num_tokens: int = 127, added: dict[str, int] | None = None) -> dict[str, Any]:
    """The parts of a tokenizer.json that say which ids there are: `num_tokens` pieces, and added tokens by name."""
    added = {"<|start|>": num_tokens} if added is None else added
    return {
        "model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(num_tokens)}, "merges": []},
        "added_tokens": [{"id": number, "content": text} for text, number in added.items()],
    }


def write_model_folder(folder: Path, *, without: str = "", **config: Any) -> Path:
    """Write the folder; `without` leaves a file out, `config` replaces values of config.json."""
    config = MODEL_CONFIG | config
    if config["model_type"] in CAUSAL_LM_CLASSES:
        config["architectures"] = [CAUSAL_LM_CLASSES[config["model_type"]]]
    files = {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": json.dumps(tokenizer()).encode(),
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": TEMPLATE.encode(),
        "model.safetensors": safetensors(tensors_of(config)),
    }
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        if name != without:
            (folder / name).write_bytes(content)
    return folder
