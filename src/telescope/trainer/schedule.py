"""The learning rate as a pure function of the training step.

There is no scheduler object to save or to lose at a resume, and no step with a rate of 0: step s of a warm-up of w
steps uses (s + 1) / w of the rate, and a decay over the remaining steps does not reach its end within the run.
"""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["none", "constant", "linear", "cosine"]


def learning_rate(
    step: int,
    *,
    base: float,
    schedule: Schedule,
    warmup_steps: int,
    total_steps: int,
    min_ratio: float,
) -> float:
    """Computes the rate of training step `step`, counted from 0.

    `none` ignores the warm-up; `constant` warms up and stays; `linear` and `cosine` warm up, then decay from `base` at
    step `warmup_steps` to `base * min_ratio`, which they would reach at step `total_steps`.
    """
    if schedule == "none":
        return base
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    if schedule == "constant":
        return base
    decay_steps = max(1, total_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / decay_steps)
    remaining = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return base * (min_ratio + (1.0 - min_ratio) * remaining)
