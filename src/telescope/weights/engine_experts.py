"""Locates expert tensors in an engine, and reads them.

An engine stores all experts of a layer in two parameters: `w13_weight` [experts, gate rows and up rows, hidden] and
`w2_weight` [experts, hidden, inner], with the inner dimension divided over the tensor-parallel ranks; the kernel
determines the order. Owns the map from the trainer's tensors (three matrices per expert) to slices of these parameters,
and the conversion from a kernel's layout to the layout in which weights are loaded. vLLM's layers are known by
attributes only; vLLM is not imported, so that tests can use stand-ins. `engine_weights` has what all layers share.

Invariants:
- An unknown layout is reported; it is never read as a plain one.
- A packed layout is inverted by a permutation learned from the engine's own packing: it packs the index of every
  element, so that each packed position reports its origin. Indices are packed in digits below 256, which every float
  type represents exactly.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from telescope.weights.fingerprint import Slice, Slices
from telescope.weights.plan import as_matrix_shape

GATE_UP, DOWN = "w13_weight", "w2_weight"
NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's matrices in checkpoints: gate, up, down."""
FUSED = {GATE_UP: "gate_up_proj", DOWN: "down_proj"}
"""Names of one tensor with all experts, as the engine's own table renames them."""
ROUTED = "routed_experts"
"""The module with the parameters, inside the module of the trainer's names."""

LAYOUTS = {"TRITON": "loaded", "BATCHED_TRITON": "loaded", "FLASHINFER_CUTLASS": "exchanged"}
"""Layouts by kernel: as loaded, with gate above up, or up above gate."""
PACKING_KERNEL = "CPU"
"""Packs the parameters in place, if the processor has the instructions."""
BOUND_IN = {GATE_UP: "gate_up_linear", DOWN: "down_linear"}
"""Without these instructions vLLM 0.26 computes with functions bound to the matrices as last loaded."""

DIGIT = 256
"""The base of the digits of an index."""


def is_experts(module: nn.Module) -> bool:
    """Returns whether this module has the parameters of a layer's experts."""
    return GATE_UP in module._parameters and DOWN in module._parameters


def layout_of(module: nn.Module) -> str | None:
    """Returns the layout of the experts: `loaded`, `exchanged`, `packed` or `bound`. None if unknown."""
    name = _backend(module)
    if name != PACKING_KERNEL:
        return LAYOUTS.get(name or "")
    if _packer(module) is not None:
        return "packed"
    return "bound" if all(_bound(module, attribute) for attribute in (GATE_UP, DOWN)) else None


def why_unreadable(module: nn.Module) -> str | None:
    """Returns why the experts cannot be read, or None if they can."""
    if layout_of(module) is None:
        method = getattr(module, "quant_method", None)
        return f"the layout of experts under {_backend(module) or type(method).__name__} is not known"
    parallel = getattr(getattr(module, "moe_config", None), "moe_parallel_config", None)
    return "experts are spread over the ranks" if getattr(parallel, "use_ep", False) else None


def expert_slices(module: nn.Module, place: str, attribute: str, shapes: Mapping[str, tuple[int, ...]]) -> Slices:
    """Returns the trainer's matrices in an experts' parameter, and their locations.

    The parameter is `attribute` of the experts at `place`. Locations refer to the parameter as one matrix, in the
    layout in which it is loaded. Empty if the tensors do not explain it.
    """
    if why_unreadable(module) is not None:
        return []
    prefix = place.removesuffix(f".{ROUTED}")
    rank, size = tensor_parallel(module)
    num_experts = len(getattr(module, attribute))
    fused = f"{prefix}.{FUSED[attribute]}"
    if fused in shapes and size == 1 and layout_of(module) != "exchanged":
        rows, columns = as_matrix_shape(shapes[fused])
        return [(fused, Slice(0, (0, rows), (0, columns)))] if rows == num_experts else []
    gate, up, down = next((kinds for kinds in NAMES if f"{prefix}.0.{kinds[0]}.weight" in shapes), NAMES[0])
    kinds = [gate, up] if attribute == GATE_UP else [down]
    if layout_of(module) == "exchanged":
        kinds.reverse()
    slices: Slices = []
    first_row = 0
    for expert in range(num_experts):
        for kind in kinds:
            name = f"{prefix}.{expert}.{kind}.weight"
            if name not in shapes:
                return []
            rows, columns = as_matrix_shape(shapes[name])
            own_rows, own_columns = (0, rows), (0, columns)
            if attribute == GATE_UP:
                own_rows = rank * (rows // size), (rank + 1) * (rows // size)
            else:
                own_columns = rank * (columns // size), (rank + 1) * (columns // size)
            slices.append((name, Slice(first_row, own_rows, own_columns)))
            first_row += own_rows[1] - own_rows[0]
    return slices


def experts_as_loaded(module: nn.Module, attribute: str, slices: Slices) -> torch.Tensor:
    """Returns the parameter in the layout in which it is loaded, as one matrix [experts x rows, columns].

    If one tensor of the trainer has all experts, each is a row of the matrix.
    """
    stored = getattr(module, attribute).detach()
    if layout_of(module) == "packed":
        stored = _unpack(module, attribute, stored)
    elif layout_of(module) == "bound":
        stored = torch.stack(_bound(module, attribute)).detach()
    has_all = len(slices) == 1 and len(stored) > 1
    return stored.reshape(len(stored), -1) if has_all else stored.reshape(-1, stored.shape[-1])


def _backend(module: nn.Module) -> str | None:
    """Returns the name of a layer's kernel, or None."""
    method = getattr(module, "quant_method", None)
    method = getattr(method, "old_quant_method", method)  # if vLLM has wrapped it
    backend = getattr(method, "unquantized_backend", None) or getattr(method, "fp8_backend", None)
    return getattr(backend, "name", None)


def tensor_parallel(module: nn.Module) -> tuple[int, int]:
    """Returns (rank, size) of a layer's partition. (0, 1) if every rank has the whole layer."""
    parallel = getattr(getattr(module, "moe_config", None), "moe_parallel_config", None) or module
    return int(getattr(parallel, "tp_rank", 0)), int(getattr(parallel, "tp_size", 1))


def _packer(module: nn.Module) -> Any:
    """Returns the method that packs a layer's experts, or None."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    return getattr(getattr(kernel, "fused_experts", None), "process_weights_after_loading", None)


def _bound(module: nn.Module, attribute: str) -> list[torch.Tensor]:
    """Returns the matrices to which a layer's functions are bound, one per expert."""
    functions = getattr(module, BOUND_IN[attribute], None) or ()
    matrices: list[Any] = [(function.__defaults__ or (None,))[0] for function in functions]
    return matrices if all(isinstance(matrix, torch.Tensor) for matrix in matrices) else []


@torch.no_grad()
def _unpack(module: Any, attribute: str, stored: torch.Tensor) -> torch.Tensor:
    """Converts packed experts [experts, ...] to the layout in which they are loaded, [experts, rows, columns]."""
    config = module.moe_config
    inner, hidden = int(config.intermediate_size_per_partition), int(config.hidden_dim)
    shapes = {GATE_UP: (2 * inner, hidden), DOWN: (hidden, inner)}
    origin_P = _origins(module, attribute, shapes, stored)
    packed_EP = stored.reshape(len(stored), -1)
    loaded_EL = torch.empty(len(stored), math.prod(shapes[attribute]), dtype=stored.dtype, device=stored.device)
    kept_P = origin_P >= 0  # the rest is padding
    loaded_EL[:, origin_P[kept_P]] = packed_EP[:, kept_P]
    return loaded_EL.view(len(stored), *shapes[attribute])


def _origins(module: Any, attribute: str, shapes: Mapping[str, tuple[int, int]], stored: torch.Tensor) -> torch.Tensor:
    """Returns each packed position's index in one expert's loaded matrix. Padding is -1."""
    count = math.prod(shapes[attribute])
    number_L = torch.arange(1, count + 1, device=stored.device)
    origin_P = torch.full((stored[0].numel(),), -1, dtype=torch.long, device=stored.device)
    weight = 1
    while weight <= count:
        stand_in: Any = nn.Module()
        for name, shape in shapes.items():
            values = torch.zeros(1, *shape, dtype=stored.dtype, device=stored.device)
            if name == attribute:
                values.view(-1).copy_((number_L // weight) % DIGIT)
            stand_in.register_parameter(name, nn.Parameter(values, requires_grad=False))
        stand_in.moe_config, stand_in.activation = module.moe_config, getattr(module, "activation", None)
        _packer(module)(stand_in)
        origin_P += getattr(stand_in, attribute).reshape(-1).to(torch.long) * weight
        weight *= DIGIT
    return origin_P
