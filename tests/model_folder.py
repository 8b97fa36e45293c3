"""A model folder without data: its files pass every check that is made before a model is loaded."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MODEL_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
TEMPLATE = "{% for message in messages %}<|start|>{{ message.content }}{% endfor %}"


NUM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1}


def safetensors(shapes: Mapping[str, Sequence[int]], dtype: str = "F32") -> tuple[bytes, int]:
    """A safetensors file of zeros in these shapes: how it begins, and its length."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * NUM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text, 8 + len(text) + end


def write_safetensors(path: Path, shapes: Mapping[str, Sequence[int]], dtype: str = "F32", less: int = 0) -> None:
    """Writes such a file, without its last `less` bytes. The zeros take no disk."""
    beginning, length = safetensors(shapes, dtype)
    with path.open("wb") as file:
        file.write(beginning)
        file.truncate(length - less)


def tensors_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of a complete checkpoint of a Qwen2 model with tied embeddings."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    head = width // config["num_attention_heads"]
    outputs = {"q": width, "k": config["num_key_value_heads"] * head, "v": config["num_key_value_heads"] * head}
    layer: dict[str, tuple[int, ...]] = {
        f"self_attn.{name}_proj.weight": (size, width) for name, size in outputs.items()
    }
    layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in outputs.items()}
    layer |= {"self_attn.o_proj.weight": (width, width), "mlp.down_proj.weight": (width, inner)}
    layer |= {f"mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
    layer |= {f"{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    return {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        **{
            f"model.layers.{i}.{name}": size for i in range(config["num_hidden_layers"]) for name, size in layer.items()
        },
        "model.norm.weight": (width,),
    }


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
    files = {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": json.dumps(tokenizer()).encode(),
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": TEMPLATE.encode(),
    }
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        if name != without:
            (folder / name).write_bytes(content)
    if without != "model.safetensors":
        write_safetensors(folder / "model.safetensors", tensors_of(config))
    return folder
