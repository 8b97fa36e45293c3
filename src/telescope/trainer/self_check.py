"""Measures a rank for `telescope verify`.

Computes logprobs of packed samples, and one gradient in two packings. Changes neither weights nor optimizer state. Does
not own the verdicts (`telescope.verify`) or the packing. Every function is collective: all ranks call it with their own
step inputs.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from telescope.errors import UserError
from telescope.trainer.backends import TrainingBackend
from telescope.trainer.batch import StepInput
from telescope.trainer.loss import denominator
from telescope.trainer.metrics import StepMetrics
from telescope.trainer.step import RLBackend
from telescope.utils.timeline import Timeline


@dataclass(frozen=True, slots=True)
class GradientComparison:
    """Two gradients of one loss. Norms are over the whole gradient of all ranks."""

    relative_error: float
    """L2 norm of their difference over the norm of the second; NaN if the second is zero."""
    norms: tuple[float, float]
    losses: tuple[float, float]
    num_micro_batches: tuple[int, int]
    """Numbers on this rank."""


def packed_logprobs(backend: TrainingBackend, step_input: StepInput) -> dict[str, np.ndarray]:
    """Computes packed logprobs of this rank's trained tokens, by sample id. Collective."""
    backend = _require_step(backend)
    rows = [row for batch in step_input.minibatches for row in batch.micro_batches]
    found: dict[str, np.ndarray] = {}
    for row, logp_N in zip(rows, backend.forward_logprobs(rows), strict=True):
        values_N, sample_N = logp_N.double().cpu().numpy(), row.sample_index_T[row.trained_T]
        found |= {name: values_N[sample_N == index] for index, name in enumerate(row.sample_ids)}
    return found


def compare_gradients(backend: TrainingBackend, first: StepInput, second: StepInput) -> GradientComparison:
    """Compares gradient and loss of the same samples in two packings. Collective."""
    backend = _require_step(backend)
    losses, gradients = [], []
    for step_input in (first, second):
        sums = StepMetrics(backend.device)
        (batch,) = step_input.minibatches  # the whole batch at once, because minibatches would divide it by groups
        backend.accumulate(batch, step_input.version, Timeline(backend.device, backend.rank), sums)
        gradients.append(backend.take_gradient(denominator(backend.algorithm, batch, backend.config)))
        losses.append(sums.reduce()["loss/policy"])
    total = torch.zeros(3, dtype=torch.float64, device=backend.device)
    for part, other_part in zip(*gradients, strict=True):
        squares = torch.zeros_like(total)
        for one, other in zip(part.shards, other_part.shards, strict=True):
            one, other = one.double(), other.double()
            squares += torch.stack([(one - other).square().sum(), one.square().sum(), other.square().sum()])
        dist.all_reduce(squares, group=part.group)
        total += squares
    difference, norm_first, norm_second = (math.sqrt(value) for value in total.tolist())
    return GradientComparison(
        relative_error=difference / norm_second if norm_second > 0 else math.nan,
        norms=(norm_first, norm_second),
        losses=(losses[0], losses[1]),
        num_micro_batches=(len(first.minibatches[0].micro_batches), len(second.minibatches[0].micro_batches)),
    )


def _require_step(backend: TrainingBackend) -> RLBackend:
    if not isinstance(backend, RLBackend):
        raise UserError(
            f"train_backend: {backend.config.train_backend!r} cannot be verified: use 'fsdp', 'megatron' or a class "
            "derived from one of theirs"
        )
    return backend
