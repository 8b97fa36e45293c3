"""Losses of tokens without a ratio, and PPO's clipped ratio. A token is a (logp, ref) pair of a scalar and a float."""

from __future__ import annotations

from typing import Any

import torch


def ratio(logp: torch.Tensor, ref: float) -> torch.Tensor:
    """pi / pi_ref of a token. Differences of logprobs are bounded by 20 before they are exponentiated."""
    return torch.exp(torch.clamp(logp - ref, -20.0, 20.0))


def clip(value: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.clamp(value, low, high)


def plain(logps: list[torch.Tensor], refs: list[float], advantage: float, config: Any) -> list[torch.Tensor]:
    """REINFORCE with the algorithm's baseline: the gradient is -A grad log pi."""
    return [-advantage * logp for logp in logps]


def clipped(logps: list[torch.Tensor], refs: list[float], advantage: float, config: Any) -> list[torch.Tensor]:
    """PPO (1707.06347), equation 7, with the two bounds of DAPO (2503.14476).

    `clip_ratio_c`: dual clip (1912.09729), for negative advantages.
    """
    losses = []
    for logp, ref in zip(logps, refs, strict=True):
        rho = ratio(logp, ref)
        objective = torch.min(rho * advantage, clip(rho, 1 - config.clip_low, 1 + config.clip_high) * advantage)
        if config.clip_ratio_c is not None and advantage < 0:
            objective = torch.max(objective, torch.tensor(config.clip_ratio_c * advantage, dtype=torch.float64))
        losses.append(-objective)
    return losses
