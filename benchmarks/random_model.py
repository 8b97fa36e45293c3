"""Builds models of real shapes with random weights and a small tokenizer.

    python benchmarks/random_model.py 4b FOLDER

Their text is noise, which takes as long to generate as real text. `forced_lengths` sets its length.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from fake_servers import save_tokenizer


def qwen2(width: int, inner: int, layers: int, heads: int, keys: int, vocab: int = 151_936) -> dict[str, Any]:
    """Returns the fields of a shape of Qwen2.5."""
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": keys, "vocab_size": vocab, "tie_word_embeddings": True,
    }  # fmt: skip


def qwen3(*sizes: int, head_dim: int = 128, tied: bool = True, **experts: Any) -> dict[str, Any]:
    """Returns the fields of a shape of Qwen3, whose heads have a size of their own."""
    return {**qwen2(*sizes), "head_dim": head_dim, "tie_word_embeddings": tied, **experts}


MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": qwen3(64, 192, 2, 2, 1, 2048, head_dim=32),
    "60m": qwen3(512, 1536, 12, 8, 4, 32_000, head_dim=64),
    "qwen2.5-1.5b": qwen2(1536, 8960, 28, 12, 2),
    "qwen2.5-3b": qwen2(2048, 11_008, 36, 16, 2),
    "0.6b": qwen3(1024, 3072, 28, 16, 8),
    "1.7b": qwen3(2048, 6144, 28, 16, 8),
    "4b": qwen3(2560, 9728, 36, 32, 8),
    "8b": qwen3(4096, 12_288, 36, 32, 8, tied=False),
    "14b": qwen3(5120, 17_408, 40, 40, 8, tied=False),
    "32b": qwen3(5120, 25_600, 64, 64, 8, tied=False),
    "moe": qwen3(2048, 6144, 6, 32, 4, tied=False, **MOE),
    "30b-a3b": qwen3(2048, 6144, 48, 32, 4, tied=False, **MOE),
}
"""Shapes of Qwen2.5 (arXiv:2412.15115) by name, of Qwen3 (arXiv:2505.09388), two for a CPU, and `moe`, six layers of
30B-A3B."""


def config_of(shape: str, **fields: Any) -> Any:
    """Returns the configuration of transformers for a shape."""
    from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig

    sizes = SHAPES[shape]
    kind: type[Any] = Qwen3MoeConfig if "num_experts" in sizes else Qwen3Config if "head_dim" in sizes else Qwen2Config
    return kind(
        **sizes, max_position_embeddings=131_072, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        architectures=[kind.__name__.replace("Config", "ForCausalLM")], **fields,
    )  # fmt: skip


def make_model(folder: Path, shape: str) -> None:
    """Writes config, weights (on a GPU in bfloat16) and tokenizer into `folder`, unless they exist."""
    if (folder / "tokenizer.json").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    end_token = save_tokenizer(folder, SHAPES[shape]["vocab_size"])
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    config = config_of(shape, bos_token_id=None, eos_token_id=end_token)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config = GenerationConfig(eos_token_id=end_token)
    tokenizer = (folder / "tokenizer.json").read_bytes()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer)


def prepare_model(folder: Path, shape: str) -> Path:
    """Builds the model below `folder` in a separate process, which frees its GPU memory."""
    model = folder / f"model-{shape}"
    subprocess.run([sys.executable, __file__, shape, str(model)], check=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    make_model(arguments.folder, arguments.shape)


if __name__ == "__main__":
    main()
