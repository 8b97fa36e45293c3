"""Finds the checkpoints and models of `telescope eval` and their model folders.

A target is a native checkpoint, a model folder, or a model of the Hugging Face hub. A native checkpoint is converted
into a temporary folder, unless its run already has a converted copy.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from telescope.config.eval_config import EvalCommand
from telescope.config.model_source import is_local_path
from telescope.errors import UserError
from telescope.orchestrator.checkpoints import HF_META, META, STEP_NAME, read_meta
from telescope.orchestrator.conversion import (
    CONVERTED,
    checkpoints_of_run,
    config_of_run,
    convert,
    identity_of,
    is_converted,
)
from telescope.record.files import RunFiles, read_json
from telescope.record.reader import is_run
from telescope.utils.text import user_path
from telescope.weights.model_folder import model_folder, read_origin, weight_files

CONFIG = "config.json"

SAME_IN_ALL = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_experts", "moe_intermediate_size", "tie_word_embeddings", "rope_theta",
    "rope_scaling", "rope_parameters", "sliding_window",
)  # fmt: skip
"""Fields of config.json that models must share to be loaded into one engine."""


@dataclass(frozen=True)
class EvalTarget:
    """One model to measure. `path` is its folder. If `is_native`, it is a checkpoint that must be converted."""

    label: str
    path: Path
    step: int | None
    is_native: bool

    @property
    def run_dir(self) -> Path | None:
        """Returns the run directory that contains the target, or None."""
        return next((parent for parent in self.path.resolve().parents[:2] if is_run(parent)), None)

    @property
    def description(self) -> str:
        """Returns the label and the origin of a model folder's weights."""
        origin = None if self.is_native else read_origin(self.path)
        return self.label if origin is None else f"{self.label} ({origin})"

    def run_config(self) -> dict[str, Any] | None:
        """Returns the config of the target's run, or None."""
        if self.is_native and isinstance(config := read_meta(self.path).get("config"), dict):
            return config
        return config_of_run(self.run_dir) or None if self.run_dir else None

    def identity(self) -> str:
        """Returns a digest of the weights' origin. A converted checkpoint has the digest of the original."""
        if self.is_native:
            origin: Any = identity_of(read_meta(self.path))
        elif (made_of := read_origin(self.path)) is not None:
            origin = msgspec.structs.asdict(made_of.checkpoint)
        else:
            stats = [(file.name, file.stat()) for file in weight_files(self.path)]
            origin = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        return hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()[:16]

    def model_files_folder(self) -> Path:
        """Returns the folder with config and tokenizer. Old checkpoints refer to the first model of their run."""
        if not self.is_native:
            return self.path
        kept = self.path / HF_META
        return kept if (kept / CONFIG).is_file() else user_path(read_meta(self.path)["model"])

    def model_folder(self, scratch: Path, dtype: str) -> Path:
        """Returns a model folder with the weights. Converts a checkpoint to `scratch` if necessary."""
        if not self.is_native:
            return self.path
        run_dir = self.run_dir
        if run_dir is not None:
            converted = run_dir / CONVERTED / self.path.name
            if converted.is_dir() and is_converted(self.path, converted):
                return converted
        folder = scratch / self.path.name
        convert(self.path, folder, dtype=dtype)
        return folder


def find_targets(command: EvalCommand, sources: Sequence[str], steps: Sequence[int] | None = None) -> list[EvalTarget]:
    """Returns the distinct targets of arguments and fields, sorted by step.

    `sources` are the arguments. `steps` selects checkpoints of runs and folders. Raises `UserError` for targets that do
    not exist or cannot share an engine.
    """
    found = [target for source in sources for target in _targets_of(source, steps)]
    if command.checkpoint_dir is not None:
        found += _targets_of(command.checkpoint_dir, steps)
    for entry in command.checkpoints:
        for target in _targets_of(entry.path, None):
            found.append(target if entry.step is None else replace(target, step=entry.step))
    if isinstance(command.hf_weights, str | list):
        names = [command.hf_weights] if isinstance(command.hf_weights, str) else command.hf_weights
        found += [target for name in names for target in _targets_of(name, None)]
    elif command.hf_weights is True and (native := next((t for t in found if t.is_native), None)):
        raise UserError(
            f"hf_weights is true, and {native.path} is a checkpoint of the trainer. Leave hf_weights out, or convert "
            "it with `telescope convert`"
        )
    if not found:
        raise UserError(
            "eval needs a model: a run directory, a checkpoint, a model folder or a name on the hub, as in "
            "`telescope eval runs/first --eval countdown`. `telescope eval --help` explains it"
        )
    unique = list({target.path.resolve(): target for target in found}.values())
    unique.sort(key=lambda target: (target.step is not None, target.step or 0))
    _refuse_different_models(unique)
    return unique


def _targets_of(source: str, steps: Sequence[int] | None) -> list[EvalTarget]:
    path = user_path(source)
    if path.is_dir():
        if _is_model(path):
            return [_target(path)]
        folder = checkpoints_of_run(path).path if is_run(path) else path
        children = folder.iterdir() if folder.is_dir() else ()
        found = {int(m[1]): child for child in children if (m := STEP_NAME.fullmatch(child.name))}
        complete = {n: child for n, child in sorted(found.items()) if _is_model(child)}
        model = RunFiles(path).model
        if is_run(path) and any(model.glob("*.safetensors")):
            final = _target(model)
            if not complete and steps is None:
                return [final]
            if not complete and final.step is None:
                raise UserError(f"{source} has no complete checkpoint. {model} does not say its step: leave --step out")
            if final.step is not None and final.step > max(complete, default=0):  # the last checkpoint was not written
                complete[final.step] = model
        if not complete:
            raise UserError(
                f"{source} has no complete checkpoint and no model: neither {META} nor {CONFIG} in it or in a step_N "
                f"folder of {folder}"
            )
        if steps is not None and (missing := [step for step in steps if step not in complete]):
            has = ", ".join(child.name if child != model else f"{n} ({model})" for n, child in complete.items())
            raise UserError(f"{folder} has no step_{missing[0]}. It has {has}")
        return [_target(child) for n, child in complete.items() if steps is None or n in steps]
    if is_local_path(source) or source.endswith("/"):
        problem = "is a file" if path.is_file() else "does not exist"
        raise UserError(f"{source} {problem}. Give a run directory, a checkpoint, a model folder or a hub name")
    return [EvalTarget(source, model_folder(source), None, is_native=False)]


def _is_model(path: Path) -> bool:
    return (path / META).is_file() or (path / CONFIG).is_file()


def _target(path: Path) -> EvalTarget:
    match = STEP_NAME.fullmatch(path.resolve().name)
    is_native = (path / META).is_file()
    origin = None if is_native else read_origin(path)
    step = int(read_meta(path)["step"]) if is_native else int(match[1]) if match else None
    if origin is not None:
        step = origin.checkpoint.step
    return EvalTarget(path.name if match else str(path), path, step, is_native)


def _refuse_different_models(targets: Sequence[EvalTarget]) -> None:
    """Raises `UserError` unless all models have the same shape and tokenizer."""
    first = targets[0]
    for other in targets[1:]:
        one, two = (read_json(t.model_files_folder() / CONFIG) or {} for t in (first, other))
        differs = [name for name in SAME_IN_ALL if one.get(name) != two.get(name)]
        files = [t.model_files_folder() / "tokenizer.json" for t in (first, other)]
        if not differs and all(file.is_file() for file in files) and files[0].read_bytes() != files[1].read_bytes():
            differs = ["tokenizer.json"]
        if differs:
            raise UserError(
                f"{first.path} and {other.path} differ in {', '.join(differs)}, so one engine cannot load both. "
                "Evaluate them in two commands"
            )
