"""What an algorithm is: a baseline within the group, a loss per trained token, and what the sum is divided by.

Owns the three seams that an algorithm fills and the tensors that its loss may read. Does not own where the tensors come
from (the trainer), nor the sum over micro-batches and ranks (the trainer too). Invariants: everything here is pure; no
loss ever divides by a count of its own micro-batch, because the denominator is one number for all ranks; torch is not
imported, since losses only use the methods of the tensors they are given, so that the driver can import this room.

From the name in the configuration to the algorithm: `ALGORITHM` in the module of that name.

The names themselves, with what each allows beside it, are one line each in `telescope.config.algorithms`.
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

DELTA_CLAMP = 20.0
"""Bound on logprob differences before they are exponentiated: exp(20) is finite in every dtype used here."""

STD_EPSILON = 1e-4
"""Added to a standard deviation before dividing, as in GRPO's reference settings."""


@dataclass(slots=True, frozen=True)
class TokenBatch:
    """The N trained tokens of one micro-batch, as a loss sees them.

    All tensors are float [N] on one device except `sample_N` (int64 [N], 0 <= sample < `num_samples`).
    `logp_N` and `entropy_N` carry gradients; the rest does not. `ref_logp_N` is what a ratio is taken against: the
    engine's logprob, or the trainer's own before the first update of the batch.
    """

    logp_N: torch.Tensor
    entropy_N: torch.Tensor
    engine_logp_N: torch.Tensor
    ref_logp_N: torch.Tensor
    advantage_N: torch.Tensor
    sample_N: torch.Tensor
    num_samples: int


TokenLoss = Callable[[TokenBatch, Any], "torch.Tensor"]
"""(tokens, config) -> loss of each token, float [N]. A sequence-level loss shares itself out over its tokens."""

ClipSides = tuple["torch.Tensor", "torch.Tensor"]
"""Whether each token is held back by the lower, and by the upper bound of its ratio; bool [N] each."""

Baseline = Callable[[np.ndarray], np.ndarray]
"""Rewards of the n unmasked samples of one group, float64 [n], n >= 2 and not all equal -> advantages, float64 [n]."""


@dataclass(slots=True, frozen=True)
class Algorithm:
    """One line of the table in `docs/algorithms.md`."""

    source: str
    """The paper."""
    baseline: Baseline
    token_loss: TokenLoss
    denominator: Callable[[Any], Denominator]
    """config -> what the summed loss is divided by."""
    clipped: Callable[[TokenBatch, Any], ClipSides] | None = None
    """(tokens without gradient, config) -> where the loss's own bounds bind, for the metrics; None without bounds."""


def clamped_delta(tokens: TokenBatch) -> torch.Tensor:
    """logp - ref of each token, bounded so that its exponential is finite; [N], with gradient where it is inside."""
    return (tokens.logp_N - tokens.ref_logp_N).clamp(-DELTA_CLAMP, DELTA_CLAMP)


def token_denominator(config: Any) -> Denominator:
    """The denominator of every token-mean loss."""
    return "tokens"


def mean_over_sample(values_N: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    """The mean of a value over the trained tokens of its sample, given back to each of them: [N] -> [N].

    A sample lies whole in one micro-batch, so its mean is complete there.
    """
    zeros_S = values_N.new_zeros(tokens.num_samples)
    total_S = zeros_S.index_add(0, tokens.sample_N, values_N)
    return (total_S / sample_sizes(tokens)).index_select(0, tokens.sample_N)


def sample_sizes(tokens: TokenBatch) -> torch.Tensor:
    """Trained tokens of each sample of the micro-batch, at least 1; float [`num_samples`]."""
    ones_N = tokens.advantage_N.new_ones(tokens.advantage_N.shape)
    return ones_N.new_zeros(tokens.num_samples).index_add(0, tokens.sample_N, ones_N).clamp(min=1.0)


def get_algorithm(name: str) -> Algorithm:
    """The algorithm called `name`. Raises `ValueError` naming the known ones."""
    if name not in ALGORITHM_FACTS:
        raise ValueError(f"algorithm {name!r} is not available: use one of {', '.join(ALGORITHM_FACTS)}")
    algorithm = importlib.import_module(f"telescope.algorithms.{name}").ALGORITHM
    assert isinstance(algorithm, Algorithm)
    return algorithm
