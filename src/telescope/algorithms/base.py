"""What an algorithm is: a baseline within the group, a loss per trained token, and what the sum is divided by.

Owns the three seams that an algorithm fills and the tensors that its loss may read. Does not own where the tensors come
from (the trainer), nor the sum over micro-batches and ranks (the trainer too). Invariants: everything here is pure; no
loss ever divides by a count of its own micro-batch, because the denominator is one number for all ranks; torch is not
imported, since losses only use the methods of the tensors they are given, so that the driver can import this room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

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


def clamped_delta(tokens: TokenBatch) -> torch.Tensor:
    """logp - ref of each token, bounded so that its exponential is finite; [N], with gradient where it is inside."""
    return (tokens.logp_N - tokens.ref_logp_N).clamp(-DELTA_CLAMP, DELTA_CLAMP)


def token_denominator(config: Any) -> Denominator:
    """The denominator of every token-mean loss."""
    return "tokens"
