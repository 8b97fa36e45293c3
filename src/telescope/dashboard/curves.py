"""Distributions over steps and evals: plain data for the API."""

from __future__ import annotations

from typing import Any

from telescope.dashboard.store import NotFoundError, Row, RunStore
from telescope.errors import UserError
from telescope.record.query import sql_text

STATISTICS = ("n", "mean", "std", "min", "max", "p5", "p25", "p50", "p75", "p95")

COLUMNS = (
    *("reward", "advantage", "prompt_tokens", "completion_tokens", "environment_tokens", "total_tokens"),
    *("num_turns", "age", "penalty"),
)
"""Numbers of a sample that have a column of their own."""

TEXT = 4000
"""Characters of a prompt and an answer of an eval in a list."""


def distribution(store: RunStore, metric: str, environment: str) -> dict[str, list[Any]]:
    """Returns the distribution of a number of the samples, a row per step.

    Steps without recorded statistics are computed from the samples. An empty `environment` means all samples. Raises
    `UserError` for an unknown metric.
    """
    visible = store.visible()
    store.refresh("step_stats")
    recorded = (
        f"SELECT step, {', '.join(STATISTICS)} FROM step_stats "
        f"WHERE {visible} AND metric = $metric AND coalesce(environment, '') = $environment"
    )
    names = ", ".join(STATISTICS)
    given = {"metric": metric, "environment": environment}
    ((num_recorded,),) = store.fetch(f"SELECT count(*) FROM ({recorded})", given)
    ((num_steps,),) = store.fetch(f"SELECT count(*) FROM steps WHERE {visible}")
    computed = _computed(metric, visible)
    if num_recorded < num_steps or not num_steps:
        store.refresh("samples")
    else:
        computed = f"{recorded} AND false"
    sql = (
        f"WITH recorded AS ({recorded}), computed AS ({computed}) SELECT step, {names} FROM recorded UNION ALL "
        f"SELECT step, {names} FROM computed ANTI JOIN recorded USING (step) ORDER BY step"
    )
    found = store.columns(sql, given)
    return {name: found[name].to_pylist() for name in ("step", *STATISTICS)}


def _computed(metric: str, visible: str) -> str:
    name = metric.removeprefix("discarded/")
    if name.startswith("sample_metrics/"):
        value = f"metrics[{sql_text(name.removeprefix('sample_metrics/'))}]"
    elif name in COLUMNS:
        value = name
    else:
        known = ", ".join(COLUMNS)
        raise UserError(f"metric={metric!r} has no distribution. Use {known}, or sample_metrics/NAME.")
    status = "kept" if name == metric else "discarded"
    quantiles = ", ".join(f"quantile_cont(x, {p / 100}) AS p{p}" for p in (5, 25, 50, 75, 95))
    values = (
        f"SELECT step, {value}::DOUBLE AS x FROM samples WHERE {visible} AND status = '{status}' "
        "AND ($environment = '' OR environment = $environment)"
    )
    moments = "count(x) AS n, avg(x) AS mean, coalesce(stddev_samp(x), 0) AS std, min(x) AS min, max(x) AS max"
    return f"SELECT step, {moments}, {quantiles} FROM ({values}) WHERE isfinite(x) GROUP BY step"


KNOWN = (
    "coalesce(name, '') AS name, coalesce(source, 'live') AS source, coalesce(status, 'finished') AS status, "
    "coalesce(version, step + 1) AS version, coalesce(num_items, 0) AS num_items, "
    "coalesce(num_completions, 1) AS num_completions, coalesce(num_scored, 0) AS num_scored"
)
"""Columns of `evals` that incomplete records lack."""


def evals(store: RunStore) -> list[Row]:
    """Returns the evals of a run, in the order of their steps."""
    visible = store.visible()
    store.refresh("evals")
    rows = store.rows(f"SELECT * REPLACE ({KNOWN}) FROM evals WHERE {visible} ORDER BY step, number, attempt")
    return [{**row, "metrics": row["metrics"] or {}} for row in rows]


def eval_samples(store: RunStore, attempt: int, eval_id: str) -> list[Row]:
    """Returns the answers of one eval by item. `score` is its metric. Raises `NotFoundError`."""
    visible = store.visible()
    store.refresh("evals", "eval_samples", "samples")
    found = store.rows(f"SELECT * FROM evals WHERE {visible} AND attempt = ? AND eval_id = ?", [attempt, eval_id])
    if not found:
        raise NotFoundError(f"Attempt {attempt} has no eval {eval_id!r}.")
    metric = found[0]["metric"] or "reward"
    rows = store.rows(
        "SELECT e.attempt, e.sample_id, e.item, e.completion, s.step, s.tags, s.stop_reason, s.completion_tokens, "
        "CASE WHEN s.status = 'masked' THEN NULL WHEN ? = 'reward' THEN s.reward ELSE s.metrics[?] END AS score "
        "FROM eval_samples e LEFT JOIN samples s USING (attempt, sample_id) WHERE e.attempt = ? AND e.eval_id = ? "
        "ORDER BY e.item, e.completion",
        [metric, metric, attempt, eval_id],
    )
    steps = ", ".join({str(row["step"]) for row in rows if row["step"] is not None}) or "NULL"
    where = f"attempt = {int(attempt)} AND step IN ({steps}) AND group_id < 0"
    texts = store.beginnings(where, TEXT, ", golden")
    for row in rows:
        text = texts.get((attempt, row["sample_id"]), {})
        row.update({"prompt": text.get("prompt") or "", "answer": text.get("answer") or ""})
        row.update({"golden": text.get("golden") or {}, "tags": row["tags"] or {}})
    return rows
