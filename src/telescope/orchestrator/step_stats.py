"""Computes distributions over a step's samples, which are rows of `step_stats`, with pure functions on arrays."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from telescope.orchestrator.groups import Group
from telescope.rollout.trajectory import Trajectory

NUM_BINS = 20  # bins of a histogram, about one per pixel row of a small chart, with 160 bytes per row

PERCENTILES = (5, 25, 50, 75, 95)
_SHARES = np.array(PERCENTILES) / 100
_PERCENTILE_NAMES = tuple(f"p{percentile}" for percentile in PERCENTILES)
_BIN_SHARES = np.arange(NUM_BINS + 1) / NUM_BINS

WITHOUT_GINI = frozenset({"advantage", "age", "prompt_tokens"})
"""Numbers without a Gini coefficient, because they are centered on 0 or equal within a group."""


Numbers = dict[str, float]


def step_stats_rows(
    groups: Sequence[Group], advantages: Sequence[float], discarded: Sequence[tuple[str, Numbers]], *, step: int
) -> Iterator[list[dict[str, Any]]]:
    """Yields a list with the rows of all samples, then a list for each environment, so that the caller can pause.

    `advantages` belong to the usable samples of `groups`, in order. `discarded` has the environment and the
    `discarded_numbers` of each discarded sample. `step` is also the version from which the step started.
    """
    usable = [group.usable_samples for group in groups]
    samples = [sample for of_group in usable for sample in of_group]
    group_N = np.repeat(np.arange(len(groups)), [len(of_group) for of_group in usable]).tolist()
    numbers = [_numbers(s, a, step) for s, a in zip(samples, advantages, strict=True)]
    environments = sorted({sample.environment for sample in samples} | {environment for environment, _ in discarded})
    # With one environment, its numbers are those of all samples.
    for environment in ("", *environments) if len(environments) > 1 else ("",):
        chosen = [i for i, sample in enumerate(samples) if environment in ("", sample.environment)]
        by_metric: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for i in chosen:
            for name, value in numbers[i].items():
                by_metric[name].append((value, group_N[i]))
        for of, lengths in discarded:
            if environment in ("", of):
                for name, value in lengths.items():
                    by_metric[name].append((value, 0))
        rows = []
        for name, pairs in by_metric.items():
            values, of_group = (np.asarray(column) for column in zip(*pairs, strict=True))
            has_gini = name not in WITHOUT_GINI and not name.startswith("discarded/")
            stats = distribution(values, of_group if has_gini else None)
            if stats:
                rows.append({"step": step, "environment": environment, "metric": name, **stats})
        yield rows
    if len(environments) == 1:
        yield [{**row, "environment": environments[0]} for row in rows]


def distribution(values: np.ndarray, groups: np.ndarray | None = None) -> dict[str, Any]:
    """Returns statistics of the finite values, empty if there are none. `groups` has the group of each value."""
    values = np.asarray(values, dtype=np.float64)
    if not (finite := np.isfinite(values)).all():
        values, groups = values[finite], groups if groups is None else groups[finite]
    n = len(values)
    if n == 0:
        return {}
    x = np.sort(values)
    low, high = float(x[0]), float(x[-1])
    first, last, size = low, high, max(abs(low), abs(high))
    if high / 2 - low / 2 <= 1e-9 * size:  # bins narrower than rounding errors; huge values are halved against overflow
        pad = max(0.5, 1e-6 * size)
        first, last = low - pad, high + pad
    edges = first * (1 - _BIN_SHARES) + last * _BIN_SHARES
    # Sorts once and looks up percentiles and bins, because a step has hundreds of numbers.
    place = _SHARES * (n - 1)
    below = place.astype(np.intp)
    above = x[np.minimum(below + 1, n - 1)]
    part = place - below
    inside = np.searchsorted(x, edges[1:-1])
    return {
        "n": n,
        "mean": float(x.mean()),
        "std": float(x.std(ddof=1)) if n > 1 else 0.0,
        "min": low,
        "max": high,
        **dict(zip(_PERCENTILE_NAMES, (x[below] * (1 - part) + above * part).tolist(), strict=True)),
        "histogram": np.diff(inside, prepend=0, append=n).tolist(),
        "bin_edges": edges.tolist(),
        "gini": None if groups is None else mean_gini(values, groups),
    }


def mean_gini(values: np.ndarray, groups: np.ndarray) -> float:
    """Returns the mean Gini coefficient of the groups. `groups` has the group of each value.

    The coefficient of n ascending values with ranks from 1 is 2 sum(rank_i x_i) / (n sum x_i) - (n + 1) / n. If the
    smallest value of a group is negative, its values are shifted so that it is 0. If all values are zero, the
    coefficient is 0.
    """
    order = np.lexsort((values, groups))
    x, group = values[order], groups[order]
    starts = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    sizes = np.diff(np.r_[starts, len(x)])
    x = x - np.repeat(np.minimum(x[starts], 0.0), sizes)
    ranks = np.arange(len(x)) - np.repeat(starts, sizes) + 1
    totals = np.add.reduceat(x, starts)
    weighted = np.add.reduceat(ranks * x, starts)
    safe = np.where(totals == 0, 1.0, totals)
    return float(np.where(totals == 0, 0.0, 2 * weighted / (sizes * safe) - (sizes + 1) / sizes).mean())


def discarded_numbers(sample: Trajectory) -> Numbers:
    """Returns the numbers of a scored sample whose group is discarded."""
    totals = sample.totals
    return {
        "discarded/reward": sample.total_reward,
        "discarded/prompt_tokens": totals.num_prompt_tokens,
        "discarded/completion_tokens": totals.num_completion_tokens,
        "discarded/total_tokens": totals.num_tokens,
    }


def _numbers(sample: Trajectory, advantage: float, version: int) -> Numbers:
    assert sample.reward is not None
    totals = sample.totals
    oldest = totals.version_range[0]
    return {
        "reward": sample.total_reward,
        "advantage": advantage,
        "prompt_tokens": totals.num_prompt_tokens,
        "completion_tokens": totals.num_completion_tokens,
        "environment_tokens": totals.num_environment_tokens,
        "total_tokens": totals.num_tokens,
        "num_turns": totals.num_turns,
        **({"age": version - oldest} if oldest >= 0 else {}),
        **{f"sample_metrics/{name}": value for name, value in sample.reward.sample_metrics.items()},
    }
