"""Converts a model's tensors to the names and layouts that they have in checkpoints.

transformers keeps the experts of a layer in one tensor and renames parts of some models; released files, and vLLM, have
one matrix per expert under other names. Owns the conversion with transformers' own tables, one tensor at a time, also
of meta tensors. Only tensors of experts are copied.
"""

from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from telescope.errors import UserError


class CheckpointNames:
    """Converts tensors of one model. None means a model with custom code, whose checkpoints have its own names.

    Raises `UserError` for a model whose tensors cannot be converted one at a time.
    """

    float32_buffers: frozenset[str] = frozenset()
    """The model's buffers that transformers and engines keep in float32, whatever the model's dtype."""

    def __init__(self, model: PreTrainedModel | None) -> None:
        self._model = model
        if model is None:
            return
        kept = set(model._keep_in_fp32_modules_strict or ())
        self.float32_buffers = frozenset(
            name for name, _ in model.named_buffers() if kept.intersection(name.split("."))
        )
        own = {name: torch.empty(tensor.shape, device="meta") for name, tensor in named_tensors(model)}
        self._renamed: dict[str, str] = {}
        """Names in checkpoints of tensors that are stored unchanged."""
        parts: dict[str, tuple[int, ...]] = {}
        for name, tensor in own.items():
            converted = revert_weight_conversion(model, {name: tensor})
            if len(converted) == 1 and next(iter(converted.values())) is tensor:
                self._renamed[name] = next(iter(converted))
            parts |= {part: tuple(value.shape) for part, value in converted.items()}
        together = {part: tuple(value.shape) for part, value in revert_weight_conversion(model, own).items()}
        if parts != together:
            odd = sorted(set(parts) ^ set(together)) or sorted(part for part in parts if parts[part] != together[part])
            raise UserError(
                f"model: checkpoints of {type(model).__name__} hold tensors that are made of several parameters, such "
                f"as {odd[0]}, which the weight transfer does not support. Choose another model"
            )

    def parts(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the checkpoint tensors that this parameter or persistent buffer contains."""
        if self._model is None:
            yield name, tensor
        elif name in self._renamed:
            yield self._renamed[name], tensor
        else:
            yield from revert_weight_conversion(self._model, {name: tensor}).items()


def named_tensors(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters, with tied ones once, and persistent buffers. Removes `prefix` from names."""
    for name, parameter in model.named_parameters():
        yield name.removeprefix(prefix), parameter
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name.removeprefix(prefix), buffer


def checkpoint_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all of a model's tensors by their names in checkpoints."""
    names = CheckpointNames(model)
    for name, tensor in named_tensors(model):
        yield from names.parts(name, tensor)
