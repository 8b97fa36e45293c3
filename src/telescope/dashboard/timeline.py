"""Spans, gauges and log lines of a time range: plain data for the API."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel

from telescope.dashboard.api import OptionalRow
from telescope.dashboard.store import Row, RunStore
from telescope.errors import UserError

SPAN_COLUMNS = (
    *("attempt", "component", "name", "rank", "server", "lane", "step", "micro_batch", "sample_id", "start", "end"),
)
LANE = "component, name, rank, server, lane"

TIME = "coalesce(time, 0)"
"""When a log line was written. Those of a record without times come first."""

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def spans(store: RunStore, start: float | None, end: float | None, limit: int, buckets: int) -> dict[str, Any]:
    """Returns the spans that overlap a range, as columns.

    When there are more than `limit`, those shorter than one of at most `buckets` parts of the range are merged per lane
    and kind: `count` spans, as long as all of them together, from the first start on.
    """
    store.refresh("spans")
    ((first, last),) = store.fetch('SELECT min(start), max("end") FROM spans')
    low = first if start is None else start
    high = last if end is None else end
    if first is None:
        return {"merged": False, "count": [], **{name: [] for name in SPAN_COLUMNS}}
    where = '"end" >= $low AND start <= $high'
    ranged = {"low": low, "high": high}
    ((number,),) = store.fetch(f"SELECT count(*) FROM spans WHERE {where}", ranged)
    columns = ", ".join(f'"{name}"' for name in SPAN_COLUMNS)
    if number <= limit:
        found = store.columns(f"SELECT {columns}, 1 AS count FROM spans WHERE {where} ORDER BY start", ranged)
    else:
        # At most `limit` rows of merged spans, whatever the number of lanes.
        width = max((high - low) / min(buckets, max(1, limit // len(store.seen("spans", LANE)))), 1e-9)
        short = f'SELECT {columns} FROM spans WHERE {where} AND "end" - start < $width'
        merged = (
            f"SELECT {LANE}, any_value(step) AS step, NULL::BIGINT AS micro_batch, "
            "CASE WHEN count(*) = 1 THEN any_value(sample_id) END AS sample_id, any_value(attempt) AS attempt, "
            'min(start) AS start, min(start) + sum("end" - start) AS "end", '
            f"count(*) AS count FROM ({short}) GROUP BY {LANE}, floor((start - $low) / $width)"
        )
        long = f'SELECT {columns}, 1 AS count FROM spans WHERE {where} AND "end" - start >= $width'
        found = store.columns(f"{merged} UNION ALL BY NAME {long} ORDER BY start", {**ranged, "width": width})
    return {"merged": number > limit, **{name: found[name].to_pylist() for name in ("count", *SPAN_COLUMNS)}}


def gauge_names(store: RunStore) -> list[dict[str, Any]]:
    """Returns the gauges of a run, and how many series each has."""
    series = store.seen("gauges", "component, name, node, gpu, rank, server, labels::VARCHAR")
    counts = Counter((component, name) for component, name, *_ in series if name is not None)
    return [
        {"name": name, "component": component, "series": number}
        for (component, name), number in sorted(counts.items(), key=lambda item: (item[0][0] or "", item[0][1]))
    ]


def gauges(
    store: RunStore, names: list[str], start: float | None, end: float | None, points: int
) -> list[dict[str, Any]]:
    """Returns the smallest, mean and largest readings of gauges in `points` parts of a range.

    `time` is that of the last reading of a part, so that differences of counters are exact.
    """
    store.refresh("gauges")
    ((first, last),) = store.fetch("SELECT min(time), max(time) FROM gauges WHERE list_contains(?, name)", [names])
    if first is None:
        return []
    low = first if start is None else start
    high = last if end is None else end
    width = max((high - low) / points, 1e-6)
    key = "name, component, node, gpu, rank, server, labels"
    return [
        {**row, "labels": row["labels"] or {}}
        for row in store.rows(
            "WITH parts AS (SELECT name, component, node, gpu, rank, server, labels::VARCHAR AS shown, "
            "any_value(labels) AS labels, max(time) AS time, min(value) AS low, avg(value) AS mean, max(value) AS high "
            "FROM gauges WHERE list_contains($names, name) AND time BETWEEN $low AND $high "
            "GROUP BY name, component, node, gpu, rank, server, shown, least(floor((time - $low) / $width), $last)) "
            f"SELECT {key.replace('labels', 'any_value(labels) AS labels')}, list(time ORDER BY time) AS time, "
            "list(low ORDER BY time) AS min, list(mean ORDER BY time) AS mean, list(high ORDER BY time) AS max "
            "FROM parts GROUP BY name, component, node, gpu, rank, server, shown ORDER BY ALL",
            {"names": names, "low": low, "high": high, "width": width, "last": points - 1},
        )
    ]


class LogQuery(BaseModel):
    """Which log lines are meant: the newest, those around the time `at`, or those beside the row `before` or `after`.

    `since`: those that were recorded from this row on. `start`, `end`: of this time alone. `level`: the lowest one.
    `component`: one process (`trainer-0`) or all of a kind (`trainer`).
    """

    since: OptionalRow = None
    before: OptionalRow = None
    after: OptionalRow = None
    at: float | None = None
    start: float | None = None
    end: float | None = None
    level: str = ""
    component: str = ""
    source: str = ""
    search: str = ""
    limit: Annotated[int, Query(ge=1, le=10_000)] = 400


def logs(store: RunStore, query: LogQuery) -> dict[str, Any]:
    """Returns log lines by time, lines of one time in the order of the record.

    Lines of several files arrive a second or two late, so the newest rows are not the latest lines.
    """
    (num_rows,) = store.refresh("logs").values()
    if query.level and query.level not in LEVELS:
        raise UserError(f"level={query.level!r} is not a level. Use one of {', '.join(LEVELS)}.")
    levels, search = list(LEVELS[LEVELS.index(query.level) :]) if query.level else None, query.search.strip()
    conditions: dict[str, Any] = {
        "list_contains(?, level)": levels,
        "(component = ? OR starts_with(component, ? || '-'))": query.component or None,
        "source = ?": query.source or None,
        "time >= ?": query.start,
        "time < ?": query.end,
        "contains(lower(message), lower(?))": search or None,
    }
    chosen = {text: value for text, value in conditions.items() if value is not None}
    parameters = [value for text, value in chosen.items() for _ in range(text.count("?"))]

    def page(condition: str, *values: float, order: str = "", by: str = TIME, most: int = query.limit) -> list[Row]:
        where = " AND ".join([*chosen, condition])
        ordered = f"ORDER BY {by} {order}, rowid {order} LIMIT {most}"
        return store.rows(f"SELECT rowid AS row, * FROM logs WHERE {where} {ordered}", [*parameters, *values])

    def beside(row: int, sign: str, order: str = "") -> list[Row]:
        ((time,),) = store.fetch(f"SELECT coalesce(min({TIME}), 0) FROM logs WHERE rowid = ?", [row])
        return page(f"({TIME} {sign} ? OR {TIME} = ? AND rowid {sign} ?)", time, time, row, order=order)

    if query.since is not None:
        rows = page("rowid >= ?", query.since, by="rowid")
        if len(rows) == query.limit:
            num_rows = rows[-1]["row"] + 1
    elif query.after is not None:
        rows = beside(query.after, ">")
    elif query.before is not None:
        rows = beside(query.before, "<", "DESC")[::-1]
    elif query.at is not None:
        half = max(1, query.limit // 2)
        rows = page(f"{TIME} < ?", query.at, order="DESC", most=half)[::-1]
        rows += page("time >= ?", query.at, most=query.limit - half)
    else:
        rows = page("true", order="DESC")[::-1]
    names = store.seen("logs", "component, source")
    # Kinds that have several are offered too: trainer, trainer-0, trainer-1.
    components = {name for name, _ in names if name is not None}
    kinds = Counter(name.rpartition("-")[0] for name in components)
    return {
        "next": num_rows,
        "rows": rows,
        "components": sorted(components | {kind for kind, number in kinds.items() if kind and number > 1}),
        "sources": sorted({name for _, name in names if name is not None}),
    }
