"""The probe of engines in memory, as the driver does it over processes."""

from typing import Any

import torch

from telescope.weights.engine_weights import engine_weights
from telescope.weights.fingerprint import fingerprint
from telescope.weights.plan import TensorMeta, to_hex
from telescope.weights.probe import ProbeReport, compare


def metas_of(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> list[TensorMeta]:
    """Descriptions of tensors that are sent in `dtype`, by default in their own."""
    return [
        TensorMeta(name, tuple(tensor.shape), str(dtype or tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    ]


def probe(
    models: list[Any], tensors: dict[str, torch.Tensor], dtype: torch.dtype | None = None, reference: Any = None
) -> ProbeReport:
    """Compares what the workers' models hold with `tensors`, which were sent in `dtype`."""
    metas = metas_of(tensors, dtype)
    loaded = [{**engine_weights(m, metas, reference), "shapes": {t.name: t.shape for t in metas}} for m in models]
    sent = {name: to_hex(fingerprint(tensor.to(dtype or tensor.dtype))) for name, tensor in tensors.items()}
    return compare(sent=sent, loaded=loaded)
