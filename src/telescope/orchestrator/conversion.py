"""Converts checkpoints of a run to model folders in Hugging Face format.

A checkpoint is read and written tensor by tensor (`trainer.backends.fsdp.checkpoint`, `trainer.hf_folder`), so memory
does not grow with the model. Only `read_checkpoint` depends on the backend that wrote it.

Invariant: a model folder names its checkpoint (`ModelOrigin`), so that a complete conversion is skipped and another
model is not overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from telescope.errors import RunError, UserError
from telescope.orchestrator.checkpoints import HF_META, META, CheckpointFolder, SavedConfig, read_meta, refuse_damage
from telescope.record.files import RunFiles
from telescope.record.reader import is_run
from telescope.utils.text import user_path
from telescope.weights.model_folder import ModelOrigin, ModelSource, check_base, is_whole, model_folder, read_origin

if TYPE_CHECKING:
    import torch

    from telescope.trainer.checkpoint_names import CheckpointNames
    from telescope.weights.plan import TensorMeta

CONVERTED = "hf"  # folder of converted checkpoints in a run directory
ADAPTER = "adapter"  # takes the place of a dtype in the origin of an adapter's folder
CONVERTED_ADAPTERS = "adapters_hf"  # folder of converted adapters in a run directory
DTYPES = ("float32", "bfloat16", "float16")  # dtypes that a model can be cast to
OnBytes = Callable[[int, int], None]  # called with the bytes written so far and the bytes of the whole model


@dataclass(frozen=True)
class ModelWeights:
    """The weights of a checkpoint by Hugging Face names. `read` yields them in order."""

    metas: list[TensorMeta]
    read: Callable[[], Iterator[tuple[str, torch.Tensor]]]


def find_checkpoints(folder: Path, step: int | str | None = None) -> dict[int, Path]:
    """Returns complete checkpoints of a run or folder by step: the newest, `step`, or "all". Raises `UserError`."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder. Give a run directory, or a folder with step_N folders")
    if (folder / META).is_file():
        raise UserError(f"{folder} is one checkpoint. Give it as --checkpoint-dir, with --output-dir")
    checkpoints = checkpoints_of_run(folder) if is_run(folder) else CheckpointFolder(folder)
    found = {known: checkpoints.folder_of(known) for known in checkpoints.steps()}
    model = RunFiles(folder).model
    trained = f". {model} has the trained weights in this form" if (model / "config.json").is_file() else ""
    if not found:
        raise UserError(
            f"{checkpoints.path} has no complete checkpoint (step_N with {META}). Give a run that was started with "
            f"checkpoint_every, or a folder with step_N folders{trained}"
        )
    if step == "all":
        return found
    wanted = max(found) if step is None else int(step)
    if wanted not in found:
        raise UserError(
            f"{checkpoints.path} has no checkpoint after step {wanted}. It has {', '.join(map(str, found))}{trained}"
        )
    return {wanted: found[wanted]}


def checkpoints_of_run(run_dir: Path) -> CheckpointFolder:
    """Returns the checkpoints of a run, in `checkpoint_dir` of its config."""
    chosen = config_of_run(run_dir).get("checkpoint_dir")
    return CheckpointFolder(user_path(chosen) if chosen else RunFiles(run_dir).checkpoints)


def config_of_run(run_dir: Path) -> dict[str, Any]:
    """Returns the values of a run's `config.yaml`, if any. Raises `ConfigError`."""
    from telescope.config.yaml_file import read_yaml_file

    file = RunFiles(run_dir).config
    return read_yaml_file(file)[0] if file.is_file() else {}


def is_converted(checkpoint: Path, target: Path, dtype: str | None = None) -> bool:
    """Returns whether `target` is the complete model of this checkpoint. False if it is damaged, missing or empty.

    Raises `UserError` if it contains anything else.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    wanted, found = origin_of(read_meta(checkpoint), dtype), read_origin(target)
    if found is not None and (found.checkpoint, found.dtype) == (wanted.checkpoint, wanted.dtype):
        return is_whole(target, found)
    differs = "" if found is None else f" ({_differences(found, wanted)})"
    raise UserError(f"{target} exists and is not this checkpoint{differs}. Remove it, or choose another folder")


def convert(
    checkpoint: Path,
    target: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    on_bytes: OnBytes = lambda done, total: None,
) -> None:
    """Writes the model of a checkpoint to `target`.

    `target` appears when it is complete. Its `dtype` is by default that of the checkpoint. Raises `UserError` if
    `checkpoint` is damaged or no checkpoint, `RunError` if the disk is full.
    """
    import torch

    from telescope.trainer.hf_folder import CONFIG, MAX_SHARD_BYTES, size_of, with_dtype, write_model_folder

    meta = read_meta(checkpoint)
    refuse_damage(checkpoint, meta)
    files = model_files(checkpoint, meta)
    max_shard_bytes = max_shard_bytes or MAX_SHARD_BYTES
    weights = read_checkpoint(checkpoint, meta, files[CONFIG])
    metas = [m if dtype is None or m.exact else replace(m, dtype=dtype) for m in weights.metas]
    stored = {m.dtype for m in metas}
    files = with_dtype(files, dtype or max(stored, key=lambda name: sum(m.numel for m in metas if m.dtype == name)))
    origin = origin_of(meta, dtype)
    total, done = sum(map(size_of, metas)), 0

    def written(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        on_bytes(done, total)

    dtypes = {m.name: getattr(torch, m.dtype) for m in metas}
    tensors = ((name, tensor.to(dtypes[name])) for name, tensor in weights.read())
    try:
        write_model_folder(
            target, metas, tensors, files, max_shard_bytes=max_shard_bytes, on_bytes=written, origin=origin
        )
    except OSError as error:
        raise RunError(f"{error}. Free space, or choose another folder") from error


def read_checkpoint(checkpoint: Path, meta: dict[str, Any], config: bytes) -> ModelWeights:
    """Returns the weights of any backend's checkpoint, tied weights once. `config` is the model's config.json.

    Memory holds one tensor, and for a Megatron checkpoint one parameter. Raises `UserError` for an unknown format.
    """
    import torch

    from telescope.trainer.backends.fsdp.checkpoint import read_weights, saved_weights
    from telescope.trainer.checkpoint_names import CheckpointNames
    from telescope.trainer.model import PREFIX, skeleton_of
    from telescope.weights.plan import TensorMeta

    if not (checkpoint / ".metadata").is_file():
        raise UserError(
            f"{checkpoint} was written by train_backend {meta.get('train_backend')!r} in another format (it has no "
            ".metadata of torch.distributed.checkpoint). Only checkpoints of the backends fsdp and megatron can be "
            "converted"
        )
    if meta.get("train_backend") == "megatron":
        from telescope.trainer.backends.megatron import saved as megatron

        return ModelWeights(*megatron.saved_weights(checkpoint, json.loads(config)))
    names = CheckpointNames(skeleton_of(json.loads(config)))
    if (settings := adapter_settings(meta)) is not None:
        return _merged_weights(checkpoint, meta, settings, names)
    is_tied = _is_tied(config)
    saved = [m for m in saved_weights(checkpoint) if not (is_tied and m.name == f"{PREFIX}lm_head.weight")]
    metas = [
        TensorMeta(name, tuple(part.shape), m.dtype, own in names.float32_buffers)
        for m in saved
        for own in (m.name.removeprefix(PREFIX),)
        for name, part in names.parts(own, torch.empty(m.shape, device="meta"))
    ]

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in read_weights(checkpoint, saved):
            yield from names.parts(name.removeprefix(PREFIX), tensor)

    return ModelWeights(metas, read)


def adapter_settings(meta: dict[str, Any]) -> SavedConfig | None:
    """Returns the run's config if the checkpoint has adapters, or None if it has all weights."""
    config = msgspec.convert(meta["config"], SavedConfig)
    return config if config.lora_rank else None


def _base_of(checkpoint: Path, meta: dict[str, Any]) -> Path:
    """Returns the folder of the run's first model, searched for here and above the checkpoint. It need not exist."""
    typed = meta["model"]
    known = (meta.get("base") or meta)["model"]
    places = [Path(known), user_path(typed), *(parent / typed for parent in checkpoint.absolute().parents)]
    return next((place for place in places if (place / "config.json").is_file()), None) or model_folder(known)


def _read_adapter(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns the adapters of a checkpoint by their names in the model."""
    from telescope.trainer.backends.fsdp.checkpoint import read_weights, saved_weights
    from telescope.trainer.model import PREFIX

    return {name.removeprefix(PREFIX): tensor for name, tensor in read_weights(checkpoint, saved_weights(checkpoint))}


def _merged_weights(
    checkpoint: Path, meta: dict[str, Any], config: SavedConfig, names: CheckpointNames
) -> ModelWeights:
    """Returns the first model's weights with the checkpoint's adapters added, in `model_dtype`."""
    import torch

    from telescope.trainer.lora import A, B, is_adapter, merged
    from telescope.weights.model_folder import folder_metas, open_tensors

    dtype, nothing = config.model_dtype, torch.empty(0, device="meta")
    exact = {part for own in names.float32_buffers for part, _ in names.parts(own, nothing)}
    try:
        base = _base_of(checkpoint, meta)
        check_base(base, meta.get("base"), checkpoint)
        metas = [
            replace(m, dtype="float32" if m.name in exact else dtype, exact=m.name in exact) for m in folder_metas(base)
        ]
        files = open_tensors(base)
    except (OSError, UserError) as error:
        raise UserError(
            f"{checkpoint} has adapters for the model {config.model!r}, whose weights cannot be read: {error}. "
            "Restore it, or convert with --adapter, which needs no model"
        ) from error
    adapter = _read_adapter(checkpoint)
    layers = [name.removesuffix(A) for name in adapter if name.endswith(A)]
    adapted = {part: layer for layer in layers for part, _ in names.parts(f"{layer}.weight", nothing)}
    if missing := sorted(adapted.keys() - {m.name for m in metas}):
        raise UserError(f"{base} has no {missing[0]}, for which {checkpoint} has an adapter")
    assert all(is_adapter(name) for name in adapter)
    scaling = config.lora_alpha / (config.lora_rank or 1)

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for m in metas:
            weight = files[m.name].get_tensor(m.name).to(getattr(torch, m.dtype))
            if (layer := adapted.get(m.name)) is not None:
                weight = merged(weight, adapter[layer + A], adapter[layer + B], scaling)
            yield m.name, weight

    return ModelWeights(metas, read)


def convert_adapter(checkpoint: Path, target: Path) -> None:
    """Writes the adapter of a checkpoint to `target` in peft's format. Raises `UserError` if it has no adapter."""
    from telescope.trainer.lora import adapter_tensors, config_of_adapter, write_adapter

    meta = read_meta(checkpoint)
    refuse_damage(checkpoint, meta)
    config = adapter_settings(meta)
    if config is None:
        raise UserError(f"{checkpoint} has no adapter, since its run trained all weights. Convert it without --adapter")
    tensors = dict(adapter_tensors(_read_adapter(checkpoint).items()))
    settings = msgspec.structs.replace(config, model=(meta.get("base") or meta)["model"])
    try:
        write_adapter(target, tensors, config_of_adapter(tensors, settings), origin_of(meta, ADAPTER))
    except OSError as error:
        raise RunError(f"{error}. Free space, or choose another folder") from error


def model_files(checkpoint: Path, meta: dict[str, Any]) -> dict[str, bytes]:
    """Returns config, tokenizer and template files of a checkpoint's model, by name.

    Raises `UserError` if the checkpoint has none and the folder of the model is gone.
    """
    from telescope.config.model_source import META_SUFFIXES

    folder = checkpoint / HF_META
    if not (folder / "config.json").is_file():
        folder = _base_of(checkpoint, meta)
    if (folder / "config.json").is_file():
        names = (path for path in folder.iterdir() if path.suffix in META_SUFFIXES)
        return {path.name: path.read_bytes() for path in names if not path.name.endswith(".index.json")}
    raise UserError(
        f"{checkpoint / HF_META} has no config.json, and the model {meta.get('model')!r} of the run is not a folder "
        f"here. Copy the model's config and tokenizer files to {checkpoint / HF_META}"
    )


def _is_tied(config: bytes) -> bool:
    """Returns whether the output layer shares the embedding's weight."""
    from transformers import AutoConfig

    values = json.loads(config)
    tied = values.get("tie_word_embeddings")
    if tied is None:  # the default of the architecture
        try:
            tied = AutoConfig.for_model(values["model_type"]).tie_word_embeddings
        except (KeyError, ValueError):  # custom code; a second copy of the weight does no harm
            tied = False
    return bool(tied)


def identity_of(meta: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of `meta.json` that distinguish a checkpoint from all others."""
    return {name: meta.get(name) for name in ("step", "time", "model", "config_hash")}


def origin_of(meta: dict[str, Any], dtype: str | None = None) -> ModelOrigin:
    """Returns the origin of a model made of the checkpoint with this `meta.json`."""
    return ModelOrigin(ModelSource(**identity_of(meta)), dtype or "as saved", meta.get("run"))


def _differences(found: ModelOrigin, wanted: ModelOrigin) -> str:
    """Returns the values in which two origins differ, as text."""
    have, want = ({**msgspec.structs.asdict(side.checkpoint), "dtype": side.dtype} for side in (found, wanted))
    return ", ".join(f"{name} {have[name]} instead of {want[name]}" for name in want if have[name] != want[name])
