"""Statistics of eval results: pass@k, pass^k, and bootstrap confidence intervals. Pure functions.

The unit of every interval is the item. Several completions of one item are averaged first, because they are not
independent; only items are resampled.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from telescope.errors import EnvironmentFailure
from telescope.utils.text import did_you_mean

RESAMPLES = 2_000
"""Bootstrap resamples of an interval: its ends then vary by a few percent of its width."""
CONFIDENCE = 0.95
PASSED = 1.0 - 1e-9
"""A sample passes, for pass@k and pass^k, when its metric is at least this: 1, but for rounding (0.7 + 0.2 + 0.1)."""
CHUNK_VALUES = 2**20
"""Values that are resampled at a time, which bounds the memory to some MB."""


@dataclass(frozen=True)
class Estimate:
    """A mean over items, and the ends of its confidence interval."""

    mean: float
    low: float
    high: float
    num_items: int


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Returns the unbiased probability that at least one of `k` samples is correct, 1 <= k <= `num_samples`.

    It is 1 - C(n - c, k) / C(n, k). Chen et al. 2021 (https://arxiv.org/abs/2107.03374), eq. 1. The binomials are exact
    integers, so the result is rounded once.
    """
    subsets = math.comb(num_samples, k)
    return (subsets - math.comb(num_samples - num_correct, k)) / subsets


def pass_pow_k(num_samples: int, num_correct: int, k: int) -> float:
    """Returns the unbiased probability that all of `k` samples are correct, 1 <= k <= `num_samples`.

    It is pass^k: C(c, k) / C(n, k). Yao et al. 2024 (https://arxiv.org/abs/2406.12045), section 4.
    """
    return math.comb(num_correct, k) / math.comb(num_samples, k)


def num_completions(pass_k: Mapping[str, Any]) -> int:
    """Returns the completions per item that `pass_k` needs: the largest k, or 1."""
    return max((k for spec in pass_k.values() for k in spec["k"]), default=1)


def accuracy_metric(metrics: Collection[str]) -> str:
    """Returns the name of the accuracy metric: `correct` if there is one, else `reward`."""
    return "correct" if "correct" in metrics else "reward"


def metric_label(metric: str | None) -> str:
    """Returns what the mean of an eval's metric is called: `accuracy` for `correct`, else the metric's name."""
    return "accuracy" if metric in (None, "correct") else metric


def count_failed_as_wrong(
    items: Sequence[Sequence[Mapping[str, float]]], pass_k: Mapping[str, Any]
) -> list[list[Mapping[str, float]]]:
    """Returns the metrics of every completion, with the worst value for each missing score.

    A failed completion has no metrics: an empty mapping. Scores are `correct`, `reward` and the metrics in `pass_k`. A
    missing score becomes 0, or the lowest of all completions if that is below 0, so that no failure raises a mean.
    Other metrics (lengths, times) stay missing: their means are over the completions that have them.
    """
    every = [metrics for completions in items for metrics in completions]
    scores = {"correct", "reward", *(name for spec in pass_k.values() for name in spec["metrics"])}
    lowest = {name: min([0.0, *(metrics[name] for metrics in every if name in metrics)]) for name in scores}
    worst = {name: value for name, value in lowest.items() if any(name in metrics for metrics in every)}
    return [[{**worst, **metrics} for metrics in completions] for completions in items]


def metrics_over_items(items: Sequence[Sequence[Mapping[str, float]]], pass_k: Mapping[str, Any]) -> dict[str, float]:
    """Returns the means over items of each metric and of `pass_k`.

    Keys of the latter are `pass@8/correct` and `pass^8/correct`. `items` has the metrics of each completion of each
    item, see `count_failed_as_wrong`. An item with fewer than k completions is left out of pass@k and pass^k. Raises
    EnvironmentFailure when no completion has a metric that `pass_k` names.
    """
    columns: dict[str, list[list[float]]] = defaultdict(list)
    for completions in items:
        for name in dict.fromkeys(name for metrics in completions for name in metrics):
            columns[name].append([metrics[name] for metrics in completions if name in metrics])
    means = {name: float(np.mean([np.mean(values) for values in column])) for name, column in columns.items()}
    passes = dict(means)
    for key, sign, estimator in (("at_k", "@", pass_at_k), ("pow_k", "^", pass_pow_k)):
        spec = pass_k.get(key, {"metrics": [], "k": []})
        for name in spec["metrics"]:
            if name not in means:
                raise EnvironmentFailure(
                    f"pass_k.{key} names the metric {name!r}, which no sample has.{did_you_mean(name, sorted(means))} "
                    f"The metrics are: {', '.join(sorted(means))}"
                )
            for k in spec["k"]:
                counts = [(len(v), sum(x >= PASSED for x in v)) for v in columns[name] if len(v) >= k]
                if counts:
                    passes[f"pass{sign}{k}/{name}"] = float(np.mean([estimator(n, c, k) for n, c in counts]))
    return passes


def estimate_mean(values: Sequence[float]) -> Estimate:
    """Returns the mean of one value per item, with its percentile bootstrap interval.

    The same values give the same interval. Raises ValueError for a value that is not finite.
    """
    items = np.asarray(values, dtype=np.float64)
    if not np.isfinite(items).all():
        raise ValueError(f"a confidence interval needs finite values, and one is {items[~np.isfinite(items)][0]}")
    rng = np.random.default_rng(0)
    rows = max(1, CHUNK_VALUES // items.size)
    means = [
        items[rng.integers(items.size, size=(min(rows, RESAMPLES - start), items.size))].mean(axis=1)
        for start in range(0, RESAMPLES, rows)
    ]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return Estimate(float(items.mean()), float(low), float(high), items.size)


def estimate_difference(values: Mapping[str, float], baseline: Mapping[str, float]) -> Estimate:
    """Returns the mean of `values` minus `baseline`, with its paired bootstrap interval.

    Keys are item identities (`sample_uid`). Only items that both sides have count; there must be one.
    """
    shared = sorted(values.keys() & baseline.keys())
    return estimate_mean([values[uid] - baseline[uid] for uid in shared])
