"""Describes the parts of a run's model, with sizes and parameters, from its `config.json`.

The file is searched for in the record of the newest attempt, in the trained model, and in the checkpoints of the run.
The sizes of well-known models are known without it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from telescope.config.model_shape import ModelShape, known_shape
from telescope.dashboard.registry import config_of, json_object
from telescope.record.files import read_json
from telescope.record.reader import Run

CONFIG = "config.json"


def architecture_of(run: Run) -> dict[str, Any]:
    """Returns name, sizes and parts of the model. `parts` is empty if they are unknown."""
    name = config_of(run)[0].get("model")
    config, source = _model_config(run)
    shape = ModelShape.from_config(config) if config else known_shape(str(name or ""))
    found: dict[str, Any] = {"name": name, "source": source, "model_type": config.get("model_type")}
    if shape is None:
        numbers = ("layers", "parameters", "active_parameters", "kv_bytes_per_token", "max_position_embeddings")
        return {**found, **dict.fromkeys(numbers), "parts": []}
    # A token visits only some experts.
    idle = shape.num_experts - min(shape.num_experts, shape.experts_per_token)
    expert = 3 * shape.hidden_size * shape.expert_intermediate_size
    return {
        **found,
        "source": source if config else "a table of well-known models",
        "layers": shape.num_layers,
        "parameters": shape.num_parameters,
        "active_parameters": shape.num_parameters - shape.num_sparse_layers() * idle * expert,
        "kv_bytes_per_token": shape.kv_bytes_per_token("bfloat16"),
        "max_position_embeddings": shape.max_position_embeddings,
        "parts": parts_of(shape),
    }


def parts_of(shape: ModelShape) -> list[dict[str, Any]]:
    """Returns the parts in the order of the forward pass, with count, sizes in words, and parameters of one."""
    hidden = shape.hidden_size
    table = shape.vocab_size * hidden
    attention = shape.dense_layer_parameters - 3 * hidden * shape.intermediate_size
    kind = "heads" if shape.num_kv_heads == shape.num_heads else f"heads, {shape.num_kv_heads} of keys and values,"
    parts = [
        ("Embedding", 1, f"{shape.vocab_size} tokens x {hidden}", table),
        ("Attention with norms", shape.num_layers, f"{shape.num_heads} {kind} of {shape.head_dim}", attention),
    ]
    if dense := shape.num_dense_layers():
        inner = shape.intermediate_size
        parts.append(("Gated MLP", dense, f"{hidden} to {inner}", shape.dense_layer_parameters - attention))
    if sparse := shape.num_sparse_layers():
        inner = shape.expert_intermediate_size
        sizes = f"{shape.num_experts} of {hidden} to {inner}, {shape.experts_per_token} for a token"
        parts.append(("Experts with router", sparse, sizes, shape.sparse_layer_parameters - attention))
    parts.append(("Last norm", 1, str(hidden), hidden))
    shared = shape.tied_embeddings
    parts.append(("Output", 1, "the embedding" if shared else f"{hidden} x {shape.vocab_size}", 0 if shared else table))
    return [dict(zip(("part", "count", "sizes", "parameters"), part, strict=True)) for part in parts]


def _model_config(run: Run) -> tuple[Mapping[str, Any], str | None]:
    for attempt in reversed(run.attempts()):
        if found := json_object(attempt.get("model_config")):
            return found, f"attempt {attempt['attempt']}"
    folders: list[Path] = [run.files.model]
    if run.files.checkpoints.is_dir():
        folders += sorted(run.files.checkpoints.glob("step_*/hf_meta"))
    for folder in folders:
        try:
            found = read_json(folder / CONFIG)
        except (OSError, ValueError):
            continue  # a file that another program writes; the next place may have a valid one
        if isinstance(found, dict):
            return found, str((folder / CONFIG).relative_to(run.files.run_dir))
    return {}, None
