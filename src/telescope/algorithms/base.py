"""The interface of an algorithm: a baseline, a loss, a denominator.

Owns that interface, the tensors that a loss may read, and the lookup by name (`ALGORITHM` in the module of that name;
the names and their rules are in `telescope.config.algorithms`). Does not own the origin of the tensors, nor the sum
over micro-batches and ranks: both belong to the trainer.

Invariants: everything is pure. No loss divides by a count of its own micro-batch, because the denominator is one number
for all ranks. torch is not imported, so that the driver can import this package: losses only call methods of their
tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from telescope.config.algorithms import ALGORITHM_FACTS

if TYPE_CHECKING:
    import torch

Denominator = Literal["tokens", "samples", "sample_budget"]
"""`tokens`: trained tokens of all ranks. `samples`: samples of all ranks. `sample_budget`: samples x `max_tokens`."""

DELTA_CLAMP = 20.0  # bound on logprob differences before exponentiation: exp(20) is finite in float32
STD_EPSILON = 1e-4  # added to a standard deviation before dividing, as in GRPO's reference settings


@dataclass(slots=True, frozen=True)
class TokenBatch:
    """The N trained tokens of one micro-batch, as input of a loss.

    All tensors are float [N] on one device except `sample_N` (int64 [N], 0 <= sample < `num_samples`).
    Only `logp_N` and `entropy_N` have gradients. `ref_logp_N` is the denominator of a ratio: the engine's logprob, or
    the trainer's own before the first update of the batch.
    """

    logp_N: torch.Tensor
    entropy_N: torch.Tensor
    engine_logp_N: torch.Tensor
    ref_logp_N: torch.Tensor
    advantage_N: torch.Tensor
    sample_N: torch.Tensor
    num_samples: int


TokenLoss = Callable[[TokenBatch, Any], "torch.Tensor"]
"""(tokens, config) -> loss of each token, float [N]. A sequence-level loss is divided among its tokens."""

ClipSides = tuple["torch.Tensor", "torch.Tensor"]
"""Whether the lower, and whether the upper bound of its ratio clips each token; bool [N] each."""

Baseline = Callable[[np.ndarray], np.ndarray]
"""Rewards of the n unmasked samples of one group, float64 [n], n >= 2 and not all equal -> advantages, float64 [n]."""


@dataclass(slots=True, frozen=True)
class Algorithm:
    """An algorithm: one row of the table in `docs/algorithms.md`."""

    baseline: Baseline
    token_loss: TokenLoss
    denominator: Callable[[Any], Denominator] = lambda config: "tokens"
    """config -> divisor of the summed loss."""
    clipped: Callable[[TokenBatch, Any], ClipSides] | None = None
    """(tokens without gradient, config) -> which tokens are clipped, for the metrics. None: the loss has no bounds."""


def clamped_delta(tokens: TokenBatch) -> torch.Tensor:
    """Computes each token's logp - ref, clamped to +-20."""
    return (tokens.logp_N - tokens.ref_logp_N).clamp(-DELTA_CLAMP, DELTA_CLAMP)


def clipped_surrogate(ratio_N: torch.Tensor, advantage_N: torch.Tensor, config: Any) -> torch.Tensor:
    """Computes each token's -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)."""
    clipped_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return -(ratio_N * advantage_N).minimum(clipped_N * advantage_N)


def clipped_sides(ratio_N: torch.Tensor, advantage_N: torch.Tensor, config: Any) -> ClipSides:
    """Returns which tokens `clipped_surrogate` clips: at the lower bound for A < 0, at the upper for A > 0."""
    low_N = (ratio_N < 1.0 - config.clip_low) & (advantage_N < 0)
    return low_N, (ratio_N > 1.0 + config.clip_high) & (advantage_N > 0)


def mean_over_sample(values_N: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    """Computes the mean over each sample's trained tokens, repeated for each token, [N] -> [N].

    A sample is never split over micro-batches, so its mean is complete.
    """
    zeros_S = values_N.new_zeros(tokens.num_samples)
    total_S = zeros_S.index_add(0, tokens.sample_N, values_N)
    return (total_S / sample_sizes(tokens)).index_select(0, tokens.sample_N)


def sample_sizes(tokens: TokenBatch) -> torch.Tensor:
    """Counts the trained tokens of each sample, at least 1; float [`num_samples`]."""
    ones_N = tokens.advantage_N.new_ones(tokens.advantage_N.shape)
    return ones_N.new_zeros(tokens.num_samples).index_add(0, tokens.sample_N, ones_N).clamp(min=1.0)


def get_algorithm(name: str) -> Algorithm:
    """Returns the algorithm `name`. Raises `ValueError` with the known names."""
    if name not in ALGORITHM_FACTS:
        raise ValueError(f"algorithm {name!r} is unknown: use one of {', '.join(ALGORITHM_FACTS)}")
    algorithm = importlib.import_module(f"telescope.algorithms.{name}").ALGORITHM
    assert isinstance(algorithm, Algorithm)
    return algorithm
