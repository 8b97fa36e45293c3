"""Returns distributions over steps and evals as plain data for the API."""

from typing import Any

from telescope.dashboard.api import Integer
from telescope.dashboard.registry import config_of
from telescope.dashboard.samples import NUMBERS, Filters, leave_out_common_prefix
from telescope.dashboard.store import KEY, NotFoundError, RunStore, key_of
from telescope.dashboard.tables import Row
from telescope.errors import UserError
from telescope.record.query import sql_text
from telescope.record.reader import eval_names

STATISTICS = ("n", "mean", "std", "min", "max", "p5", "p25", "p50", "p75", "p95", "gini")
HISTOGRAM = ("low", "high", "histogram")
"""Lower and upper end of a step's bins, and the number of samples in each bin."""

WITHOUT_GINI = ("advantage", "age", "prompt_tokens")
"""Numbers without a Gini coefficient, as in `step_stats`."""

NUM_BINS = 20
"""Bins of a histogram, equal to the number in `step_stats`."""

TEXT = 4000
"""Characters of an eval's prompt and completion in a list."""


def distribution(
    store: RunStore, metric: str = "reward", environment: str = "", tag: str = "", histogram: bool = False
) -> dict[str, list[Any]]:
    """Returns the distribution of a number, with one row per step.

    An empty `environment` means all samples; `tag` (`name=value`) selects samples with that tag. For tags, and for
    numbers or steps without recorded statistics, the rows are computed from the samples. Raises `UserError` for an
    unknown metric or a malformed tag. The columns of the histogram are empty unless `histogram` is true.
    """
    _, tags = Filters(tag=[tag] if tag else []).conditions()
    chosen = " AND ".join(tags.values()) or "true"
    visible = store.visible()
    store.refresh("step_stats")
    names = ", ".join((*STATISTICS, *(HISTOGRAM if histogram else ())))
    given = {"metric": metric, "environment": environment}
    recorded = (
        f"SELECT step, {names} FROM step_stats "
        f"WHERE {visible} AND metric = $metric AND coalesce(environment, '') = $environment AND {not tag}"
    )
    computed = _computed(metric, f"{visible} AND {chosen}", histogram)
    found = store.columns(f"{recorded} ORDER BY step", given)
    without = f"SELECT 1 FROM steps ANTI JOIN step_stats USING (attempt, step) WHERE {visible} LIMIT 1"
    if not found.num_rows or store.fetch(without):
        store.refresh("samples")
        found = store.columns(
            f"WITH recorded AS ({recorded}), computed AS ({computed}) SELECT step, {names} FROM recorded UNION ALL "
            f"SELECT step, {names} FROM computed ANTI JOIN recorded USING (step) ORDER BY step",
            given,
        )
    return {name: [] for name in HISTOGRAM} | {name: found[name].to_pylist() for name in found.column_names}


def _computed(metric: str, where: str, histogram: bool) -> str:
    """Returns a query that computes the statistics of `step_stats` from the samples."""
    name = metric.removeprefix("discarded/")
    if name.startswith("sample_metrics/"):
        value = f"metrics[{sql_text(name.removeprefix('sample_metrics/'))}]"
    elif name in NUMBERS:
        value = name
    else:
        known = ", ".join(NUMBERS)
        raise UserError(f"metric={metric!r} has no distribution. Use {known}, or sample_metrics/NAME.")
    status = "kept" if name == metric else "discarded"
    values = (
        f"SELECT step, attempt, group_id, {value}::DOUBLE AS x FROM samples WHERE {where} AND status = '{status}' "
        "AND ($environment = '' OR environment = $environment) AND isfinite(x)"
    )
    quantiles = ", ".join(f"quantile_cont(x, {p / 100}) AS p{p}" for p in (5, 25, 50, 75, 95))
    moments = "count(x) AS n, avg(x) AS mean, coalesce(stddev_samp(x), 0) AS std, min(x) AS min, max(x) AS max"
    # If all values are equal, the bins are widened.
    pad = "CASE WHEN max(x) > min(x) THEN 0 ELSE greatest(0.5, 1e-6 * abs(min(x))) END"
    stats = f"SELECT step, {moments}, {quantiles}, min(x) - {pad} AS low, max(x) + {pad} AS high FROM v GROUP BY step"
    with_gini = name == metric and name not in WITHOUT_GINI
    parts = {
        "v": values,
        "stats": stats,
        "ginis": _GINI if with_gini else "SELECT step, NULL::DOUBLE AS gini FROM stats",
    }
    joined = "stats JOIN ginis USING (step)"
    if histogram:
        parts["bins"] = _BINS
        joined += " JOIN bins USING (step)"
    return f"WITH {', '.join(f'{name} AS ({sql})' for name, sql in parts.items())} FROM {joined}"


_GROUP = "PARTITION BY step, attempt, group_id"
_GINI_OF_GROUP = (
    "CASE WHEN sum(x) = 0 THEN 0 ELSE 2 * sum(place * x) / (count(x) * sum(x)) - (count(x) + 1) / count(x) END"
)
_GINI = (
    f"SELECT step, avg(gini) AS gini FROM (SELECT step, {_GINI_OF_GROUP} AS gini FROM "
    f"(SELECT step, attempt, group_id, x - least(0, min(x) OVER ({_GROUP})) AS x, "
    f"row_number() OVER ({_GROUP} ORDER BY x) AS place FROM v) GROUP BY step, attempt, group_id) GROUP BY step"
)
"""Mean Gini coefficient of a step's groups. If a group has a negative value, its values are shifted."""

_BINS = (
    f"SELECT step, list_transform(range({NUM_BINS}), lambda bin: coalesce(counts[bin], 0)::INTEGER) AS histogram "
    f"FROM (SELECT step, histogram(least({NUM_BINS - 1}, floor({NUM_BINS} * (x - low) / (high - low)))::BIGINT) "
    "AS counts FROM v JOIN stats USING (step) GROUP BY step)"
)


KNOWN = (
    "coalesce(name, '') AS name, coalesce(source, 'live') AS source, coalesce(status, 'finished') AS status, "
    "coalesce(version, step + 1) AS version, coalesce(num_items, 0) AS num_items, "
    "coalesce(num_completions, 1) AS num_completions, coalesce(num_scored, 0) AS num_scored"
)
"""Columns of `evals` that incomplete records lack."""


def evals(store: RunStore) -> list[Row]:
    """Returns the evals of a run, ordered by step."""
    visible = store.visible()
    store.refresh("evals")
    rows = store.rows(f"SELECT * REPLACE ({KNOWN}) FROM evals WHERE {visible} ORDER BY step, number, attempt")
    named = eval_names(config_of(store.run)[0], rows)
    return [
        {**row, "name": named(row["name"], row["number"]), "eval_name": row["name"], "metrics": row["metrics"] or {}}
        for row in rows
    ]


def eval_samples(store: RunStore, attempt: Integer, eval_id: str) -> list[Row]:
    """Returns the answers of one eval by item. `score` is the eval's metric, or None for a failed answer.

    A retried answer replaces the failed answer. Omits answers without a row in `samples`. Raises `NotFoundError`.
    """
    visible = store.visible()
    store.refresh("evals", "eval_samples", "samples")
    found = store.rows(f"SELECT * FROM evals WHERE {visible} AND attempt = ? AND eval_id = ?", [attempt, eval_id])
    if not found:
        raise NotFoundError(f"Attempt {attempt} has no eval {eval_id!r}.")
    metric = found[0]["metric"] or "reward"
    rows = store.rows(
        "SELECT e.attempt, e.sample_id, e.item, e.completion, s.prompt_key, s.environment, s.step, s.tags, "
        "s.stop_reason, s.completion_tokens, CASE WHEN s.status = 'masked' THEN NULL WHEN ? = 'reward' THEN s.reward "
        "ELSE s.metrics[?] END AS score FROM eval_samples e JOIN samples s USING (attempt, sample_id) "
        "WHERE e.attempt = ? AND e.eval_id = ? "
        "QUALIFY row_number() OVER (PARTITION BY e.item, e.completion ORDER BY score IS NULL) = 1 "
        "ORDER BY e.item, e.completion",
        [metric, metric, attempt, eval_id],
    )
    texts = store.beginnings(rows, TEXT)
    leave_out_common_prefix(texts, rows)
    samples = store.of_samples("samples", map(key_of, rows), columns=f"{KEY}, golden")
    for row in rows:
        text, (sample, *_) = texts[key_of(row)], samples[key_of(row)] or [{}]
        row.update({"prompt": text["prompt"], "answer": text["answer"] or "", "tags": row["tags"] or {}})
        row["golden"] = sample.get("golden") or {}
        del row["prompt_key"], row["environment"]
    return rows
