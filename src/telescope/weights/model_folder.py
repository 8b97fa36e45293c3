"""Reads model folders with safetensors files: lists, and single tensors.

The driver lists them from the headers, without torch; the workers of an engine read them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telescope.config.model_contents import safetensors_tensors
from telescope.config.model_source import is_local_path
from telescope.errors import UserError
from telescope.weights.plan import TensorMeta

if TYPE_CHECKING:
    import torch


def model_folder(model: str) -> Path:
    """Returns the folder of a model on this machine. Downloads it from the hub if it is an identifier."""
    if is_local_path(model):
        return Path(model).expanduser()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors"]))


def folder_metas(folder: Path) -> list[TensorMeta]:
    """Returns names and shapes of a model's tensors, without tied ones. Raises `UserError`."""
    files = weight_files(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
        stored = {name: tensor for file in files for name, tensor in safetensors_tensors(file).items()}
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no complete model: {error}. Convert or download it again") from error
    if config.get("tie_word_embeddings"):
        stored.pop("lm_head.weight", None)
    return [TensorMeta(name, tensor.shape) for name, tensor in stored.items()]


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a model, as its index lists them. Raises `UserError` if one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise UserError(
            f"{folder} has no {missing[0] if missing else 'safetensors file'}. Convert or download it again"
        )
    return [folder / name for name in names]


def folder_reader(folder: Path) -> Callable[[str], torch.Tensor]:
    """Returns a function that reads a tensor by name, on the CPU."""
    from safetensors import safe_open

    file_of: dict[str, Any] = {}
    for path in weight_files(folder):
        file: Any = safe_open(path, framework="pt")
        file_of |= dict.fromkeys(file.keys(), file)
    return lambda name: file_of[name].get_tensor(name)
