"""What is put on top of a loss. `trainer` and `engine` are a token's logprobs as floats."""

from __future__ import annotations

from math import exp
from typing import Any

import torch


def bounded(value: float, bound: float) -> float:
    return max(-bound, min(bound, value))


def importance_weight(trainer: float, engine: float, config: Any) -> float:
    """Truncated importance sampling; `icepop` drops the token instead (2510.18855)."""
    w = exp(bounded(trainer - engine, config.tis_logprob_clamp))
    floor = config.tis_floor or 0.0
    if config.tis_mode == "icepop":
        return w if floor <= exp(trainer - engine) <= config.tis_cap else 0.0
    return max(floor, min(w, config.tis_cap))


def is_answer_masked(trainer: list[float], engine: list[float], config: Any) -> bool:
    """Whether the geometric mean of the answer's ratios is out of bounds."""
    deltas = [bounded(t - e, 20.0) for t, e in zip(trainer, engine, strict=True)]
    return not config.seq_is_mask_low <= exp(sum(deltas) / len(deltas)) <= config.seq_is_mask_high


def kl(logp: torch.Tensor, engine: float, estimator: str) -> torch.Tensor:
    """Schulman (2020): tokens come from the engine, so the ratio is trainer over engine."""
    log_r = torch.clamp(logp - engine, -20.0, 20.0)
    return log_r**2 / 2 if estimator == "k2" else torch.exp(log_r) - 1 - log_r


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """-sum of p log p over the vocabulary, in nats."""
    log_p = logits - torch.logsumexp(logits, dim=0)
    return -(torch.exp(log_p) * log_p).sum()
