"""Builds models of real shapes with random weights and a small tokenizer.

    python benchmarks/random_model.py qwen3-4b FOLDER

Their text is noise, which takes as long to generate as real text. `forced_lengths` sets its length.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fake_servers import save_tokenizer

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 2048, "tie_word_embeddings": True, "max_position_embeddings": 32_768,
    },
    "qwen2.5-0.5b": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
        "max_position_embeddings": 32_768,
    },
    "qwen2.5-1.5b": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
        "max_position_embeddings": 32_768,
    },
    "qwen2.5-3b": {
        "hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
        "max_position_embeddings": 32_768,
    },
    "qwen3-4b": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
        "max_position_embeddings": 32_768,
    },
}  # fmt: skip
"""Shapes of Qwen2.5 (arXiv:2412.15115), of Qwen3 (arXiv:2505.09388; with `head_dim`), and one for a CPU."""


def make_model(folder: Path, shape: str, *, on_gpu: bool) -> None:
    """Writes config, weights (bfloat16, on the CPU float32) and tokenizer into `folder`, unless they exist."""
    if (folder / "tokenizer.json").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config, Qwen3Config

    folder.mkdir(parents=True, exist_ok=True)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    end_token = save_tokenizer(folder, SHAPES[shape]["vocab_size"])
    kind: type[Any] = Qwen3Config if "head_dim" in SHAPES[shape] else Qwen2Config
    config = kind(**SHAPES[shape], rope_theta=1e6, bos_token_id=None, eos_token_id=end_token, dtype=dtype)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda" if on_gpu else "cpu"):
            model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)
    model.generation_config = GenerationConfig(eos_token_id=end_token)
    tokenizer = (folder / "tokenizer.json").read_bytes()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    make_model(arguments.folder, arguments.shape, on_gpu=torch.cuda.is_available())


if __name__ == "__main__":
    main()
