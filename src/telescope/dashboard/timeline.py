"""Returns spans, gauges and log lines of a time range as plain data for the API."""

from collections import Counter
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from fastapi import Query
from pydantic import BaseModel

from telescope.dashboard.api import OptionalRow
from telescope.dashboard.store import RunStore
from telescope.dashboard.tables import Row
from telescope.errors import UserError

SPAN_COLUMNS = (
    *("attempt", "component", "name", "rank", "server", "lane", "step", "micro_batch", "sample_id", "status"),
    *("start", "end"),
)
LANE = ("component", "name", "rank", "server", "lane")

STATUS = "LEFT JOIN (SELECT attempt, sample_id, status FROM samples) USING (attempt, sample_id)"

AFTER_ENGINE = ("tool", "environment", "reward", "generate")
"""If a request slot has several spans at one time, it shows the request in the engine, or else the first of these: an
environment still replies when the next request has the slot, and `generate` begins before it has one."""

TIME = "coalesce(time, 0)"
"""Time of a log line. Lines of a record without times come first."""

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def spans(
    store: RunStore,
    start: float | None = None,
    end: float | None = None,
    limit: Annotated[int, Query(ge=1, le=500_000)] = 40_000,
    buckets: Annotated[int, Query(ge=1, le=20_000)] = 2000,
) -> dict[str, Any]:
    """Returns the spans that overlap a range, as columns, and the number of `slots` of each server in the run.

    If there are more than `limit`, the range is divided into at most `buckets` parts. Spans shorter than a part are
    merged per part, lane, kind and status: `count` spans, from the first start, as long as the lane shows them.
    """
    num_rows = store.refresh("samples", "spans")
    ((first, last),) = store.fetch('SELECT min(start), max("end") FROM spans')
    low, high = first if start is None else start, last if end is None else end
    slots: dict[int, int] = {}
    for *_, server, lane in store.seen("spans", ", ".join(LANE)):
        if server is not None:
            slots[server] = max(slots.get(server, 0), 0 if lane is None else lane + 1)
    where = '"end" >= $low AND start <= $high'
    ranged: dict[str, Any] = {"low": low, "high": high}
    ((number,),) = store.fetch(f"SELECT count(*) FROM spans WHERE {where}", ranged)
    columns = ", ".join(f'"{name}"' for name in SPAN_COLUMNS)
    if number <= limit:
        chosen = f"(SELECT * FROM spans WHERE {where}) {STATUS}"
        found = store.columns(f"SELECT {columns}, 1 AS count FROM {chosen} ORDER BY start", ranged)
    else:
        ranged["width"] = max((high - low) / buckets, 1e-9)
        near = f'FROM shown WHERE {where} AND "end" - start'
        parts = (
            "SELECT min(start) AS start, sum(seconds) AS seconds, count(*) AS count, any_value(row) AS row, status "
            f"{near} < $width GROUP BY key, status, floor((start - $low) / $width) "
            f'UNION ALL SELECT start, "end" - start, 1, row, status {near} >= $width'
        )
        with store.view(shown=store.kept("shown", num_rows, lambda: _shown(store))) as view:
            # With many lanes the parts are longer, so that the response has at most `limit` rows.
            while (rows := view.columns(parts, ranged).num_rows) > limit and ranged["width"] < high - low:
                ranged["width"] *= 1.1 * rows / limit
            once = {"micro_batch": "one.micro_batch", "sample_id": "one.sample_id"}
            shown = {name: f"CASE WHEN count = 1 THEN {column} END" for name, column in once.items()}
            shown |= {"status": "parts.status", "start": "parts.start", "end": "parts.start + seconds"}
            listed = ", ".join(f'{shown.get(name, f"one.{name}")} AS "{name}"' for name in SPAN_COLUMNS)
            found = view.columns(
                f"SELECT {listed}, count FROM ({parts}) parts JOIN spans one ON one.rowid = row ORDER BY parts.start",
                ranged,
            )
    return {
        "merged": number > limit,
        "part_seconds": ranged.get("width", 0.0),
        "slots": slots,
        **{name: found[name].to_pylist() for name in ("count", *SPAN_COLUMNS)},
    }


def _shown(store: RunStore) -> pa.Table:
    """Returns the spans that lanes show, and for how many `seconds`, without times when another span covers them.

    Leaves out spans of sandboxes, which are too short to show when spans are merged.
    """
    lanes = sorted((lane for lane in store.seen("spans", ", ".join(LANE)) if lane[0] != "sandbox"), key=str)
    tracks: dict[tuple[Any, ...], int] = {}
    places = []
    for component, name, rank, server, lane in lanes:
        level, kind = 0, name
        if component in ("inference", "rollout", "environment"):
            level, kind = (1 + AFTER_ENGINE.index(name) if name in AFTER_ENGINE else 0), "slot"
        elif component == "trainer" and name not in ("step", "waiting_for_data"):
            beside = name == "gradient_reduction" or name.startswith("weight_broadcast")
            kind = "beside" if beside else "trainer"
        places.append((level, tracks.setdefault((kind, rank, server, lane), len(tracks))))
    columns = {name: pa.array([lane[place] for lane in lanes]) for place, name in enumerate(LANE)}
    same = " AND ".join(f"spans.{name} IS NOT DISTINCT FROM lanes.{name}" for name in LANE)
    with store.view(lanes=pa.table({**columns, "key": pa.array(range(len(lanes)))})) as view:
        rows = view.columns(
            f'SELECT spans.rowid AS row, key, start, "end", status FROM spans JOIN lanes ON {same} {STATUS}'
        )
    start, end, key = (rows[name].to_numpy() for name in ("start", "end", "key"))
    level, track = np.array(places).T[:, key]
    # All tracks share one axis, on which each track has its own range of time.
    offset = track * (end.max() - start.min() + 1.0) - start.min()
    seconds = np.zeros(len(start))
    begins = ends = np.empty(0)  # intervals that earlier levels cover
    for own in range(len(AFTER_ENGINE) + 1):
        chosen = np.flatnonzero(level == own)
        chosen = chosen[np.argsort(start[chosen] + offset[chosen], kind="stable")]
        low, high = start[chosen] + offset[chosen], end[chosen] + offset[chosen]
        low = np.maximum(low, np.maximum.accumulate(np.concatenate(([-np.inf], high)))[:-1])
        high = np.maximum(high, low)
        seconds[chosen] = high - low - _covered(begins, ends, high) + _covered(begins, ends, low)
        begins, ends = _union(np.concatenate((begins, low)), np.concatenate((ends, high)))
    return rows.append_column("seconds", pa.array(seconds)).filter(pa.array(seconds > 1e-7))


def _union(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merges intervals into sorted, disjoint intervals that cover the same times."""
    order = np.argsort(begins, kind="stable")
    begins, reached = begins[order], np.maximum.accumulate(ends[order])
    opens = np.flatnonzero(np.concatenate(([True], begins[1:] > reached[:-1]))[: len(begins)])
    return begins[opens], np.maximum.reduceat(reached, opens) if len(opens) else reached


def _covered(begins: np.ndarray, ends: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Returns how many seconds before each time the intervals cover."""
    before = np.concatenate(([0.0], np.cumsum(ends - begins)))
    place = np.searchsorted(begins, times, side="right")
    return before[place] - np.maximum(0.0, np.concatenate(([-np.inf], ends))[place] - times)


def paths(store: RunStore, first: int, last: int, most: Annotated[int, Query(ge=1, le=1000)] = 100) -> dict[str, Any]:
    """Returns the critical paths of at most `most` evenly spaced steps.

    For each step, returns the last answer of each group, and the spans that overlap the step: those of the step's last
    answer, of the slowest trainer rank, and of weight syncs.
    """
    visible = store.visible()
    store.refresh("samples", "spans")
    common = f"""WITH numbered AS (
        SELECT attempt, step, started_at AS start, ended_at AS "end",
            (row_number() OVER (ORDER BY step) - 1) * $most // count(*) OVER () AS place
        FROM steps WHERE {visible} AND step BETWEEN $first AND $last AND ended_at > started_at
    ), chosen AS (SELECT * FROM numbered QUALIFY row_number() OVER (PARTITION BY place ORDER BY step) = 1),
    answers AS (
        SELECT step, attempt, sample_id, group_id, server, lane, finished_at FROM samples
        SEMI JOIN chosen USING (attempt, step) WHERE status = 'kept'
        QUALIFY row_number() OVER (PARTITION BY step, group_id ORDER BY finished_at DESC) = 1
    )"""
    parameters = {"first": first, "last": last, "most": most}
    with store.view() as view:
        return {
            "steps": view.rows(f'{common} SELECT step, start, "end" FROM chosen ORDER BY step', parameters),
            "answers": view.rows(f"{common} SELECT * EXCLUDE attempt FROM answers ORDER BY step, group_id", parameters),
            "spans": view.rows(
                f"""{common}, newest AS (
                    SELECT step, max_by(attempt, finished_at) AS attempt, max_by(sample_id, finished_at) AS sample_id
                    FROM answers GROUP BY step
                ), slowest AS (
                    SELECT step, max_by(rank, start + "end") AS rank FROM spans SEMI JOIN chosen USING (attempt, step)
                    WHERE component = 'trainer' AND name = 'step' GROUP BY step
                ), near AS (
                    SELECT * FROM spans WHERE component IN ('trainer', 'weights')
                    OR (attempt, sample_id) IN (SELECT attempt, sample_id FROM newest)
                )
                SELECT chosen.step AS of_step, component, name, near.rank, server, lane, near.step, near.sample_id,
                    near.start, near."end"
                FROM chosen LEFT JOIN newest USING (step) LEFT JOIN slowest USING (step)
                JOIN near ON near.start < chosen."end" AND near."end" > chosen.start
                WHERE component = 'weights' OR near.sample_id = newest.sample_id
                OR component = 'trainer' AND (name = 'step' OR near.rank = slowest.rank)""",
                parameters,
            ),
        }


def sandboxes(store: RunStore, start: float | None = None, end: float | None = None) -> list[dict[str, Any]]:
    """Returns how often and how long sandboxes were created, used and waited for in a range."""
    store.refresh("spans")
    return store.rows(
        'SELECT name, count(*) AS count, median("end" - start) AS p50, quantile_cont("end" - start, 0.95) AS p95 '
        "FROM spans WHERE component = 'sandbox' AND start BETWEEN coalesce(?, start) AND coalesce(?, start) "
        "GROUP BY name ORDER BY count(*) DESC, name",
        [start, end],
    )


def gauge_names(store: RunStore) -> list[dict[str, Any]]:
    """Returns the gauges of a run with their numbers of series."""
    series = store.seen("gauges", "component, name, node, gpu, rank, server, labels::VARCHAR")
    counts = Counter((component, name) for component, name, *_ in series if name is not None)
    return [
        {"name": name, "component": component, "series": number}
        for (component, name), number in sorted(counts.items(), key=lambda item: (item[0][0] or "", item[0][1]))
    ]


AFTER_LAST_SECONDS = 0.001
"""From the last reading of an attempt to its end, which must come after it."""


def gauges(
    store: RunStore,
    names: str,
    start: float | None = None,
    end: float | None = None,
    points: Annotated[int, Query(ge=1, le=10_000)] = 400,
) -> list[dict[str, Any]]:
    """Returns the smallest, mean and largest readings of gauges in `points` parts of a range. `names` has commas.

    `time` is the time of a part's last reading, so that differences of counters are exact. Where an attempt ended and a
    later one follows, a series has a reading of None: it has no value until its first reading in the later attempt.
    """
    store.refresh("gauges")
    wanted = names.split(",")
    ((first, last),) = store.fetch("SELECT min(time), max(time) FROM gauges WHERE list_contains(?, name)", [wanted])
    if first is None:
        return []
    low = first if start is None else start
    high = last if end is None else end
    width = max((high - low) / points, 1e-6)
    key = "name, component, node, gpu, rank, server"
    return [
        {**row, "labels": row["labels"] or {}}
        for row in store.rows(
            f"WITH readings AS (SELECT {key}, attempt, labels::VARCHAR AS shown, "
            "any_value(labels) AS labels, max(time) AS time, min(value) AS low, avg(value) AS mean, max(value) AS high "
            "FROM gauges WHERE list_contains($names, name) AND time BETWEEN $low AND $high "
            f"GROUP BY {key}, attempt, shown, least(floor((time - $low) / $width), $last)), "
            "ends AS (SELECT attempt, max(time) + $after AS time FROM gauges GROUP BY attempt "
            "QUALIFY attempt < max(attempt) OVER ()), "
            "parts AS (FROM readings UNION ALL BY NAME "
            f"SELECT DISTINCT {key}, shown, ends.time FROM readings JOIN ends USING (attempt) "
            "WHERE ends.time <= $high) "
            f"SELECT {key}, any_value(labels) AS labels, list(time ORDER BY time) AS time, "
            "list(low ORDER BY time) AS min, list(mean ORDER BY time) AS mean, list(high ORDER BY time) AS max "
            f"FROM parts GROUP BY {key}, shown ORDER BY ALL",
            {
                "names": wanted,
                "low": low,
                "high": high,
                "width": width,
                "last": points - 1,
                "after": AFTER_LAST_SECONDS,
            },
        )
    ]


class LogQuery(BaseModel):
    """Selects log lines: the newest, lines around the time `at`, or lines beside the row `before` or `after`.

    `since`: recorded from this row on. `start`, `end`: only lines of this time. `level`: the lowest level.
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


def logs(store: RunStore, query: Annotated[LogQuery, Query()]) -> dict[str, Any]:
    """Returns log lines by time. Lines with equal times keep the order of the record.

    Lines of several files arrive a second or two late, so the newest rows are not the latest lines.
    """
    store.refresh("logs")
    ((num_rows,),) = store.fetch("SELECT count(*) FROM logs")  # without those of damaged files
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
    # If there are several of a kind, the kind is offered too: trainer, trainer-0, trainer-1.
    components = {name for name, _ in names if name is not None}
    kinds = Counter(name.rpartition("-")[0] for name in components)
    return {
        "next": num_rows,
        "rows": rows,
        "components": sorted(components | {kind for kind, number in kinds.items() if kind and number > 1}),
        "sources": sorted({name for _, name in names if name is not None}),
    }
