"""Computes metrics of a training step, reduced once over all ranks.

Owns the sums and the names. Invariants: adding never waits for the device. A mean is a sum over all ranks divided by a
count over all ranks, never a mean of means. Padding and dummy micro-batches add nothing. A metric without data
(mismatch without an on-policy token, clipping without bounds) is absent rather than 0.

Mismatch compares the trainer's logprob of a token with the engine's. For the whole step and by environment it covers
samples that were sampled entirely by the trainer's current policy version, because others would show staleness as
numerical error. By age it covers all tokens of that age, which shows the effect of staleness.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from telescope.algorithms.base import DELTA_CLAMP
from telescope.algorithms.loss import LossTerms
from telescope.config.environments import distinct_names
from telescope.trainer.loss import DeviceMicroBatch
from telescope.utils.timeline import Span

HISTOGRAM_DECADES = (-8.0, 2.0)
HISTOGRAM_BINS = 1000
"""|logprob difference| is counted in bins of 1/100 decade, so a percentile is exact to 2.4 %."""

NEAR_ONE = (0.9, 1.1)
"""The share of ratios outside of this range is reported."""

MAX_ENVIRONMENTS = 32
"""Environments with separate metrics. The others share one name, so that the number of keys is bounded."""

OTHER = "other"

AGES = (1, 2, 3, 5, 9)
AGE_NAMES = ("age_0", "age_1", "age_2", "age_3_4", "age_5_8", "age_9_up")
"""Buckets of ages in policy versions with separate metrics; one starts at each of `AGES`."""

OPERATIONS = (
    "forward", "backward", "loss_computation", "compute_kl", "compute_entropy", "data_to_device",
    "prepare_tensors", "gradient_reduction",
)  # fmt: skip
"""Operations that are measured per micro-batch. `compute_entropy` is the fused pass for logprob and entropy.
`gradient_reduction` overlaps `backward`, on a separate stream on a GPU."""

STEP_OPERATIONS = ("gradient_norm", "optimizer")
"""Operations that are measured per optimizer step."""

REFERENCE = "reference_logprobs"
"""The forward pass of `ppo_clip_ref_logprobs: batch`, once before several optimizer steps."""

_SUMS = (
    "tokens", "samples", "policy_loss", "penalty", "entropy", "kl", "age", "advantage_abs",
    "difference", "outside", "on_policy_tokens", "on_policy_difference", "on_policy_outside",
    "clip_low", "clip_high", "tis_weight", "tis_outside", "masked_tokens", "masked_samples",
)  # fmt: skip


def environment_names(config: Any) -> tuple[str, ...]:
    """Returns the environments with separate metrics, equal on all ranks."""
    return tuple(sorted(distinct_names(config.environments))[:MAX_ENVIRONMENTS])


class StepMetrics:
    """Sums of one step on one rank, by environment and by age."""

    def __init__(self, device: torch.device, environments: Sequence[str] = ()) -> None:
        self._environments = (*environments, OTHER)
        num_rows = len(self._environments) + len(AGE_NAMES)
        # float64 so that a sum over 10^7 tokens does not depend on the order of micro-batches.
        self._sums = torch.zeros(num_rows, len(_SUMS) + HISTOGRAM_BINS, dtype=torch.float64, device=device)
        self._maxima = torch.zeros(num_rows, 2, dtype=torch.float64, device=device)  # difference, age
        self._ages = torch.tensor(AGES, dtype=torch.float64, device=device)
        self._has = dict.fromkeys(("clip", "weight", "mask", "penalty"), False)

    @torch.no_grad()
    def add(
        self,
        batch: DeviceMicroBatch,
        logp_N: torch.Tensor,
        entropy_N: torch.Tensor,
        terms: LossTerms,
        *,
        scale: float,
        penalty_scale: float,
        weights_moved: bool,
        counts: bool = True,
    ) -> None:
        """Adds one micro-batch. `scale` and `penalty_scale` convert sums of losses to shares of the step's loss.

        `weights_moved` means that an earlier optimizer step of this batch has changed the weights, so that no token is
        on-policy. `counts` is False if another rank adds the same micro-batch.
        """
        given = {"clip": terms.clipped, "weight": terms.weight_N, "mask": terms.masked_N, "penalty": terms.penalty_N}
        self._has |= {name: True for name, term in given.items() if term is not None}
        if logp_N.numel() == 0 or not counts:
            return
        delta_N = (logp_N.detach() - batch.engine_logprob_N).double().clamp_(-DELTA_CLAMP, DELTA_CLAMP)
        ratio_N = delta_N.exp()
        difference_N = delta_N.abs()
        ones_N, zeros_N = torch.ones_like(delta_N), torch.zeros_like(delta_N)
        on_policy_N = zeros_N if weights_moved else batch.on_policy_N.double()
        outside_N = ((ratio_N < NEAR_ONE[0]) | (ratio_N > NEAR_ONE[1])).double()
        age_N = batch.age_N.double()
        sizes_S = zeros_N.new_zeros(batch.num_samples).index_add_(0, batch.sample_N, ones_N)
        share_of_sample_N = 1.0 / sizes_S.index_select(0, batch.sample_N)
        masked_N = zeros_N if terms.masked_N is None else terms.masked_N.double()
        low_N, high_N = (zeros_N, zeros_N) if terms.clipped is None else terms.clipped
        columns = {
            "tokens": ones_N,
            "samples": share_of_sample_N,
            "policy_loss": terms.policy_N.detach() * scale,
            "penalty": zeros_N if terms.penalty_N is None else terms.penalty_N.detach() * penalty_scale,
            "entropy": entropy_N.detach(),
            "kl": ratio_N - 1.0 - delta_N,
            "age": age_N,
            "advantage_abs": batch.advantage_N.abs(),
            "difference": difference_N,
            "outside": outside_N,
            "on_policy_tokens": on_policy_N,
            "on_policy_difference": difference_N * on_policy_N,
            "on_policy_outside": outside_N * on_policy_N,
            "clip_low": low_N,
            "clip_high": high_N,
            "tis_weight": zeros_N if terms.weight_N is None else terms.weight_N,
            "tis_outside": zeros_N if terms.outside_N is None else terms.outside_N,
            "masked_tokens": masked_N,
            "masked_samples": masked_N * share_of_sample_N,
        }
        values_NK = torch.stack([columns[name].double() for name in _SUMS], dim=1)
        low, high = HISTOGRAM_DECADES
        # NaN counts as the largest difference. As an integer it would be no bin.
        decade_N = difference_N.log10().nan_to_num_(nan=high).clamp_(low, high)
        bin_N = ((decade_N - low) * (HISTOGRAM_BINS / (high - low))).long().clamp_(max=HISTOGRAM_BINS - 1)
        age_row_N = len(self._environments) + torch.bucketize(age_N, self._ages, right=True)
        for row_N, counted_N in ((batch.environment_N, on_policy_N), (age_row_N, ones_N)):
            self._sums[:, : len(_SUMS)].index_add_(0, row_N, values_NK)
            width = self._sums.shape[1]
            self._sums.view(-1).index_add_(0, row_N * width + len(_SUMS) + bin_N, counted_N)
            top_N2 = torch.stack([difference_N * counted_N, age_N], dim=1)
            self._maxima.scatter_reduce_(0, row_N[:, None].expand(-1, 2), top_N2, "amax")

    def reduce(self) -> dict[str, float]:
        """Returns the metrics over all ranks, equal on each. Collective. Waits for the device."""
        dist.all_reduce(self._sums, op=dist.ReduceOp.SUM)
        # Only the last pipeline stage computes the loss, so other ranks do not know which terms it has.
        known = torch.cat([self._maxima.view(-1), self._maxima.new_tensor(list(self._has.values()))])
        dist.all_reduce(known, op=dist.ReduceOp.MAX)
        sums, known = self._sums.cpu(), known.cpu()
        num_maxima = self._maxima.numel()
        self._has = dict(zip(self._has, known[num_maxima:].bool().tolist(), strict=True))
        maxima = known[:num_maxima].view_as(self._maxima)
        by_environment = slice(0, len(self._environments))
        metrics = self._of_step(_Row(sums[by_environment].sum(dim=0), maxima[by_environment].amax(dim=0)))
        for position, name in enumerate((*self._environments, *AGE_NAMES)):
            row = _Row(sums[position], maxima[position])
            if position >= len(self._environments):
                metrics |= {f"staleness/{name}/{key}": value for key, value in self._of_row(row, on_policy=False)}
            elif len(self._environments) > 2:
                metrics |= {f"environment/{name}/{key}": value for key, value in self._of_row(row, on_policy=True)}
        return metrics

    def _of_step(self, row: _Row) -> dict[str, float]:
        metrics = {"tokens/trained": row.total["tokens"], "loss/policy": row.total["policy_loss"]}
        if self._has["penalty"]:
            metrics["loss/penalty"] = row.total["penalty"]
        if not row.total["tokens"]:
            return metrics
        metrics |= {
            "entropy": row.mean("entropy"),
            "kl_divergence_inference": row.mean("kl"),
            "staleness/token_age_mean": row.mean("age"),
            "staleness/token_age_max": row.age_max,
            "advantage/token_abs_mean": row.mean("advantage_abs"),
            "mismatch/on_policy_share": row.mean("on_policy_tokens"),
        }
        metrics |= {f"mismatch/{name}": value for name, value in row.mismatch(on_policy=True)}
        metrics |= dict(self._of_terms(row, "/"))
        if self._has["mask"]:
            metrics["masked/sequence_ratio/token_share"] = row.mean("masked_tokens")
            metrics["masked/sequence_ratio/sample_share"] = row.mean("masked_samples", of="samples")
        return metrics

    def _of_row(self, row: _Row, *, on_policy: bool) -> Iterator[tuple[str, float]]:
        """Yields metrics of one environment or age. Yields nothing without tokens."""
        if not row.total["tokens"]:
            return
        yield "tokens", row.total["tokens"]
        yield "entropy", row.mean("entropy")
        yield "kl_divergence_inference", row.mean("kl")
        yield from row.mismatch(on_policy=on_policy)
        yield from self._of_terms(row, "_")
        if self._has["mask"]:
            yield "masked_token_share", row.mean("masked_tokens")

    def _of_terms(self, row: _Row, separator: str) -> Iterator[tuple[str, float]]:
        if self._has["clip"]:
            yield f"clip{separator}low_share", row.mean("clip_low")
            yield f"clip{separator}high_share", row.mean("clip_high")
        if self._has["weight"]:
            yield f"tis{separator}weight_mean", row.mean("tis_weight")
            yield f"tis{separator}truncated_share", row.mean("tis_outside")


class _Row:
    """The reduced sums of one slice of the step."""

    def __init__(self, sums: torch.Tensor, maxima: torch.Tensor) -> None:
        values = sums.tolist()
        self.total = dict(zip(_SUMS, values, strict=False))
        self._histogram = values[len(_SUMS) :]
        self.difference_max, self.age_max = maxima.tolist()

    def mean(self, name: str, of: str = "tokens") -> float:
        return self.total[name] / self.total[of]

    def mismatch(self, *, on_policy: bool) -> Iterator[tuple[str, float]]:
        """Yields the differences between trainer and engine. Yields nothing without counted tokens."""
        prefix, count = ("on_policy_", self.total["on_policy_tokens"]) if on_policy else ("", self.total["tokens"])
        if not count:
            return
        yield "logprob_difference_mean", self.total[f"{prefix}difference"] / count
        yield "logprob_difference_p95", percentile(self._histogram, 0.95)
        yield "logprob_difference_max", self.difference_max
        yield "ratio_outside_share", self.total[f"{prefix}outside"] / count


def percentile(histogram: list[float], share: float) -> float:
    """Returns the quantile `share` of |logprob differences|, as the upper edge of a bin."""
    low, high = HISTOGRAM_DECADES
    counts = list(accumulate(histogram))
    index = bisect_left(counts, share * counts[-1])
    return float(10 ** (low + (index + 1) * (high - low) / HISTOGRAM_BINS))


def timing_metrics(spans: list[Span], num_micro_batches: int) -> dict[str, float]:
    """Computes `timing_<operation>_total` and `timing_<operation>_microbatch_mean` of one rank, in seconds."""
    totals = dict.fromkeys((*OPERATIONS, *STEP_OPERATIONS), 0.0)
    for span in spans:
        if span.name in totals or span.name == REFERENCE:
            totals[span.name] = totals.get(span.name, 0.0) + span.end - span.start
    metrics = {f"timing_{operation}_total": seconds for operation, seconds in totals.items()}
    for operation in OPERATIONS:
        metrics[f"timing_{operation}_microbatch_mean"] = totals[operation] / max(num_micro_batches, 1)
    return metrics


def reduce_timing(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """Returns the slowest rank's times, and means of each `<operation>_total`."""
    totals = sorted(name for name in values if name.endswith("_total"))
    sums = torch.tensor([values[name] for name in totals], dtype=torch.float64, device=device)
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
    names = [name.removesuffix("_total") + "_rank_mean" for name in totals]
    means = (sums / dist.get_world_size()).tolist()
    return reduce_max(values, device) | dict(zip(names, means, strict=True))


def reduce_max(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """Returns each value's maximum over all ranks, because ranks wait for the slowest."""
    names = sorted(values)
    stacked = torch.tensor([values[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(stacked, op=dist.ReduceOp.MAX)
    return dict(zip(names, stacked.tolist(), strict=True))
