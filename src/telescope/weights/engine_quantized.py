"""Computes what an engine's block-quantized parameters must contain, from the tensors that arrived.

vLLM quantizes a fused layer when all of its components are there (`--quantization fp8_per_block`): blocks of 128 x 128
elements, each with a float32 scale. Trainer tensors cannot be read back from that. So while an update arrives that must
be verified, this module assembles its tensors and quantizes them a second time, and both results are compared bit for
bit. A parameter that passes counts as its tensors as they arrived, whose fingerprints are compared with the sent ones:
`engine_weights` returns the same shares as for other parameters.

Invariants:
- Tensors are placed by the map of `engine_weights` and `engine_experts`, not by vLLM's loader.
- The arithmetic is vLLM's `per_block_cast_to_fp8` itself, because its division, compiled for a GPU, may round
  differently from torch's. A test compares it with a plain description.
- Only fingerprints are kept, and one matrix for each fused layer, or expert, that has not arrived completely.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from telescope.weights.fingerprint import Share, Slices, fingerprint
from telescope.weights.plan import to_hex

METHODS = ("Fp8PerBlockOnlineLinearMethod", "Fp8PerBlockOnlineMoEMethod")
"""Classes of `quant_method` whose parameters are quantized here as well."""
SCALE = "_scale_inv"

Locate = Callable[[nn.Module, str, str], Slices]
"""Returns the trainer tensors in a parameter, by module, module name and attribute."""
Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Quantizes a matrix to float8_e4m3fn [R, C] and scales [ceil(R / 128), ceil(C / 128)] that multiply it back."""


def is_quantized(module: nn.Module) -> bool:
    """Returns whether the module's matrices are FP8 with one scale per block."""
    method = getattr(module, "quant_method", None)
    return type(getattr(method, "old_quant_method", method)).__name__ in METHODS  # vLLM wraps some methods


def quantized_matrices(module: nn.Module) -> list[str]:
    """Returns the attributes of a module that are FP8 matrices. Empty if it is not quantized."""
    names = ("weight", "w13_weight", "w2_weight") if is_quantized(module) else ()
    return [name for name in names if name in module._parameters]


@dataclass(slots=True)
class _Matrix:
    """A matrix that is quantized by itself: one layer's or one expert's."""

    rows: int
    columns: int
    waiting: set[str]
    values_RC: torch.Tensor | None = None
    fingerprint: tuple[int, int] | None = None
    """Fingerprints of its quantized values and of its scales."""


@dataclass(slots=True)
class _Parameter:
    """A quantized parameter: its matrices, and the fingerprint of each arrived slice of its tensors."""

    slices: Slices
    matrices: list[_Matrix]
    arrived: dict[str, str] = field(default_factory=dict)


class QuantizedReference:
    """Recomputed quantization of one update on one worker."""

    def __init__(self, model: nn.Module, locate: Locate, quantize: Quantize) -> None:
        """Records the matrices of `model`, which must be in the layout in which weights are loaded."""
        self._quantize = quantize
        self._parameters: dict[str, _Parameter] = {}
        self._places: dict[str, list[str]] = {}
        """Parameters that a tensor is part of."""
        for place, module in model.named_modules():
            for attribute in quantized_matrices(module):
                self._add(f"{place}.{attribute}", module._parameters[attribute], locate(module, place, attribute))

    def _add(self, place: str, parameter: Any, slices: Slices) -> None:
        count = len(parameter) if parameter.dim() == 3 else 1
        rows, columns = parameter.shape[-2:]
        matrices = [_Matrix(rows, columns, set()) for _ in range(count)]
        covered = sum((where.rows[1] - where.rows[0]) for _, where in slices)
        narrow = any(where.columns[1] - where.columns[0] != columns for _, where in slices)
        if covered != count * rows or narrow or len(dict(slices)) < len(slices):
            return  # padded, divided, or unexplained: `shares` reports it
        for name, where in slices:
            matrices[where.first_row // rows].waiting.add(name)
            self._places.setdefault(name, []).append(place)
        self._parameters[place] = _Parameter(slices, matrices)

    @torch.no_grad()
    def observe(self, name: str, tensor: torch.Tensor) -> None:
        """Processes a tensor of the update, in the transfer's dtype and on the model's device."""
        for place in self._places.get(name, ()):
            parameter = self._parameters[place]
            where = dict(parameter.slices)[name]
            part = tensor.reshape(len(tensor), -1)[slice(*where.rows), slice(*where.columns)]
            parameter.arrived[name] = to_hex(fingerprint(part, where.rows[0], where.columns[0]))
            matrix = parameter.matrices[where.first_row // parameter.matrices[0].rows]
            if matrix.values_RC is None:
                matrix.values_RC = torch.empty(matrix.rows, matrix.columns, dtype=part.dtype, device=part.device)
            start = where.first_row % matrix.rows
            matrix.values_RC[start : start + len(part)] = part
            matrix.waiting.discard(name)
            if not matrix.waiting:
                values, scales = self._quantize(matrix.values_RC)
                matrix.fingerprint = fingerprint(values), fingerprint(scales)
                matrix.values_RC = None

    def shares(self, module: nn.Module, place: str, attribute: str, slices: Slices) -> Iterator[tuple[str, Share]]:
        """Compares a parameter of the loaded model with its expected content. Yields the shares of its tensors."""
        address = f"{place}.{attribute}"
        parameter = self._parameters.get(address, _Parameter([], []))
        problem = _problem(module, attribute, parameter)
        for name, where in slices:
            arrived = parameter.arrived.get(name, to_hex(0))
            yield name, Share(address, where.rows, where.columns, arrived, problem=problem)


def _problem(module: nn.Module, attribute: str, parameter: _Parameter) -> str:
    """Returns how quantized values differ from the recomputed ones. Empty if they do not."""
    if not parameter.matrices:
        return "a quantized layer with padding cannot be compared"
    if any(matrix.fingerprint is None for matrix in parameter.matrices):
        return "not all of its tensors arrived"
    values = getattr(module, attribute).detach()
    scales = getattr(module, attribute + SCALE).detach()
    if values.dtype != torch.float8_e4m3fn or scales.dtype != torch.float32:
        return f"its values are {values.dtype} and its scales {scales.dtype}"
    if values.dim() == 2:
        values, scales = values[None], scales[None]
    for index, matrix in enumerate(parameter.matrices):
        found = fingerprint(values[index]), fingerprint(scales[index])
        if found != matrix.fingerprint:
            assert matrix.fingerprint is not None
            what = "scales" if found[0] == matrix.fingerprint[0] else "values"
            return f"its quantized {what} are not those of the tensors that arrived"
    return ""
