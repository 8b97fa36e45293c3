"""Metrics of a training step, summed on the device and reduced once over all ranks.

Owns the sums and the names. Invariants: adding to them never waits for the device; a mean is a sum over all ranks
divided by a count over all ranks, never a mean of means; padding and dummy micro-batches add nothing; what cannot be
measured in a step (mismatch without an on-policy token) is absent rather than 0.

Mismatch compares the trainer's logprob of a token with the engine's. It is measured on samples that one policy version
produced and that still is the trainer's: anything else would report staleness as numerical error.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from telescope.algorithms.base import DELTA_CLAMP
from telescope.trainer.loss import DeviceMicroBatch

HISTOGRAM_DECADES = (-8.0, 2.0)
HISTOGRAM_BINS = 1000
"""|logprob difference| is counted in bins of 1/100 decade, so a percentile is good to 2.4 %."""

NEAR_ONE = (0.9, 1.1)
"""Ratios outside are reported as a share."""

_SUMS = (
    "tokens", "loss", "entropy", "kl", "age", "advantage_abs",
    "on_policy_tokens", "difference", "outside",
)  # fmt: skip
_MAXIMA = ("age_max", "difference_max")


class StepMetrics:
    """Sums of one step on one rank."""

    def __init__(self, device: torch.device) -> None:
        # float64 so that a sum over 10^7 tokens does not depend on the order of micro-batches.
        self._sums = torch.zeros(len(_SUMS) + HISTOGRAM_BINS, dtype=torch.float64, device=device)
        self._maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self,
        batch: DeviceMicroBatch,
        logp_N: torch.Tensor,
        entropy_N: torch.Tensor,
        loss: torch.Tensor,
        *,
        weights_moved: bool,
    ) -> None:
        """Count one micro-batch. `loss` is its share of the step's loss, denominator included.

        `weights_moved` says that an earlier optimiser step of this batch has already changed the weights: no token is
        then on-policy.
        """
        if logp_N.numel() == 0:
            return
        delta_N = (logp_N.detach() - batch.engine_logprob_N).double().clamp_(-DELTA_CLAMP, DELTA_CLAMP)
        ratio_N = delta_N.exp()
        on_policy_N = batch.on_policy_N.double() * (0.0 if weights_moved else 1.0)
        difference_N = delta_N.abs() * on_policy_N
        outside_N = ((ratio_N < NEAR_ONE[0]) | (ratio_N > NEAR_ONE[1])).double() * on_policy_N
        age_N = batch.age_N.double()
        self._sums[: len(_SUMS)] += torch.stack(
            [
                torch.ones_like(delta_N).sum(),
                loss.detach().double(),
                entropy_N.detach().double().sum(),
                (ratio_N - 1.0 - delta_N).sum(),
                age_N.sum(),
                batch.advantage_N.double().abs().sum(),
                on_policy_N.sum(),
                difference_N.sum(),
                outside_N.sum(),
            ]
        )
        low, high = HISTOGRAM_DECADES
        # Tokens that are not on-policy go below the histogram, where histc does not count them.
        decade_N = difference_N.log10().clamp(low, high).where(on_policy_N > 0, low - 1.0)
        self._sums[len(_SUMS) :] += torch.histc(decade_N, HISTOGRAM_BINS, low, high)
        self._maxima.copy_(torch.maximum(self._maxima, torch.stack([age_N.max(), difference_N.max()])))

    def reduce(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """The metrics of all ranks, equal on each. Collective; waits for the device."""
        dist.all_reduce(self._sums, op=dist.ReduceOp.SUM, group=group)
        dist.all_reduce(self._maxima, op=dist.ReduceOp.MAX, group=group)
        values = self._sums.tolist()
        total = dict(zip(_SUMS, values[: len(_SUMS)], strict=True))
        top = dict(zip(_MAXIMA, self._maxima.tolist(), strict=True))
        metrics = {"tokens/trained": total["tokens"], "loss/policy": total["loss"]}
        if total["tokens"]:
            tokens = total["tokens"]
            metrics |= {
                "entropy": total["entropy"] / tokens,
                "kl_divergence_inference": total["kl"] / tokens,
                "staleness/token_age_mean": total["age"] / tokens,
                "staleness/token_age_max": top["age_max"],
                "advantage/token_abs_mean": total["advantage_abs"] / tokens,
                "mismatch/on_policy_share": total["on_policy_tokens"] / tokens,
            }
        if total["on_policy_tokens"]:
            counted = total["on_policy_tokens"]
            metrics |= {
                "mismatch/logprob_difference_mean": total["difference"] / counted,
                "mismatch/logprob_difference_p95": percentile(values[len(_SUMS) :], 0.95),
                "mismatch/logprob_difference_max": top["difference_max"],
                "mismatch/ratio_outside_share": total["outside"] / counted,
            }
        return metrics


def percentile(histogram: list[float], share: float) -> float:
    """Upper edge of the bin in which `share` of the counted |logprob differences| is reached."""
    wanted = share * sum(histogram)
    low, high = HISTOGRAM_DECADES
    seen = 0.0
    for index, count in enumerate(histogram):
        seen += count
        if seen >= wanted:
            return float(10 ** (low + (index + 1) * (high - low) / HISTOGRAM_BINS))
    return float(10**high)


def reduce_max(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """The largest of each value over all ranks (timings: the slowest rank is the one that others wait for)."""
    names = sorted(values)
    stacked = torch.tensor([values[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(stacked, op=dist.ReduceOp.MAX)
    return dict(zip(names, stacked.tolist(), strict=True))
