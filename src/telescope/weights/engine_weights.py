"""Finds trainer tensors in an engine's parameters and computes their fingerprints.

An engine fuses projections (`q_proj`, `k_proj`, `v_proj` into `qkv_proj`), divides them over tensor-parallel ranks,
pads the vocabulary, and on the CPU packs them for its matrix kernels and frees the plain weight. Owns the map from
trainer tensors to locations in parameters, and reading them. vLLM's layers are known by class name and attributes only;
vLLM is not imported, so that tests can use stand-ins. Experts have layouts of their own: `engine_experts`. Quantized
layers cannot be read back: `engine_quantized` computes what they must contain.

Invariants:
- The map is written from the meaning of the layers (heads, partitions, ranks), not derived by running the model's
  weight loader, so that a fault of the loader is detected.
- The forward pass uses the same values. If a layer multiplies with a packed copy, the copy is read by
  multiplying it with the identity through the layer's own operator. A row of the identity selects one column and all
  other products are zero, so the result is that column exactly: 1 x w plus zeros is not rounded in any float type.
  Plain parameters (GPU, embeddings, norms, biases) are read directly.
- A tied output layer is a second location of the input embedding; both are checked.
- Names are translated by the engine's own table of renamed weights. Tensors that it drops are not looked for.
- A tensor without a location, and a parameter that no tensor explains, are reported, never skipped.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from telescope.weights import engine_experts
from telescope.weights.engine_quantized import SCALE, Quantize, QuantizedReference, is_quantized, quantized_matrices
from telescope.weights.fingerprint import Share, Slice, Slices, fingerprint_slices
from telescope.weights.plan import TensorMeta, as_matrix_shape

IDENTITY_ROWS = 256
"""Rows of the identity per product when a packed weight is read."""

USUAL_PACKING = {"gate_up_proj": ["gate_proj", "up_proj"]}
"""Fused modules that a model with experts in some layers does not always list."""
SHARED_BY_VALUES = {"v_proj": "k_proj"}
"""Projections that some layers lack, and the projection whose weights the engine uses instead (Gemma 4)."""


def engine_weights(
    model: nn.Module,
    metas: list[TensorMeta],
    reference: QuantizedReference | None = None,
    tied: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Reads every tensor of `metas` from this worker's `model`.

    `metas` have the trainer's names, the full shapes and the dtypes of the transfer.

    Returns JSON: `tensors` maps each name to its shares on this worker (empty if it has none), `unaccounted` lists the
    engine's parameters that no tensor explains, `ignored` the tensors that its loader drops. `reference` has observed
    the last update, and is needed for quantized models. `tied` maps second names of parameters that were shared when
    the model was built.
    """
    named, packing = list(zip(metas, engine_names(model, metas), strict=True)), _packing(model)
    # An engine that serves only text leaves out the towers of other media.
    left_out = {name for name, child in model.named_children() if next(child.parameters(), None) is None}
    sent = {name: meta for meta, name in named if name is not None and name.partition(".")[0] not in left_out}
    ignored = [meta.name for meta, name in named if name not in sent]
    shapes = {name: meta.shape for name, meta in sent.items()}
    shares: dict[str, list[dict[str, Any]]] = {meta.name: [] for meta in metas}
    unaccounted: list[str] = []
    for place, module, attribute, parameter, canonical in _parameters(model, shapes, tied):
        quantized = quantized_matrices(module)
        if attribute.removesuffix(SCALE) in quantized and attribute.endswith(SCALE):
            continue  # compared with its matrix
        slices = _locations(module, place, attribute, shapes, canonical, packing)
        if not slices:
            problem = engine_experts.why_unreadable(module) if engine_experts.is_experts(module) else None
            unaccounted.append(f"{place}.{attribute}" + (f" ({problem})" if problem else ""))
            continue
        if attribute not in quantized:
            dtype: torch.dtype = getattr(torch, sent[slices[0][0]].dtype)
            read = _read(module, place, attribute, parameter, slices, dtype, model)
        elif reference is not None:
            read = reference.shares(module, place, attribute, slices)
        else:
            unaccounted.append(f"{place}.{attribute} (no update was observed since it was quantized)")
            continue
        for name, found in read:
            shares[sent[name].name].append(asdict(found))
    return {"tensors": shares, "unaccounted": unaccounted, "ignored": ignored}


def engine_names(model: nn.Module, metas: list[TensorMeta]) -> list[str | None]:
    """Returns the engine's names of tensors, before layers are fused. None for tensors that the engine drops."""
    tables = []
    for place, module in [("", model), *model.named_children()]:
        mapper = getattr(module, "hf_to_vllm_mapper", None)
        if mapper is not None:
            tables.append((f"{place}." if place else "", replace(mapper, orig_to_new_stacked={})))

    def rename(name: str | None) -> str | None:
        for prefix, table in tables:
            if name is not None and name.startswith(prefix):
                renamed = table._map_name(name.removeprefix(prefix))
                name = None if renamed is None else prefix + renamed
        return name

    return [rename(meta.name) for meta in metas]


def float32_names(model: nn.Module, metas: list[TensorMeta]) -> list[str]:
    """Returns the trainer's names of tensors that the engine keeps in float32, under the same names as a checkpoint."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    wide = {name for name, tensor in tensors if tensor.dtype == torch.float32}
    return [meta.name for meta, name in zip(metas, engine_names(model, metas), strict=True) if name in wide]


def quantized_reference(model: nn.Module, metas: list[TensorMeta], quantize: Quantize) -> QuantizedReference | None:
    """Returns an observer for an update of `metas`. None if the model has no quantized layers."""
    if not any(is_quantized(module) for module in model.modules()):
        return None
    names, packing = engine_names(model, metas), _packing(model)
    shapes = {name: meta.shape for meta, name in zip(metas, names, strict=True) if name is not None}
    return QuantizedReference(
        model,
        lambda module, place, attribute: _locations(module, place, attribute, shapes, f"{place}.{attribute}", packing),
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


def loaded_names(tied: Mapping[str, str], shapes: Container[str]) -> dict[str, str]:
    """Maps other names of shared parameters to the name under which they are loaded.

    That is the name in `shapes`, else the first name.
    """
    chosen = {first: first for first in tied.values()}
    chosen |= {first: name for name, first in tied.items() if name in shapes and first not in shapes}
    return {name: chosen[first] for name, first in (*tied.items(), *((f, f) for f in chosen)) if chosen[first] != name}


def _parameters(
    model: nn.Module, shapes: Mapping[str, Any], tied: Mapping[str, str] | None
) -> Iterator[tuple[str, nn.Module, str, torch.Tensor, str]]:
    """Yields (module name, module, attribute, tensor, loaded name) of every parameter and of each sent buffer."""
    loaded = loaded_names({**(tied or {}), **tied_names(model)}, shapes)
    for place, module in model.named_modules():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for attribute, tensor in tensors:
            name = f"{place}.{attribute}" if place else attribute
            if isinstance(tensor, nn.Parameter) or name in shapes:
                yield place, module, attribute, tensor, loaded.get(name, name)


def _kinds(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}


def _packing(model: nn.Module) -> dict[str, list[str]]:
    """Returns the fused modules of an engine and their components in order, from the engine's own tables."""
    tables = [getattr(getattr(m, "hf_to_vllm_mapper", None), "orig_to_new_stacked", None) for m in model.modules()]
    found: dict[str, list[str]] = {}
    for component, (fused, _) in (pair for table in tables if table for pair in table.items()):
        names = found.setdefault(fused.strip("."), [])
        names += [name] if (name := component.strip(".")) not in names else []
    return {**USUAL_PACKING, **found, **(getattr(model, "packed_modules_mapping", None) or {})}


def _locations(
    module: nn.Module,
    place: str,
    attribute: str,
    shapes: Mapping[str, tuple[int, ...]],
    canonical: str,
    packing: Mapping[str, list[str]],
) -> Slices:
    """Returns the trainer tensors in this parameter and their locations. Empty if no tensors explain it."""
    if engine_experts.is_experts(module) and attribute in (engine_experts.GATE_UP, engine_experts.DOWN):
        return engine_experts.expert_slices(module, place, attribute, shapes)
    parent, _, last = place.rpartition(".")
    own = f"{place}.{attribute}" if place else attribute
    name = own if own in shapes else canonical
    kinds = _kinds(module)
    if name not in shapes or "MergedColumnParallelLinear" in kinds or "QKVParallelLinear" in kinds:
        prefix = f"{parent}." if parent else ""
        components = [last] if name in shapes else packing.get(last, [])
        names = [f"{prefix}{component}.{attribute}" for component in components]
        for index, component in enumerate(components):
            if names[index] not in shapes and component in SHARED_BY_VALUES:
                names[index] = f"{prefix}{SHARED_BY_VALUES[component]}.{attribute}"
        return _fused_slices(module, names, shapes) if all(name in shapes for name in names) else []
    rows, columns = as_matrix_shape(shapes[name])
    rank, size = engine_experts.tensor_parallel(module)
    own_rows, own_columns = (0, rows), (0, columns)
    if "VocabParallelEmbedding" in kinds:
        indices: Any = module.shard_indices
        own_rows = indices.org_vocab_start_index, indices.org_vocab_end_index
    elif "ColumnParallelLinear" in kinds:
        own_rows = rank * (rows // size), (rank + 1) * (rows // size)
    elif "RowParallelLinear" in kinds and attribute == "weight":
        own_columns = rank * (columns // size), (rank + 1) * (columns // size)
    return [(name, Slice(0, own_rows, own_columns))]


def _fused_slices(module: nn.Module, names: list[str], shapes: Mapping[str, tuple[int, ...]]) -> Slices:
    """Returns the locations of tensors in a fused layer. Its components are consecutive rows, divided over the ranks.

    A tensor has one component or, in a checkpoint with fused tensors, several. Empty if they do not add up.
    """
    rank, size = engine_experts.tensor_parallel(module)
    sizes = [int(rows) for rows in getattr(module, "output_sizes", ())]
    replicas = [1] * len(sizes)
    if "QKVParallelLinear" in _kinds(module):
        # If there are fewer key and value heads than ranks, `replicas` neighboring ranks have the same head.
        repeated = int(getattr(module, "num_kv_head_replicas", 1))
        replicas = [1, repeated, repeated]
    components = [(rows // repeats, repeats) for rows, repeats in zip(sizes, replicas, strict=True)]
    slices: Slices = []
    first_row = 0
    for name in names:
        rows, columns = as_matrix_shape(shapes[name])
        taken = 0
        while taken < rows and components:
            own, repeats = components.pop(0)
            local = own * repeats // size
            start = taken + (rank // repeats) * local
            slices.append((name, Slice(first_row, (start, start + local), (0, columns))))
            first_row += local
            taken += own
        if taken != rows:
            return []
    return slices


def _read(
    module: nn.Module,
    place: str,
    attribute: str,
    parameter: torch.Tensor,
    slices: Slices,
    dtype: torch.dtype,
    model: nn.Module,
) -> Iterator[tuple[str, Share]]:
    """Computes each slice's fingerprint, for every form of the parameter that the forward pass uses."""
    if engine_experts.is_experts(module) and attribute in (engine_experts.GATE_UP, engine_experts.DOWN):
        stored = engine_experts.experts_as_loaded(module, attribute, slices)
        yield from fingerprint_slices([(0, stored)], f"{place}.{attribute}", slices, dtype)
        return
    packed = attribute == "weight" and hasattr(module, "cpu_linear")
    is_lookup = "VocabParallelEmbedding" in _kinds(module) and "ParallelLMHead" not in _kinds(module)
    is_output = is_lookup and getattr(model, "lm_head", None) is module  # some models use one module for both
    if not packed or is_lookup:
        stored = parameter.detach().reshape(-1) if parameter.dim() == 0 else parameter.detach()
        yield from fingerprint_slices([(0, stored)], f"{place}.{attribute}", slices, dtype)
    if packed and (not is_lookup or is_output):
        columns = slices[0][1].columns
        blocks = _packed_columns(module, parameter, columns[1] - columns[0])
        yield from fingerprint_slices(blocks, f"{place}.{attribute} as packed", slices, dtype)


def _packed_columns(module: Any, parameter: torch.Tensor, num_columns: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (first column, columns [rows, block]) of a packed weight, read through the layer's own operator."""
    for start in range(0, num_columns, IDENTITY_ROWS):
        stop = min(start + IDENTITY_ROWS, num_columns)
        identity = torch.zeros(stop - start, num_columns, dtype=parameter.dtype, device=parameter.device)
        identity[torch.arange(stop - start), torch.arange(start, stop)] = 1
        yield start, module.quant_method.apply(module, identity, None).T
