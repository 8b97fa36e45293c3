"""Truncated importance sampling between engine and trainer (`use_tis`).

As implemented: the policy loss of a token is multiplied by a constant weight w = exp(delta), delta the trainer's
logprob less the engine's, clamped to +-`tis_logprob_clamp`. Sources: Ionides, "Truncated Importance Sampling" (2008);
between an engine and a trainer, Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
(2025); masking in place of truncation, IcePop in "Every Step Evolves" (arXiv 2510.18855).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def importance_weight(
    trainer_logp_N: torch.Tensor, engine_logp_N: torch.Tensor, config: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight of each token, without gradient, and whether its ratio lay outside [`tis_floor`, `tis_cap`]; both [N].

    `tis_mode: truncate` moves such a ratio to the bound, `icepop` gives the token a weight of 0.
    """
    delta_N = trainer_logp_N.detach() - engine_logp_N
    floor = 0.0 if config.tis_floor is None else config.tis_floor
    # Judged before the clamp, which would bring a ratio of any size back inside.
    outside_N = delta_N > math.log(config.tis_cap)
    if floor > 0.0:
        outside_N = outside_N | (delta_N < math.log(floor))
    ratio_N = delta_N.clamp(-config.tis_logprob_clamp, config.tis_logprob_clamp).exp()
    if config.tis_mode == "icepop":
        return ratio_N.masked_fill(outside_N, 0.0), outside_N
    return ratio_N.clamp(floor, config.tis_cap), outside_N
