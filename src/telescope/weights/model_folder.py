"""Reads model folders with safetensors files: lists of tensors, single tensors, and the origin of the weights.

The driver lists tensors from the headers, without torch; an engine's workers read them.
"""

from __future__ import annotations

import functools
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from telescope.config.model_contents import safetensors_tensors
from telescope.config.model_source import META_SUFFIXES, is_downloaded, is_local_path
from telescope.errors import UserError
from telescope.utils.digests import damage, digests_of
from telescope.utils.text import single_line, user_path
from telescope.weights.plan import TensorMeta

MARKER = ".telescope"
"""File (JSON) of a model folder that names its run, step and dtype, and the digests of its weights."""


class ModelSource(msgspec.Struct):
    """Identifies a checkpoint among all others."""

    step: int
    time: float | None = None
    model: str | None = None
    config_hash: str | None = None


class ModelOrigin(msgspec.Struct):
    """The content of `MARKER`."""

    checkpoint: ModelSource
    dtype: str = "as saved"
    run: str | None = None
    weights: dict[str, str] = {}
    """Digest of each weight file and of their index."""
    files: list[str] = []
    """Names of the other files, which a user may edit."""

    def __str__(self) -> str:
        digest = "".join(sorted(self.weights.values()))
        digest = hashlib.sha256(digest.encode()).hexdigest()[:12] if digest else "unknown"
        return f"step {self.checkpoint.step} of run {self.run or 'unknown'}, weights {digest}"


def read_origin(folder: Path) -> ModelOrigin | None:
    """Returns the origin of a model folder's weights. None if the folder does not say."""
    try:
        return msgspec.json.decode((folder / MARKER).read_bytes(), type=ModelOrigin)
    except (OSError, ValueError, RecursionError):
        return None


def write_origin(folder: Path, origin: ModelOrigin) -> None:
    """Writes `MARKER` with the digests of the weights in `folder`. Raises `OSError`."""
    names = {path.name for path in folder.iterdir()} - {MARKER}
    weights = {name for name in names if name.endswith((".safetensors", ".index.json"))}
    origin = msgspec.structs.replace(origin, weights=digests_of(folder, weights), files=sorted(names - weights))
    (folder / MARKER).write_bytes(msgspec.json.format(msgspec.json.encode(origin), indent=1))


def is_whole(folder: Path, origin: ModelOrigin) -> bool:
    """Returns whether a model folder still has the weights that were written and all other files."""
    try:
        for content, name in (((folder / name).read_bytes(), name) for name in origin.files):
            if name.endswith(".json"):
                json.loads(content)
            elif not content:
                return False
    except (OSError, ValueError):
        return False
    return bool(origin.weights) and not damage(folder, origin.weights)


def model_folder(model: str, *, local: bool = False) -> Path:
    """Returns a model's folder on this machine. Downloads it from the hub if it is an identifier.

    With `local`, does not ask the hub, which may have newer weights. Raises `UserError` if the hub does not have it or
    cannot be reached.
    """
    if is_local_path(model):
        return user_path(model)
    from huggingface_hub import snapshot_download

    try:
        patterns = [f"*{suffix}" for suffix in (".safetensors", *META_SUFFIXES)]
        return Path(snapshot_download(model, allow_patterns=patterns, local_files_only=local))
    except Exception as error:  # every transport has exceptions of its own
        reason = single_line(str(error)).rstrip(".") or type(error).__name__
        raise UserError(f"{model} is not a folder here and cannot be downloaded: {reason}. Check the name") from error


def absolute_model(model: str) -> str:
    """Returns a hub identifier unchanged, and a path as an absolute path."""
    return str(user_path(model).absolute()) if is_local_path(model) else model


def base_weights(model: str) -> dict[str, str] | None:
    """Returns the identity of the adapters' base: `absolute_model` and `weights_digest`. None if it is unreadable."""
    try:
        folder = model_folder(model, local=is_downloaded(model))
        return {"model": absolute_model(model), "weights": weights_digest(folder)}
    except (OSError, ValueError, UserError):
        return None


def weights_digest(folder: Path) -> str:
    """Returns a digest of the names, dtypes, shapes and values of a model's weights.

    It does not depend on how tensors are distributed over files. Computed once for files that do not change. Raises
    `UserError` and `OSError`.
    """
    return _weights_digest(folder, tuple((path.name, path.stat().st_mtime_ns) for path in weight_files(folder)))


@functools.lru_cache
def _weights_digest(folder: Path, _files: tuple[tuple[str, int], ...]) -> str:
    import torch

    files = open_tensors(folder)

    def describe(meta: TensorMeta) -> str:
        tensor = files[meta.name].get_tensor(meta.name)
        values = hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return f"{meta.name} {tensor.dtype} {tuple(tensor.shape)} {values.hexdigest()}"

    with ThreadPoolExecutor() as pool:  # hashlib releases the interpreter lock
        lines = sorted(pool.map(describe, folder_metas(folder)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def check_base(folder: Path, base: dict[str, str] | None, checkpoint: Path) -> None:
    """Raises `UserError` if the weights in `folder` are not the base of a checkpoint's adapters (`base_weights`)."""
    if base and (found := weights_digest(folder)) != base["weights"]:
        raise UserError(
            f"{checkpoint} has adapters for other weights than those in {folder}: the digest was "
            f"{base['weights'][:12]} and is {found[:12]}. Restore the model that the run began with"
        )


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
    """Returns a model's safetensors files, as its index lists them. Raises `UserError` if one is missing."""
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


def open_tensors(folder: Path) -> dict[str, Any]:
    """Returns the open safetensors file of each tensor in a folder, which reads it to the CPU. Raises `UserError`."""
    from safetensors import SafetensorError, safe_open

    file_of: dict[str, Any] = {}
    for path in weight_files(folder):
        try:
            file: Any = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise UserError(f"{path} cannot be read: {error}. Convert or download the model again") from error
        file_of |= dict.fromkeys(file.keys(), file)
    return file_of
