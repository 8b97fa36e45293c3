"""Alerts from the metrics of training steps: what looks wrong, with its numbers and what to try.

Pure functions on the metrics of the last steps. A rule that fires is silent for `SILENT_STEPS`, unless it has been
false in between, so that a lasting problem is not an alert per step. The bounds are wide: an alert that is often wrong
is not read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median

Metrics = dict[str, float]

WINDOW = 20
"""Steps before the newest one, with which it is compared."""

LASTING = 5
"""Steps over which a share has to be high: a single step says little with few groups."""

SILENT_STEPS = 50

SPIKE = 10.0
"""A value above this many times the median of the window is a spike."""


class StepAlerts:
    """Watches the steps of one run."""

    def __init__(self) -> None:
        self._history: deque[Metrics] = deque(maxlen=WINDOW + 1)
        self._start: list[Metrics] = []
        self._fired_at: dict[str, int] = {}

    def after(self, step: int, metrics: Metrics) -> list[tuple[str, str]]:
        """Returns kind and message of each alert after a step."""
        self._history.append(metrics)
        if len(self._start) < LASTING:
            self._start.append(metrics)
        alerts = []
        for kind, rule in RULES.items():
            message = rule(self._start, list(self._history))
            if message is None:
                self._fired_at.pop(kind, None)
            elif step - self._fired_at.get(kind, -SILENT_STEPS) >= SILENT_STEPS:
                self._fired_at[kind] = step
                alerts.append((kind, message))
        return alerts


def _not_finite(start: Sequence[Metrics], history: Sequence[Metrics]) -> str | None:
    names = sorted(name for name, value in history[-1].items() if not math.isfinite(value))
    if not names:
        return None
    return (
        f"{', '.join(names[:5])} {'is' if len(names) == 1 else 'are'} not a finite number. Lower learning_rate, and "
        "set mixed_precision_dtype to float32 to see whether precision is the cause."
    )


def _entropy(start: Sequence[Metrics], history: Sequence[Metrics]) -> str | None:
    before, now = _mean(start, "entropy"), _mean(history[-LASTING:], "entropy")
    if before is None or now is None or len(history) <= LASTING or now > 0.1 * before:
        return None
    return (
        f"The entropy fell from {before:.3g} to {now:.3g} nats: the answers to a prompt become equal. Lower "
        "learning_rate, raise temperature, or widen the upper clip bound."
    )


def _reward(start: Sequence[Metrics], history: Sequence[Metrics]) -> str | None:
    name = "reward/total/mean"
    best, now = _mean(history[:-LASTING], name), _mean(history[-LASTING:], name)
    if best is None or now is None or len(history) < WINDOW or best <= 0 or now > 0.5 * best:
        return None
    return (
        f"The mean reward of the last {LASTING} steps is {now:.3g}, after {best:.3g} in the {len(history) - LASTING} "
        "steps before. Look at the newest answers; continue from an earlier checkpoint with a lower learning_rate."
    )


def _spike(name: str, what: str, advice: str, least: float) -> Callable[..., str | None]:
    def rule(start: Sequence[Metrics], history: Sequence[Metrics]) -> str | None:
        before = [metrics[name] for metrics in history[:-1] if math.isfinite(metrics.get(name, math.nan))]
        now = history[-1].get(name, math.nan)
        if len(before) < LASTING or not now > max(SPIKE * median(before), least):
            return None
        return f"{what} is {now:.3g}; the median of the last {len(before)} steps is {median(before):.3g}. {advice}"

    return rule


def _share(name: str, bound: float, what: str, advice: str) -> Callable[..., str | None]:
    """A rule for a percentage that stays above `bound`."""

    def rule(start: Sequence[Metrics], history: Sequence[Metrics]) -> str | None:
        last = history[-LASTING:]
        if len(last) < LASTING or not all(metrics.get(name, 0.0) > bound for metrics in last):
            return None
        return f"{fmean(metrics[name] for metrics in last):.0f} % of {what} in the last {LASTING} steps. {advice}"

    return rule


def _waiting(start: Sequence[Metrics], history: Sequence[Metrics]) -> str | None:
    last = history[-LASTING:]
    total = sum(metrics.get("timing_step_total", 0.0) for metrics in last)
    waited = sum(metrics.get("timing_waiting_for_data", 0.0) for metrics in last)
    if len(history) <= LASTING or total <= 0 or waited / total < 0.5:
        return None
    return (
        f"The trainer waited for answers {100 * waited / total:.0f} % of the last {LASTING} steps. Add inference "
        "servers, raise max_async_rollout, or give the trainer fewer GPUs."
    )


def _mean(steps: Sequence[Metrics], name: str) -> float | None:
    values = [metrics[name] for metrics in steps if math.isfinite(metrics.get(name, math.nan))]
    return fmean(values) if values else None


RULES: dict[str, Callable[[Sequence[Metrics], Sequence[Metrics]], str | None]] = {
    "not_finite": _not_finite,
    "entropy": _entropy,
    "reward": _reward,
    "kl": _spike(
        "kl_divergence_inference", "The divergence between engine and trainer",
        "Look at mismatch and staleness; use_tis bounds the effect on the loss.", least=0.01,
    ),
    "grad_norm": _spike("grad_norm", "The gradient norm", "Lower learning_rate or grad_clip if it repeats.", least=0.0),
    "truncation": _share(
        "stop_reason_length_pct", 30.0, "the answers were cut off", "Raise max_tokens, or max_model_len and seq_len."
    ),
    "zero_advantage": _share(
        "discarded/zero_advantage/pct", 70.0, "the groups had equal rewards and were discarded",
        "The task is too easy or too hard: change the data, or raise group_size.",
    ),
    "stale": _share(
        "discarded/max_async/pct", 20.0, "the groups became older than max_off_policy_steps",
        "Lower max_async_rollout, or raise max_off_policy_steps.",
    ),
    "waiting": _waiting,
}  # fmt: skip
"""Kind of an alert to its rule: metrics of the first steps and of the last ones to a message or None."""
