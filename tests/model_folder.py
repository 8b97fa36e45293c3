"""A folder that passes for a model until somebody loads it: for tests of what is judged beforehand."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

MODEL_CONFIG = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip
TEMPLATE = "{% for message in messages %}<|start|>{{ message.content }}{% endfor %}"


def safetensors(num_bytes: int = 16) -> bytes:
    """A safetensors file of one tensor of `num_bytes` bytes."""
    header = {"norm": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * num_bytes


def tokenizer(num_tokens: int = 127, added: dict[str, int] | None = None) -> dict[str, Any]:
    """The parts of a tokenizer.json that say which ids there are: `num_tokens` pieces, and added tokens by name."""
    added = {"<|start|>": num_tokens} if added is None else added
    return {
        "model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(num_tokens)}, "merges": []},
        "added_tokens": [{"id": number, "content": text} for text, number in added.items()],
    }


def write_model_folder(folder: Path, *, without: str = "", **config: Any) -> Path:
    """Write the folder; `without` leaves a file out, `config` replaces values of config.json."""
    files = {
        "config.json": json.dumps(MODEL_CONFIG | config).encode(),
        "tokenizer.json": json.dumps(tokenizer()).encode(),
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": TEMPLATE.encode(),
        "model.safetensors": safetensors(),
    }
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        if name != without:
            (folder / name).write_bytes(content)
    return folder
