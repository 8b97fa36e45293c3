"""Finds trainer tensors in an engine's parameters and computes their fingerprints.

An engine fuses projections (`q_proj`, `k_proj`, `v_proj` into `qkv_proj`), divides them over tensor-parallel ranks,
pads the vocabulary, and on the CPU packs them for its matrix kernels and frees the plain weight. Owns the map from
trainer tensors to locations in parameters, and reading them. vLLM's layers are known by class name and attributes only;
vLLM is not imported, so that tests can use stand-ins. Experts have layouts of their own: `engine_experts`. Quantized
layers cannot be read back: `engine_quantized` computes what they must contain.

Invariants:
- The map is written from the meaning of the layers (heads, partitions, ranks), not derived by running the model's
  weight loader, so that a fault of the loader is detected.
- The values are those that the forward pass uses. If a layer multiplies with a packed copy, the copy is read by
  multiplying it with the identity through the layer's own operator. A row of the identity selects one column and all
  other products are zero, so the result is that column exactly: 1 x w plus zeros is not rounded in any float type.
  Plain parameters (GPU, embeddings, norms, biases) are read directly.
- A tied output layer is a second location of the input embedding; both are checked.
- A tensor without a location, and a parameter that no tensor explains, are reported, never skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from telescope.weights.engine_experts import expert_slices, experts_as_loaded, is_experts, why_unreadable
from telescope.weights.engine_quantized import SCALE, Quantize, QuantizedReference, is_quantized, quantized_matrices
from telescope.weights.fingerprint import Share, Slice, as_matrix_shape, fingerprint_slices
from telescope.weights.plan import TensorMeta

IDENTITY_ROWS = 256
"""Rows of the identity per product when a packed weight is read."""

USUAL_PACKING = {"gate_up_proj": ["gate_proj", "up_proj"]}
"""Fused modules that a model with experts in some layers does not always list."""


def engine_weights(
    model: nn.Module, metas: list[TensorMeta], dtype: torch.dtype, reference: QuantizedReference | None = None
) -> dict[str, Any]:
    """Reads every tensor of `metas` from this worker's `model`. `metas` have the trainer's names and full shapes.

    Returns JSON: `tensors` maps each name to its shares on this worker (empty if it has none), `unaccounted` lists
    parameters of the engine that no tensor explains. `dtype` is the dtype of the transfer. `reference` has
    observed the last update, and is needed for quantized models.
    """
    shapes = {meta.name: meta.shape for meta in metas}
    shares: dict[str, list[dict[str, Any]]] = {meta.name: [] for meta in metas}
    unaccounted: list[str] = []
    for place, module, attribute, parameter, canonical in _parameters(model):
        quantized = quantized_matrices(module) if is_quantized(module) else []
        if attribute.removesuffix(SCALE) in quantized and attribute.endswith(SCALE):
            continue  # compared with its matrix
        slices = _locations(model, module, place, attribute, shapes, canonical)
        if not slices:
            problem = why_unreadable(module) if is_experts(module) else None
            unaccounted.append(f"{place}.{attribute}" + (f" ({problem})" if problem else ""))
            continue
        if attribute not in quantized:
            read = _read(module, place, attribute, parameter, slices, dtype, model)
        elif reference is not None:
            read = reference.shares(module, place, attribute, slices)
        else:
            unaccounted.append(f"{place}.{attribute} (no update was observed since it was quantized)")
            continue
        for name, found in read:
            shares[name].append(asdict(found))
    return {"tensors": shares, "unaccounted": unaccounted}


def quantized_reference(model: nn.Module, metas: list[TensorMeta], quantize: Quantize) -> QuantizedReference | None:
    """Returns an observer of an update of `metas`. None if the model has no quantized layers."""
    if not any(is_quantized(module) for module in model.modules()):
        return None
    shapes = {meta.name: meta.shape for meta in metas}
    return QuantizedReference(
        model,
        lambda module, place, attribute: _locations(model, module, place, attribute, shapes, f"{place}.{attribute}"),
        quantize,
    )


def tied_names(model: nn.Module) -> dict[str, str]:
    """Maps second names of a parameter to its first name.

    A module with two names (the router of a layer with experts) counts under its first name only.
    """
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for place, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{place}.{attribute}" if place else attribute
            if first.setdefault(id(parameter), name) != name:
                tied[name] = first[id(parameter)]
    return tied


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter, str]]:
    """Yields (module name, module, attribute, parameter, first name) of every parameter."""
    tied = tied_names(model)
    for place, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{place}.{attribute}" if place else attribute
            yield place, module, attribute, parameter, tied.get(name, name)


def _kinds(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}


def _locations(
    model: nn.Module,
    module: nn.Module,
    place: str,
    attribute: str,
    shapes: Mapping[str, tuple[int, ...]],
    canonical: str,
) -> dict[str, Slice]:
    """Returns the trainer tensors in any parameter, and their locations."""
    if is_experts(module):
        return expert_slices(module, place, attribute, shapes)
    packing = {**USUAL_PACKING, **(getattr(model, "packed_modules_mapping", None) or {})}
    return _slices(module, place, attribute, shapes, canonical, packing)


def _slices(
    module: nn.Module,
    place: str,
    attribute: str,
    shapes: Mapping[str, tuple[int, ...]],
    canonical: str,
    packing: Mapping[str, list[str]],
) -> dict[str, Slice]:
    """Returns the trainer tensors in this parameter and their locations. Empty if there is no explanation."""
    parent, _, last = place.rpartition(".")
    components = packing.get(last)
    if components is not None:
        prefix = f"{parent}." if parent else ""
        names = [f"{prefix}{component}.{attribute}" for component in components]
        if not all(name in shapes for name in names):
            return {}
        return _fused_slices(module, names, shapes)
    own = f"{place}.{attribute}" if place else attribute
    name = own if own in shapes else canonical
    if name not in shapes:
        return {}
    rows, columns = as_matrix_shape(shapes[name])
    rank, size = _tensor_parallel(module)
    kinds = _kinds(module)
    whole = Slice(0, (0, rows), (0, columns))
    if "VocabParallelEmbedding" in kinds:
        indices: Any = module.shard_indices
        return {name: Slice(0, (indices.org_vocab_start_index, indices.org_vocab_end_index), (0, columns))}
    if "ColumnParallelLinear" in kinds and size > 1:
        local = rows // size
        return {name: Slice(0, (rank * local, (rank + 1) * local), (0, columns))}
    if "RowParallelLinear" in kinds and attribute == "weight" and size > 1:
        local = columns // size
        return {name: Slice(0, (0, rows), (rank * local, (rank + 1) * local))}
    return {name: whole}


def _fused_slices(module: nn.Module, names: list[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Slice]:
    """Returns the locations of a fused layer's components. They are consecutive rows, each divided over the ranks."""
    rank, size = _tensor_parallel(module)
    replicas = [1] * len(names)
    if "QKVParallelLinear" in _kinds(module):
        # Key and value heads are repeated if there are fewer than ranks: `replicas` neighbors have the same head.
        repeated = int(getattr(module, "num_kv_head_replicas", 1))
        replicas = [1, repeated, repeated]
    slices: dict[str, Slice] = {}
    first_row = 0
    for name, repeats in zip(names, replicas, strict=True):
        rows, columns = as_matrix_shape(shapes[name])
        local = rows * repeats // size
        start = (rank // repeats) * local
        slices[name] = Slice(first_row, (start, start + local), (0, columns))
        first_row += local
    return slices


def _tensor_parallel(module: nn.Module) -> tuple[int, int]:
    """Returns (rank, size) of the layer's partition. (0, 1) for a layer that every rank has completely."""
    return int(getattr(module, "tp_rank", 0)), int(getattr(module, "tp_size", 1))


def _read(
    module: nn.Module,
    place: str,
    attribute: str,
    parameter: nn.Parameter,
    slices: Mapping[str, Slice],
    dtype: torch.dtype,
    model: nn.Module,
) -> Iterator[tuple[str, Share]]:
    """Computes each slice's fingerprint, for every form of the parameter. The forms are those of the forward pass."""
    if is_experts(module):
        yield from fingerprint_slices(
            [(0, experts_as_loaded(module, attribute))], f"{place}.{attribute}", slices, dtype
        )
        return
    packed = attribute == "weight" and hasattr(module, "cpu_linear")
    is_lookup = "VocabParallelEmbedding" in _kinds(module) and "ParallelLMHead" not in _kinds(module)
    is_output = is_lookup and getattr(model, "lm_head", None) is module  # some models use one module for both
    if not packed or is_lookup:
        yield from fingerprint_slices([(0, parameter.detach())], f"{place}.{attribute}", slices, dtype)
    if packed and (not is_lookup or is_output):
        columns = next(iter(slices.values())).columns
        blocks = _packed_columns(module, parameter, columns[1] - columns[0])
        yield from fingerprint_slices(blocks, f"{place}.{attribute} as packed", slices, dtype)


def _packed_columns(module: Any, parameter: nn.Parameter, num_columns: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (first column, columns [rows, block]) of a packed weight. The layer's own operator reads it."""
    for start in range(0, num_columns, IDENTITY_ROWS):
        stop = min(start + IDENTITY_ROWS, num_columns)
        identity = torch.zeros(stop - start, num_columns, dtype=parameter.dtype, device=parameter.device)
        identity[torch.arange(stop - start), torch.arange(start, stop)] = 1
        yield start, module.quant_method.apply(module, identity, None).T
