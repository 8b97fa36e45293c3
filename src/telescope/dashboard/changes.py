"""Compares the steps before a given step with the steps from it on. Returns plain data for the API.

A metric that is a mean over samples is decomposed over cells. A cell has the samples of one environment with the same
tags. With shares p and means m of a cell, before (0) and after (1), and the mean M of both windows' means (Kitagawa,
1955):

    change = sum over cells of (p1 - p0) ((m0 + m1) / 2 - M) + (p0 + p1) / 2 (m1 - m0)
                               mix                              within

For all other numbers, the effect is the difference of the means in standard deviations of a window.
"""

import math
from typing import Annotated, Any

import numpy as np
from fastapi import Query

from telescope.dashboard.api import Integer
from telescope.dashboard.store import RunStore, key_of
from telescope.environments.types import CONTEXT_EXHAUSTED
from telescope.health.rules import REWARD
from telescope.health.verdict import CELLS
from telescope.record.query import sql_text

COLUMNS = {
    "reward/total/mean": "reward",
    "staleness/steps/mean": "age",
    "stop_reason_length_pct": f"100 * (stop_reason IN ('length', '{CONTEXT_EXHAUSTED}'))::INTEGER",
    "rollouts/turns/mean": "num_turns",
    **{f"rollouts/tokens_{name}/mean": f"{name}_tokens" for name in ("completion", "prompt", "total", "environment")},
}
"""Step metrics that are means over trained samples, and the averaged SQL expression for a sample."""

OF_REWARD = ("reward", "status IN ('kept', 'discarded')")
"""Result of `_of_samples` for the reward, which is decomposed if the chosen metric is no mean over samples."""

COMPARED = (
    *(cell.metric.partition(" / ")[0] for cell in CELLS),
    *("reward/total/mean", "reward/gini_mean", "staleness/steps/mean", "learning_rate", "rollouts/turns/mean"),
    *("timing_step_total", "timing_weight_sync_total", "timing_weight_sync_inference_total", "timing_checkpoint"),
    *("discarded/all/pct", "retried/samples", "cancelled/samples", "mismatch/ratio_outside_share"),
)
"""Step metrics that are compared in addition to the chosen metric."""

LARGEST_EFFECT = 99.0
"""Replaces larger effects, which numbers without variance have."""

NUM_ANSWERS, NUM_EVENTS, NUM_CHARACTERS = 5, 20, 240
"""Most answers and events that are returned, and most characters of an answer."""


def changes(
    store: RunStore, step: Integer, window: Annotated[int, Query(ge=1, le=1000)] = 5, metric: str = REWARD
) -> dict[str, Any]:
    """Compares up to `window` steps before and from `step` on. Returns cells, effects, events and answers."""
    visible = store.visible()
    _, columns, metrics = store.steps()
    steps = np.array(columns["step"])
    earlier, later = (steps >= step - window) & (steps < step), (steps >= step) & (steps < step + window)
    known = {name: np.array(metrics[name]) for name in (*COMPARED, metric) if name in metrics and len(steps)}
    effects = [_effect(name, "metric", *_moments(x[earlier]), *_moments(x[later])) for name, x in known.items()]
    store.refresh("samples", "alerts")
    effects += _spans(store, columns["started_at"], columns["ended_at"], np.flatnonzero(earlier), np.flatnonzero(later))
    own = _of_samples(metric)
    value, where = own or OF_REWARD
    tags = [f"{sql_text(f'{name}=')} || tags[{sql_text(name)}]" for name, values in store.tags().items() if values]
    last = min(step + window - 1, int(steps[-1]) if len(steps) else -1)  # later rows are of an unfinished step
    near = f"step BETWEEN {step - window} AND {last}"
    samples = (
        "WITH s AS (SELECT attempt, sample_id, prompt_key, group_id, step, environment, reward, completion_tokens, "
        f"stop_reason, concat_ws(', ', {', '.join(tags) or 'NULL'}) AS cell, step >= {step} AS later, "
        f"({value})::DOUBLE AS value FROM samples WHERE {visible} AND {near} AND {where} AND isfinite(value)), "
        "c AS (SELECT environment, cell, count(*) FILTER (NOT later) AS n_before, count(*) FILTER (later) AS n_after, "
        "avg(value) FILTER (NOT later) AS mean_before, avg(value) FILTER (later) AS mean_after, "
        "avg(completion_tokens) FILTER (NOT later) AS length_before FROM s GROUP BY ALL), "
        "t AS (SELECT avg(value) FILTER (NOT later) AS m0, avg(value) FILTER (later) AS m1, "
        "greatest(stddev_samp(value), 1e-9) AS sd FROM s)"
    )
    p0, p1 = "n_before / sum(n_before) OVER ()", "n_after / sum(n_after) OVER ()"
    a0, a1 = "coalesce(mean_before, mean_after)", "coalesce(mean_after, mean_before)"
    cells = store.rows(
        f"{samples} SELECT environment, cell, n_before, n_after, mean_before, mean_after, "
        f"({p1} - {p0}) * ({a0} + {a1} - m0 - m1) / 2 AS mix, ({p0} + {p1}) / 2 * ({a1} - {a0}) AS within "
        "FROM c, t ORDER BY abs(mix + within) DESC, environment, cell"
    )
    far = "(value - coalesce(mean_before, m0)) / sd"
    far = f"sign(m1 - m0) * {far}" if own else f"abs({far})"
    order = "far DESC, abs(completion_tokens - length_before) DESC NULLS LAST, sample_id"
    answers = store.rows(
        f"{samples}, f AS (SELECT s.*, mean_before, {far} AS far, length_before "
        "FROM s JOIN c USING (environment, cell), t WHERE later) SELECT * EXCLUDE (later, far, length_before) FROM f "
        f"QUALIFY row_number() OVER (PARTITION BY attempt, group_id ORDER BY {order}) = 1 "
        f"ORDER BY {order} LIMIT {NUM_ANSWERS}"
    )
    texts = store.beginnings(answers, NUM_CHARACTERS)
    events = store.rows(
        f"SELECT attempt, step, time, level, kind, message FROM alerts WHERE {near} AND (kind <> 'eval' OR level <> "
        f"'info') ORDER BY abs(step - {step}), time LIMIT {NUM_EVENTS}"
    )
    for row in answers:
        row["answer"] = texts[key_of(row)]["answer"] or ""
        del row["prompt_key"]
    effects.sort(key=lambda one: -abs(one["effect"]))
    found = {"cells": cells, "effects": effects, "events": events, "answers": answers}
    return {"decomposed": metric if own else REWARD, **found}


def _of_samples(metric: str) -> tuple[str, str] | None:
    """Returns SQL for the sample value whose mean is the metric, and an SQL condition on the samples, or None."""
    section, _, rest = metric.partition("/")
    environment, _, name = rest.partition("/")
    of_environment = f"status = 'kept' AND environment = {sql_text(environment)}"
    if metric == REWARD:
        return OF_REWARD
    if metric in COLUMNS:
        return COLUMNS[metric], "status = 'kept'"
    if section == "reward" and name == "mean":
        return "reward", of_environment
    is_mean = section == "sample_metrics" and name and "/" not in name
    return (f"metrics[{sql_text(name)}]", of_environment) if is_mean else None


def _moments(values: Any) -> tuple[float | None, float]:
    """Returns the mean and variance of the finite values."""
    finite = values[np.isfinite(values)]
    return (float(finite.mean()), float(finite.var())) if len(finite) else (None, 0.0)


def _effect(name: str, kind: str, m0: float | None, v0: float, m1: float | None, v1: float) -> dict[str, Any]:
    change = 0.0 if m0 is None or m1 is None else m1 - m0
    spread = max(math.sqrt((v0 + v1) / 2), abs(change) / LARGEST_EFFECT)
    return {"name": name, "kind": kind, "before": m0, "after": m1, "effect": change / spread if change else 0.0}


def _spans(store: RunStore, started: list[Any], ended: list[Any], earlier: Any, later: Any) -> list[dict[str, Any]]:
    """Returns the effects of the durations of requests, rewards, weight syncs, checkpoints and evals."""
    times = [started[earlier[0]], started[later[0]], ended[later[-1]]] if len(earlier) and len(later) else [None]
    if None in times:
        return []
    low, first, last = (float(time) for time in times if time is not None)
    moments = ", ".join(
        f'avg("end" - start) FILTER ({test}) AS m{i}, coalesce(var_pop("end" - start) FILTER ({test}), 0) AS v{i}'
        for i, test in enumerate((f"start < {first!r}", f"start >= {first!r}"))
    )
    of_sandbox = "component = 'sandbox'"
    name = f"if({of_sandbox}, 'sandbox ', '') || name || coalesce(' server ' || server, '')"
    columns = f"{name} AS name, 'span' AS kind, {moments}"
    where = f"start BETWEEN {low!r} AND {last!r} AND (component <> 'trainer' OR name = 'checkpoint')"
    return [_effect(**row) for row in store.aggregate("spans", columns, f"{of_sandbox}, name, server", where)]
