"""Copies the model's input for a micro-batch to the device.

Owns the choice of targets, the cut of a row for context parallelism, and the rows of samples that are not packed. Does
not own the tensors of the loss (`trainer.loss`), which always cover the whole row. Invariant: targets and trained
tokens are chosen before the cut, so that the last token of a part predicts the first of the next.
"""

from dataclasses import dataclass

import numpy as np
import torch

from telescope.trainer.attention import Kernel, PackedLayout, make_layout
from telescope.trainer.batch import MicroBatch
from telescope.trainer.sequence_exchange import ContextGroup, pad_row

NUMPY_DTYPES = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32, torch.float64: np.float64}


@dataclass(slots=True)
class ModelInput:
    """The model's input of a micro-batch, which predicts N tokens.

    With packed samples, S is 1 and T is the length of the row, or of this rank's part with context parallelism.
    Otherwise S samples have rows of T tokens, padded on the right. The hidden state at position `predicting_N[i]` of
    the S x T positions predicts the token `target_N[i]`.
    """

    token_ids_ST: torch.Tensor
    position_ids_ST: torch.Tensor
    layout: PackedLayout | None
    """None if samples are not packed."""
    predicting_N: torch.Tensor
    target_N: torch.Tensor
    own: slice
    """The range of the N tokens among the row's trained tokens."""
    routes_TXK: torch.Tensor | None = None
    """The engine's experts of the T tokens in X layers (`router_replay`)."""


def model_input(
    micro_batch: MicroBatch,
    device: torch.device,
    kernel: Kernel | None,
    context: ContextGroup | None = None,
    multiple: int = 1,
) -> ModelInput:
    """Copies a micro-batch's input to the device with `move`.

    With `context`, copies only this rank's part of the row. Its number of tokens is padded to a multiple of `multiple`.
    Without a `kernel` for packed samples, each sample gets its own row.
    """
    if kernel is None:
        return _side_by_side(micro_batch, device)
    predicted_N = np.flatnonzero(micro_batch.trained_T)
    predicting_N, target_N = predicted_N - 1, micro_batch.token_ids_T[predicted_N]
    token_ids_T, position_ids_T, cu_seqlens = pad_row(micro_batch, multiple * (context.size if context else 1))
    first, end = 0, len(token_ids_T)
    if context is not None:
        size = end // context.size
        first, end = size * context.rank, size * (context.rank + 1)
    own = slice(*np.searchsorted(predicting_N, (first, end)).tolist())
    return ModelInput(
        token_ids_ST=move(token_ids_T[None, first:end], torch.int64, device),
        position_ids_ST=move(position_ids_T[None, first:end], torch.int64, device),
        layout=make_layout(cu_seqlens, device, kernel, context),
        predicting_N=move(predicting_N[own] - first, torch.int64, device),
        target_N=move(target_N[own], torch.int64, device),
        own=own,
        routes_TXK=_routes(micro_batch, slice(first, end), device),
    )


def _side_by_side(micro_batch: MicroBatch, device: torch.device) -> ModelInput:
    """Gives each sample of a row its own row, without the padding. Shorter rows end with repeats of position 0."""
    num_rows = max(len(micro_batch.sample_ids), 1)  # a dummy has only padding
    starts_S, lengths_S = micro_batch.cu_seqlens[:num_rows], np.diff(micro_batch.cu_seqlens)[:num_rows]
    longest = int(lengths_S.max())
    offset_T = np.arange(longest)
    source_ST = np.where(offset_T < lengths_S[:, None], starts_S[:, None] + offset_T, starts_S[:, None])
    predicted_N = np.flatnonzero(micro_batch.trained_T)
    sample_N = np.searchsorted(micro_batch.cu_seqlens, predicted_N, side="right") - 1
    position_ST = np.broadcast_to(offset_T, source_ST.shape)
    return ModelInput(
        token_ids_ST=move(micro_batch.token_ids_T[source_ST], torch.int64, device),
        position_ids_ST=move(position_ST, torch.int64, device),
        layout=None,
        predicting_N=move(sample_N * longest + predicted_N - 1 - starts_S[sample_N], torch.int64, device),
        target_N=move(micro_batch.token_ids_T[predicted_N], torch.int64, device),
        own=slice(0, len(predicted_N)),
    )


def _routes(micro_batch: MicroBatch, part: slice, device: torch.device) -> torch.Tensor | None:
    """Copies the part's routes to the device. Padding has zeros, which mean no routes."""
    routes_TXK = micro_batch.routes_TXK
    if routes_TXK is None:
        return None
    own = routes_TXK[part]
    padded = np.pad(own, ((0, part.stop - part.start - len(own)), (0, 0), (0, 0)))
    return move(padded, torch.int32, device)


def move(array: np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copies an array to the device. On a GPU the copy is asynchronous and ordered before its readers."""
    # numpy copies, because Ray's object store returns read-only shared memory, and in this thread: torch would use
    # OpenMP threads for long rows, which take 10 ms to wake up on some hosts.
    if device.type != "cuda":
        return torch.from_numpy(array.astype(NUMPY_DTYPES[dtype]))
    pinned = torch.empty(array.shape, dtype=dtype, pin_memory=True)
    np.copyto(pinned.numpy(), array)
    return pinned.to(device, non_blocking=True)
