"""AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2) and the learning rate of a step."""

from __future__ import annotations

import math
from typing import Any

import torch

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class AdamW:
    """The moments of every weight, and how often they were updated."""

    def __init__(self) -> None:
        self.first: dict[str, torch.Tensor] = {}
        self.second: dict[str, torch.Tensor] = {}
        self.num_steps = 0

    def step(
        self, weights: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], rate: float, decay: float
    ) -> dict[str, torch.Tensor]:
        """The weights after one update. Only matrices decay: norms and biases are vectors."""
        self.num_steps += 1
        updated = {}
        for name, weight in weights.items():
            gradient = gradients[name]
            self.first[name] = BETA1 * self.first.get(name, 0.0) + (1 - BETA1) * gradient
            self.second[name] = BETA2 * self.second.get(name, 0.0) + (1 - BETA2) * gradient**2
            first = self.first[name] / (1 - BETA1**self.num_steps)
            second = self.second[name] / (1 - BETA2**self.num_steps)
            step = first / (second.sqrt() + EPSILON)
            if weight.ndim > 1:
                step = step + decay * weight
            updated[name] = weight - rate * step
        return updated


def clipped(gradients: dict[str, torch.Tensor], largest_norm: float) -> dict[str, torch.Tensor]:
    """The gradients, scaled down so that the norm of all of them together is at most `largest_norm`."""
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values()))
    scale = min(1.0, largest_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
    return {name: gradient * scale for name, gradient in gradients.items()}


def cosine_rate(step: int, config: Any) -> float:
    """Linear warm-up that ends at the full rate, then half a cosine down to `min_lr_ratio` of it."""
    if step < config.warmup_steps:
        return float(config.learning_rate * (step + 1) / config.warmup_steps)
    lowest = config.learning_rate * config.min_lr_ratio
    share = (step - config.warmup_steps) / (config.number_of_steps - config.warmup_steps)
    return float(lowest + (config.learning_rate - lowest) * (1 + math.cos(math.pi * share)) / 2)
