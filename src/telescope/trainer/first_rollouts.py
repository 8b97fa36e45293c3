"""Compares engine and trainer in the first training steps, for tokens that both computed with equal weights.

The first rollouts are a probe without cost. If the engine computes something else than the trainer (another window,
other rotary positions, another scale), training would silently make the model compensate for it. Differences are
compared by position in the sample, because many such errors begin at a boundary in the model's config.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from telescope.errors import RunError
from telescope.trainer.loss import HostMicroBatch
from telescope.weights.probe import loosest_tolerance

FIRST_EDGE = 64
LEAST_TOKENS = 32
"""Least tokens between two edges for a comparison."""
GROWTH, GROWTH_FLOOR, GROWTH_TOKENS = 5.0, 0.4, 256
"""A difference is too large if it exceeds `GROWTH` times that of earlier positions and `GROWTH_FLOOR` of the tolerance,
with both as means over at least `GROWTH_TOKENS` tokens."""
BOUNDARIES = ("sliding_window", "attention_chunk_size", "original_max_position_embeddings")


class FirstRollouts:
    """Sums differences of logprobs by position, over all ranks. `config` is the run's, `text_config` the model's."""

    def __init__(self, config: Any, text_config: Any, device: torch.device) -> None:
        self._dtype, self._tolerance = loosest_tolerance(config.precisions, config.temperature)
        self._boundaries = boundaries_of(text_config)
        powers = {FIRST_EDGE << k for k in range(32) if FIRST_EDGE << k < config.seq_len}
        self._edges = np.array(sorted({0} | powers | {edge for edge in self._boundaries if edge < config.seq_len}))
        self._sums_K2 = torch.zeros(len(self._edges), 2, dtype=torch.float64, device=device)
        # An engine that cuts off rare tokens gives the others more probability, and an engine has no dropout.
        differs = (config.top_p is not None and config.top_p < 1) or (config.lora_rank and config.lora_dropout)
        self._steps_left = 0 if differs else config.compare_first_steps

    @property
    def allowed(self) -> float:
        """Returns the mean difference in nats that rounding at the run's dtypes explains."""
        return self._tolerance.mean

    @torch.no_grad()
    def add(self, host: HostMicroBatch, logp_N: torch.Tensor, engine_logprob_N: torch.Tensor) -> None:
        """Adds the differences of samples that only the step's weights sampled. Weights must not have changed since."""
        if not self._steps_left or not logp_N.numel():
            return
        position_N = host.source.position_ids_T[host.predicted_N] - 1  # position of the predicting token
        place_N = torch.from_numpy(np.searchsorted(self._edges, position_N, side="right") - 1).to(logp_N.device)
        # `inflight_kv` may keep keys and values of older weights, on which samples that began earlier depend.
        counted_N = torch.from_numpy(host.on_policy_N).to(logp_N.device)
        difference_N = (logp_N.detach() - engine_logprob_N).double().abs()
        values_N2 = torch.stack([counted_N.double(), torch.where(counted_N, difference_N, 0.0)], dim=1)
        self._sums_K2.index_add_(0, place_N, values_N2)

    def check(self) -> None:
        """Raises `RunError` if the differences exceed rounding. Collective, in the first steps only."""
        if not self._steps_left:
            return
        total_K2 = self._sums_K2.clone()
        dist.all_reduce(total_K2)
        self._steps_left -= int(total_K2[:, 0].sum() >= LEAST_TOKENS)
        problem = find_difference(self._edges, total_K2.cpu().numpy(), self._tolerance.mean)
        if problem is None:
            return
        edge, mean, before = problem
        where = "" if edge == 0 else f" from position {edge:,} on"
        known = self._boundaries.get(edge)
        raise RunError(
            f"engine and trainer compute different logprobs of the same tokens with the same weights{where}: they "
            f"differ by {mean:.2g} nats on average"
            + (f", before it by {before:.2g}" if edge else "")
            + f" (allowed for {self._dtype}: {self._tolerance.mean:.2g}). "
            + (f"The model's {known} is {edge}: set max_model_len to at most that. " if known else "")
            + "Training would make the model compensate for it, so no weight was changed. Run `telescope verify` to "
            "see which part differs; compare_first_steps: 0 trains all the same"
        )


def find_difference(edges_K: np.ndarray, sums_K2: np.ndarray, allowed: float) -> tuple[int, float, float] | None:
    """Returns the first edge after which differences are too large, their mean there, and the mean before.

    `sums_K2` are the tokens and summed differences from each edge to the next. NaN counts as too large.
    """
    tokens = difference = 0.0
    for edge, (count, total) in zip(edges_K.tolist(), sums_K2.tolist(), strict=True):
        if count >= LEAST_TOKENS:
            mean, before = total / count, difference / tokens if tokens else 0.0
            grows = tokens >= GROWTH_TOKENS and count >= GROWTH_TOKENS and mean > GROWTH * before
            if not mean <= allowed or (grows and mean > GROWTH_FLOOR * allowed):
                return edge, mean, before
        tokens, difference = tokens + count, difference + total
    whole = difference / tokens if tokens else 0.0
    return None if whole <= allowed or tokens < LEAST_TOKENS else (0, whole, 0.0)


def boundaries_of(text_config: Any) -> dict[int, str]:
    """Returns the positions from which a model computes differently, and the config fields that set them."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    places = [vars(text_config), rope, *(part for part in rope.values() if isinstance(part, dict))]
    return {
        int(place[name]): name
        for place in places
        for name in BOUNDARIES
        if isinstance(place.get(name), int) and place[name] > 0
    }
