"""Computes metrics of a training step from its rollouts, with pure functions on arrays.

Names without `/` are in the section General, `a/b` is section a, metric b, and `a/b/c` is section a, group b, metric c.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from telescope.orchestrator.groups import Group
from telescope.orchestrator.step_stats import Numbers, discarded_numbers, mean_gini
from telescope.rollout.trajectory import Trajectory

ALL_REASONS = "all"  # name of the counts over all reasons; each group counts once

ALWAYS_COUNTED = (ALL_REASONS, "max_async", "zero_advantage", "zero_advantage_all_zero", "zero_advantage_all_positive")
"""Discard reasons that are reported at every step, also with a count of 0."""


def _spread(prefix: str, values: Iterable[float], separator: str = "/") -> dict[str, float]:
    """Returns mean, standard deviation (ddof 1), minimum and maximum. Empty for no values."""
    x = np.asarray(list(values), dtype=np.float64)
    if len(x) == 0:
        return {}
    std = float(x.std(ddof=1)) if len(x) > 1 else 0.0
    values_by_name = {"mean": float(x.mean()), "std": std, "min": float(x.min()), "max": float(x.max())}
    return {f"{prefix}{separator}{name}": value for name, value in values_by_name.items()}


def batch_metrics(groups: Sequence[Group], advantages: Iterable[float], version: int) -> dict[str, float]:
    """Returns metrics of a batch's groups. `version` is the policy version from which the step starts."""
    usable = [group.usable_samples for group in groups]
    samples = [sample for of_group in usable for sample in of_group]
    totals = [sample.totals for sample in samples]
    lengths = [[sample.totals.num_completion_tokens for sample in of_group] for of_group in usable]
    group_N = np.repeat(np.arange(len(groups)), [len(row) for row in lengths])
    metrics = {
        **_spread("reward/total", (s.total_reward for s in samples)),
        **_spread("advantage/all", advantages),
        **_spread("rollouts/tokens_prompt", (t.num_prompt_tokens for t in totals)),
        **_spread("rollouts/tokens_completion", (t.num_completion_tokens for t in totals)),
        **_spread("rollouts/tokens_environment", (t.num_environment_tokens for t in totals)),
        **_spread("rollouts/tokens_total", (t.num_tokens for t in totals)),
        **_spread("rollouts/compression_ratio", (s.compression_ratio for s in samples if s.compression_ratio > 0)),
        **_spread("rollouts/turns", (t.num_turns for t in totals)),
        **_spread("staleness/steps", (version - t.version_range[0] for t in totals if t.version_range[0] >= 0)),
        "kept/groups": float(len(groups)),
        "kept/samples": float(len(samples)),
        "kept/tokens": float(sum(map(sum, lengths))),
        "reward/gini_mean": mean_gini(np.concatenate([group.rewards_n for group in groups]), group_N),
        "stop_reason_length_pct": 100.0 * float(np.mean([s.hit_length_limit for s in samples])),
        "group_length_gini_mean": mean_gini(np.concatenate(lengths), group_N),
        "group_length_max_median_ratio_mean": float(
            np.mean([max(row) / max(float(np.median(row)), 1.0) for row in lengths])
        ),
    }
    divergences = sum((Counter(t.divergences) for t in totals if t.divergences), Counter[str]())
    metrics.update({f"rollouts/divergences/{name}": float(count) for name, count in sorted(divergences.items())})
    by_name: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        assert sample.reward is not None
        for name, value in sample.reward.sample_metrics.items():
            by_name[f"sample_metrics/{sample.environment}/{name}"].append(value)
    metrics.update({name: float(np.mean(values)) for name, values in by_name.items()})
    if any(s.penalty for s in samples):
        metrics["reward/overlong_penalty/mean"] = float(np.mean([s.penalty for s in samples]))
        metrics["reward/overlong_penalty/sample_share"] = float(np.mean([s.penalty > 0 for s in samples]))
    if len({group.environment for group in groups}) > 1:
        for environment in sorted({group.environment for group in groups}):
            own = [s.total_reward for s in samples if s.environment == environment]
            metrics[f"reward/{environment}/mean"] = float(np.mean(own))
    return metrics


class DiscardCounts:
    """Counts of untrained groups, samples and tokens since the last step.

    Dropping is biased, so lengths are counted for everything that is dropped. Every sample is exactly one of: kept
    (with its step), discarded with its group, masked, cancelled. Tokens from before an engine failure or a lost
    conversation count as `retried` or `lost`. So all tokens that the driver has received are kept, discarded, masked,
    cancelled, retried, lost, or part of unfinished samples.

    `returned` overlaps with these. It counts samples of groups whose prompt is requeued, which also count as discarded
    (`max_async`), masked or cancelled.
    """

    def __init__(self) -> None:
        self._groups: Counter[str] = Counter()
        self._samples: dict[str, list[tuple[str, Numbers]]] = defaultdict(list)
        """For each reason, the environment and the `discarded_numbers` of each sample."""
        self._lengths: dict[str, list[int]] = defaultdict(list)
        """For each section of metrics, the tokens of each masked, cancelled, returned, retried and lost sample."""
        self._num_unseen = 0
        self._num_requeued_groups = 0

    def discarded(self, reason: str, kind: str | None, samples: Sequence[Trajectory]) -> None:
        """Counts one discarded group; `kind` refines the reason (all_zero, all_positive, all_negative).

        Only its usable samples count here. Masked and cancelled samples are counted separately.
        """
        numbers = [(sample.environment, discarded_numbers(sample)) for sample in samples if sample.is_usable]
        kinds = [f"{reason}_{kind}"] if kind else []
        for key in (ALL_REASONS, reason, *kinds):
            self._groups[key] += 1
            self._samples[key].extend(numbers)

    def masked(self, sample: Trajectory) -> None:
        """Counts one masked sample by its failure kind or its filter."""
        assert sample.mask_reason is not None
        self._lengths[f"masked/{sample.mask_reason}"].append(sample.totals.num_completion_tokens)

    def cancelled(self, sample: Trajectory, *, requeued: bool) -> None:
        """Counts one aborted sample and its tokens so far. `requeued` states whether its prompt is requeued."""
        for section in ("cancelled", "returned") if requeued else ("cancelled",):
            self._lengths[section].append(sample.totals.num_completion_tokens)

    def requeued(self, samples: Sequence[Trajectory]) -> None:
        """Counts one group whose prompt is requeued, with its finished samples."""
        self._num_requeued_groups += 1
        self._lengths["returned"].extend(sample.totals.num_completion_tokens for sample in samples)

    def count_retries(self, sample: Trajectory) -> None:
        """Counts the failed requests and lost conversations of one sample."""
        seen = [length for length in sample.failed_requests if length is not None]
        self._lengths["retried"].extend(seen)
        self._num_unseen += len(sample.failed_requests) - len(seen)
        self._lengths["lost"].extend(sample.lost_conversations)

    def numbers(self) -> list[tuple[str, Numbers]]:
        """Returns the environment and the `discarded_numbers` of each discarded sample."""
        return list(self._samples[ALL_REASONS])

    def take(self, num_kept_groups: int) -> dict[str, float]:
        """Returns the counts as metrics and resets them. Percentages are of all kept and discarded groups."""
        metrics: dict[str, float] = {
            "returned/groups": float(self._num_requeued_groups),
            "retried/unseen": float(self._num_unseen),
        }
        total = num_kept_groups + self._groups[ALL_REASONS]
        for reason in sorted({*ALWAYS_COUNTED, *self._groups}):
            section = f"discarded/{reason}"
            of_samples = [numbers for _, numbers in self._samples[reason]]
            metrics[f"{section}/groups"] = float(self._groups[reason])
            metrics[f"{section}/pct"] = 100.0 * self._groups[reason] / total if total else 0.0
            metrics.update(_counted(section, [numbers["discarded/completion_tokens"] for numbers in of_samples]))
            for name in ("prompt_tokens", "total_tokens"):
                metrics.update(_spread(f"{section}/{name}", (n[f"discarded/{name}"] for n in of_samples), "_"))
            if of_samples:
                metrics[f"{section}/reward_mean"] = float(np.mean([n["discarded/reward"] for n in of_samples]))
        for section in sorted({"cancelled", "returned", "retried", "lost", *self._lengths}):
            metrics.update(_counted(section, self._lengths[section]))
        for counts in (self._groups, self._samples, self._lengths):
            counts.clear()
        self._num_unseen = self._num_requeued_groups = 0
        return metrics


def _counted(section: str, lengths: Sequence[float]) -> dict[str, float]:
    """Returns counts of samples and tokens, and the distribution of lengths."""
    return {
        f"{section}/samples": float(len(lengths)),
        f"{section}/tokens": float(sum(lengths)),
        **_spread(f"{section}/tokens", lengths, "_"),
    }
