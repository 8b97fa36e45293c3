"""Where the tensors of experts lie in an engine, and how they are read back from there.

An engine keeps all experts of a layer in two parameters: `w13_weight` [experts, gate rows and up rows, hidden] and
`w2_weight` [experts, hidden, inner], the inner dimension cut over the tensor-parallel ranks; the kernel decides in
which order. Owns the map from the trainer's tensors (three matrices an expert) to slices of those parameters, and
bringing a kernel's layout back to the one in which weights are loaded. Knows vLLM's layers by attributes only, imports
nothing of vLLM, and is tested with stand-ins; what is common to all layers is `held`.

Invariants:
- A layout that is not known is reported as such; nothing is read as if it were plain.
- A packed layout is undone by a permutation that is learnt from the engine's own packing: it packs the numbers of the
  places, so that every packed place says where it came from. The numbers go through in digits below 256, which every
  float type holds exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from telescope.weights.fingerprint import Slice, as_matrix_shape

GATE_UP, DOWN = "w13_weight", "w2_weight"
ROUTED = "routed_experts"
"""The module that holds the parameters, inside the one that the trainer's names name."""

LOADED_LAYOUTS = ("TRITON", "BATCHED_TRITON")
"""Kernels that compute with the parameters as they are loaded: gate above up."""
EXCHANGED_LAYOUTS = ("FLASHINFER_CUTLASS",)
"""Kernels that want up above gate."""
PACKED_LAYOUTS = ("CPU",)
"""Kernels that pack the parameters in place, where the processor has instructions for that."""
BOUND_IN = {GATE_UP: "gate_up_linear", DOWN: "down_linear"}
"""Where it has none, vLLM 0.26 computes with functions, which hold the matrices as they were last loaded."""

DIGIT = 256
"""The base in which places are numbered."""


def is_experts(module: nn.Module) -> bool:
    """Whether this module holds the parameters of a layer's experts."""
    held = module._parameters
    return GATE_UP in held and DOWN in held


def layout_of(module: nn.Module) -> str | None:
    """How the experts of `module` are laid out: `loaded`, `exchanged`, `packed`, `bound`; None if it is not known."""
    name = _backend(module)
    if name in LOADED_LAYOUTS:
        return "loaded"
    if name in EXCHANGED_LAYOUTS:
        return "exchanged"
    if name in PACKED_LAYOUTS and _packer(module) is not None:
        return "packed"
    if name in PACKED_LAYOUTS and all(_bound(module, attribute) for attribute in (GATE_UP, DOWN)):
        return "bound"
    return None


def why_unreadable(module: nn.Module) -> str | None:
    """Why the experts cannot be read back, or None when they can."""
    if layout_of(module) is None:
        method = getattr(module, "quant_method", None)
        return f"the layout of experts under {_backend(module) or type(method).__name__} is not known"
    parallel = getattr(getattr(module, "moe_config", None), "moe_parallel_config", None)
    return "experts are spread over the ranks" if getattr(parallel, "use_ep", False) else None


def expert_slices(
    module: nn.Module, place: str, attribute: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Slice]:
    """The trainer's matrices that lie in parameter `attribute` of the experts at `place`, and where in the parameter
    seen as one matrix, in the layout in which it is loaded. Empty when it cannot be explained.
    """
    if attribute not in (GATE_UP, DOWN) or why_unreadable(module) is not None:
        return {}
    prefix = place.removesuffix(f".{ROUTED}")
    kinds = ["gate_proj", "up_proj"] if attribute == GATE_UP else ["down_proj"]
    if layout_of(module) == "exchanged":
        kinds.reverse()
    rank, size = _tensor_parallel(module)
    slices: dict[str, Slice] = {}
    held_row = 0
    for expert in range(len(getattr(module, attribute))):
        for kind in kinds:
            name = f"{prefix}.{expert}.{kind}.weight"
            if name not in shapes:
                return {}
            rows, columns = as_matrix_shape(shapes[name])
            if attribute == GATE_UP:
                local = rows // size
                slices[name] = Slice(held_row, (rank * local, (rank + 1) * local), (0, columns))
            else:
                part = columns // size
                local = rows
                slices[name] = Slice(held_row, (0, rows), (rank * part, (rank + 1) * part))
            held_row += local
    return slices


def experts_as_loaded(module: nn.Module, attribute: str) -> torch.Tensor:
    """The parameter as one matrix [experts x rows, columns] in the layout in which it is loaded."""
    held = getattr(module, attribute).detach()
    if layout_of(module) == "packed":
        held = _unpack(module, attribute, held)
    elif layout_of(module) == "bound":
        held = torch.stack(_bound(module, attribute)).detach()
    return held.reshape(-1, held.shape[-1])


def _backend(module: nn.Module) -> str | None:
    """The name of the kernel that an unquantized layer computes with, or None."""
    method = getattr(module, "quant_method", None)
    method = getattr(method, "old_quant_method", method)  # where vLLM has wrapped it
    return getattr(getattr(method, "unquantized_backend", None), "name", None)


def _tensor_parallel(module: nn.Module) -> tuple[int, int]:
    config = getattr(module, "moe_config", None)
    parallel = getattr(config, "moe_parallel_config", None) or module
    return int(getattr(parallel, "tp_rank", 0)), int(getattr(parallel, "tp_size", 1))


def _packer(module: nn.Module) -> Any:
    """The method by which the engine packs a layer's experts, or None."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    return getattr(getattr(kernel, "fused_experts", None), "process_weights_after_loading", None)


def _bound(module: nn.Module, attribute: str) -> list[torch.Tensor]:
    """The matrices that functions of a layer's experts compute with, one an expert; empty where it has none."""
    functions = getattr(module, BOUND_IN[attribute], None) or ()
    matrices: list[Any] = [(function.__defaults__ or (None,))[0] for function in functions]
    return matrices if all(isinstance(matrix, torch.Tensor) for matrix in matrices) else []


@torch.no_grad()
def _unpack(module: Any, attribute: str, held: torch.Tensor) -> torch.Tensor:
    """Packed experts [experts, ...] as they were loaded: [experts, rows, columns]."""
    config = module.moe_config
    inner, hidden = int(config.intermediate_size_per_partition), int(config.hidden_dim)
    shapes = {GATE_UP: (2 * inner, hidden), DOWN: (hidden, inner)}
    origin_P = _origins(module, attribute, shapes, held)
    packed_EP = held.reshape(len(held), -1)
    loaded_EL = torch.empty(len(held), math.prod(shapes[attribute]), dtype=held.dtype, device=held.device)
    kept_P = origin_P >= 0  # the rest is padding
    loaded_EL[:, origin_P[kept_P]] = packed_EP[:, kept_P]
    return loaded_EL.view(len(held), *shapes[attribute])


def _origins(module: Any, attribute: str, shapes: Mapping[str, tuple[int, int]], held: torch.Tensor) -> torch.Tensor:
    """For each packed place of an expert the place in the loaded matrix that it holds; -1 for padding."""
    count = math.prod(shapes[attribute])
    number_L = torch.arange(1, count + 1, device=held.device)
    origin_P = torch.full((held[0].numel(),), -1, dtype=torch.long, device=held.device)
    weight = 1
    while weight <= count:
        stand_in: Any = nn.Module()
        for name, shape in shapes.items():
            values = torch.zeros(1, *shape, dtype=held.dtype, device=held.device)
            if name == attribute:
                values.view(-1).copy_((number_L // weight) % DIGIT)
            stand_in.register_parameter(name, nn.Parameter(values, requires_grad=False))
        stand_in.moe_config, stand_in.activation = module.moe_config, getattr(module, "activation", None)
        _packer(module)(stand_in)
        origin_P += getattr(stand_in, attribute).reshape(-1).to(torch.long) * weight
        weight *= DIGIT
    return origin_P
