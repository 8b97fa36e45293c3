"""What a run says about settings that are valid and may still surprise: sentences for the person who starts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

GSPO_BOUND_THAT_BINDS = 0.01
"""A sequence ratio is the exponential of a mean over hundreds of tokens: it does not leave 1 by a hundredth."""


def remarks(config: TelescopeConfig) -> list[str]:
    """A sentence for each such setting."""
    found = []
    if config.group_size == 1:
        found.append(
            "group_size is 1: a sample has nothing to be compared with, so its advantage is its reward"
            + (", whitened over the batch." if config.advantage_norm == "batch" else ".")
        )
    if config.algorithm == "gspo":
        idle = [name for name in ("clip_low", "clip_high") if getattr(config, name) > GSPO_BOUND_THAT_BINDS]
        if idle:
            values = " and ".join(f"{name} {getattr(config, name):g}" for name in idle)
            found.append(
                f"gspo clips the ratio of a whole answer, which hardly leaves 1, so {values} will not bind. "
                "The paper's values are clip_low 3e-4 and clip_high 4e-4."
            )
    return found
