"""Moves the model's input of a micro-batch to the device.

Owns the choice of targets, and the cut of a row for context parallelism. Does not own the tensors of the loss
(`trainer.loss`), which are always those of the whole row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from telescope.trainer.attention import Kernel, PackedLayout, make_layout
from telescope.trainer.batch import MicroBatch

NUMPY_DTYPES = {torch.int64: np.int64, torch.float32: np.float32, torch.float64: np.float64}


@dataclass(slots=True)
class ModelInput:
    """A row of T tokens on the device, of which N are predicted.

    The hidden state at row position `predicting_N[i]` predicts the token `target_N[i]`.
    """

    token_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    layout: PackedLayout
    predicting_N: torch.Tensor
    target_N: torch.Tensor


def model_input(micro_batch: MicroBatch, device: torch.device, kernel: Kernel) -> ModelInput:
    """Copies what the model reads of a micro-batch to the device, as `move` does."""
    predicted_N = np.flatnonzero(micro_batch.trained_T)
    return ModelInput(
        token_ids_T=move(micro_batch.token_ids_T, torch.int64, device),
        position_ids_T=move(micro_batch.position_ids_T, torch.int64, device),
        layout=make_layout(micro_batch.cu_seqlens, device, kernel),
        predicting_N=move(predicted_N - 1, torch.int64, device),
        target_N=move(micro_batch.token_ids_T[predicted_N], torch.int64, device),
    )


def move(array: np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copies an array to the device, on a GPU asynchronously and ordered before its readers."""
    # A copy, because Ray's object store returns read-only shared memory. By numpy, in this thread: torch would use
    # OpenMP threads for long rows, which take 10 ms to wake up on some hosts.
    if device.type != "cuda":
        return torch.from_numpy(array.astype(NUMPY_DTYPES[dtype]))
    pinned = torch.empty(array.shape, dtype=dtype, pin_memory=True)
    np.copyto(pinned.numpy(), array)
    return pinned.to(device, non_blocking=True)
