"""Losses that are built on the importance ratio."""

from __future__ import annotations

from typing import Any

import torch
from tests.reference.policy_gradients import clip, ratio


def cispo(logps: list[torch.Tensor], refs: list[float], advantage: float, config: Any) -> list[torch.Tensor]:
    """MiniMax-M1 (2506.13585): REINFORCE with a clipped weight that has no gradient."""
    losses = []
    for logp, ref in zip(logps, refs, strict=True):
        weight = clip(ratio(logp, ref), 1 - config.clip_low, 1 + config.clip_high).detach()
        losses.append(-weight * advantage * logp)
    return losses


def gspo(logps: list[torch.Tensor], refs: list[float], advantage: float, config: Any) -> list[torch.Tensor]:
    """GSPO (2507.18071), equations 5 and 7: one length-normalized ratio for the answer.

    One loss of the whole answer, in equal parts on its tokens.
    """
    deltas = [torch.clamp(logp - ref, -20.0, 20.0) for logp, ref in zip(logps, refs, strict=True)]
    s = torch.exp(sum(deltas, torch.zeros((), dtype=torch.float64)) / len(deltas))
    loss = -torch.min(s * advantage, clip(s, 1 - config.clip_low, 1 + config.clip_high) * advantage)
    return [loss / len(deltas)] * len(deltas)


def sapo(logps: list[torch.Tensor], refs: list[float], advantage: float, config: Any) -> list[torch.Tensor]:
    """SAPO (2511.20347): f(x) = 4 / tau sigmoid(tau (x - 1)), tau by the sign of the advantage."""
    tau = config.sapo_tau_pos if advantage > 0 else config.sapo_tau_neg
    losses = []
    for logp, ref in zip(logps, refs, strict=True):
        gate = 4.0 / tau / (1.0 + torch.exp(-tau * (ratio(logp, ref) - 1.0)))
        losses.append(-gate * advantage)
    return losses
