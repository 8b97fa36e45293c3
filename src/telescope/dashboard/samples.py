"""Searches, filters, sorts and exports samples. Returns plain data for the API.

Filters, sorting and facets run on the columns that the store keeps in memory. Texts are read from the files, for the
rows of a response only. A query works on its own view of the tables, so that a search does not block other requests.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Annotated, Any

import pydantic_core
from fastapi import Query
from pydantic import BaseModel

from telescope.dashboard import api
from telescope.dashboard.store import NO_HITS, Key, RunStore, key_of
from telescope.dashboard.tables import Row, View
from telescope.errors import UserError
from telescope.record.query import sql_text
from telescope.utils.text import num_equal

BEGINNING = 200
"""Characters of a prompt or a completion in a list."""

MOST_EXPORTED = 100_000
"""Most samples of one export. `X-Total-Count` has the number of all samples that pass the filters."""

COMPARED = 2000
SAME = 24
"""`COMPARED` characters of prompts are compared. A common prefix longer than `SAME` is left out of a list."""

MARKS = {"never": "num_right = 0", "always": "num_right = n", "sometimes": "num_right BETWEEN 1 AND n - 1"}
"""Conditions for the marks of a prompt."""

PROMPT_SORTS = ("first_step", "last_step", "first_right", "pass_rate", "reward_mean", "n")

NEAR_STEPS = 20
SMALL_BYTES = 8 * 2**20
"""A list has texts if its rows span at most `NEAR_STEPS` steps, or if the record has at most `SMALL_BYTES`. Otherwise a
list ordered by reward would read all texts of the run."""

FACETS = ("status", "environment", "reward", "age", "stop_reason", "eval_name")
MOST_VALUES = 12
"""Distinct rewards up to which a facet lists them one by one instead of as ranges."""
NUM_RANGES = 5
FACET_DIGITS = 6
"""Significant digits of a reward in a facet."""
MOST_TAGS = 6
"""Number of tags that are facets. Filters work with every tag."""

NUMBERS = (
    *("reward", "advantage", "prompt_tokens", "completion_tokens", "environment_tokens", "total_tokens"),
    *("num_turns", "age", "penalty"),
)
"""Columns that a range can limit. Any other name is a sample metric."""

SORTS = (*NUMBERS, "step", "started_at", "finished_at", "status", "environment", "group_id")

METRIC = "metric:"
"""Prefix of a sample metric by which to sort."""

_RANGE = re.compile(r"^(\S+) to (\S+)$")


class Filters(BaseModel):
    """Selects samples. `prompt` is a `prompt_key`.

    Values of one facet or tag are alternatives; all other conditions must hold. A range may lack one of its ends.
    """

    tag: Annotated[list[str], Query(description="NAME=VALUE")] = []
    range: Annotated[list[str], Query(description="NAME=LOW..HIGH")] = []
    search: str = ""
    status: str = ""
    environment: str = ""
    reward: str = ""
    age: str = ""
    stop_reason: str = ""
    eval_name: str = ""
    step_min: api.Integer | None = None
    step_max: api.Integer | None = None
    prompt: Annotated[str, Query(description="`prompt_key` of a prompt")] = ""

    def conditions(self) -> tuple[list[str], dict[str, str]]:
        """Returns SQL conditions: those that always hold, and those of each facet. Raises `UserError`."""
        base = [_within(text) for text in self.range]
        for sign, end in ((">=", self.step_min), ("<=", self.step_max)):
            if end is not None:
                base.append(f"step {sign} {int(end)}")
        base += [f"prompt_key = {sql_text(self.prompt)}"] * bool(self.prompt)
        given = {name: getattr(self, name) for name in FACETS}
        chosen = {name: _condition(name, text.split(",")) for name, text in given.items() if text}
        values: dict[str, list[str]] = defaultdict(list)
        for tag in self.tag:
            name, equals, value = tag.partition("=")
            if not equals:
                raise UserError(f"tag={tag!r} has no value. Write it as NAME=VALUE.")
            values[name].append(sql_text(value))
        chosen |= {f"tag:{name}": f"tags[{sql_text(name)}] IN ({', '.join(some)})" for name, some in values.items()}
        return base, chosen


class SampleQuery(Filters):
    """A page of samples."""

    sort: str = "step"
    offset: api.Row = 0
    limit: Annotated[int, Query(ge=0, le=10_000)] = 100
    facets: Annotated[bool, Query(description="Also count the samples of each facet, which takes longer.")] = True


class PromptQuery(Filters):
    """A page of prompts, with one of `MARKS` or all."""

    mark: str = ""
    sort: str = "first_step"
    offset: api.Row = 0
    limit: Annotated[int, Query(ge=0, le=1000)] = 100


class ExportQuery(Filters):
    """The first samples of an order."""

    sort: str = "step"
    limit: Annotated[int, Query(ge=1, le=MOST_EXPORTED)] = MOST_EXPORTED


def samples(store: RunStore, query: Annotated[SampleQuery, Query()]) -> dict[str, Any]:
    """Returns one page of the samples that pass all filters, with counts for each facet.

    A facet counts the samples that pass the filters of all other facets. Raises `UserError` for an unknown order or
    filter.
    """
    order = _order(query.sort)
    every: Mapping[str, Sequence[Any]] = {}
    if query.facets:
        visible = store.visible()
        tags = {f"tag:{name}": values for name, values in sorted(store.tags().items()) if len(values) > 1}
        every = {name: store.distinct(name, visible) for name in FACETS} | dict(list(tags.items())[:MOST_TAGS])
    with _filtered(store, query) as (view, base, conditions):
        where = " AND ".join([*base, *conditions.values()])
        ((total,),) = view.fetch(f"SELECT count(*) FROM samples WHERE {where}")
        rows = view.rows(f"FROM samples WHERE {where} ORDER BY {order} LIMIT {query.limit} OFFSET {query.offset}")
        facets = _facets(view, base, conditions, every)
    steps = [row["step"] for row in rows if row["step"] is not None]
    is_quick = not steps or max(steps) - min(steps) <= NEAR_STEPS
    if not is_quick:
        is_quick = sum(file.path.stat().st_size for file in store.run.table_files("samples")) <= SMALL_BYTES
    texts = beginnings(store, rows) if is_quick else {}
    around = store.snippets(text, rows) if (text := query.search.strip()) else {}
    for row in rows:
        row["metrics"], row["tags"] = row["metrics"] or {}, row["tags"] or {}
        found = texts.get(key_of(row), {})
        row["prompt"], row["completion"] = found.get("prompt") or "", found.get("answer") or ""
        row["snippet"] = around.get(key_of(row))
    metrics = sorted(name for (name,) in store.seen("samples", "unnest(map_keys(metrics))"))
    return {"total": total, "rows": rows, "facets": facets, "metrics": metrics}


def prompts(store: RunStore, query: Annotated[PromptQuery, Query()]) -> dict[str, Any]:
    """Returns one page of the prompts whose samples pass all filters, with counts of (right) answers by step.

    An answer is right if its metric `correct` is 1 or, without that metric, if its reward is the highest of its
    environment, as declared or as seen. Answers without a reward do not count. Raises `UserError` for an unknown mark,
    order or filter.
    """
    column = query.sort.removeprefix("-")
    if column not in PROMPT_SORTS or query.mark not in ("", *MARKS):
        raise UserError(f"Use one of {', '.join(PROMPT_SORTS)} as sort, and one of {', '.join(MARKS)} as mark.")
    store.refresh("environments")
    by_prompt = """
        WITH declared AS (SELECT name AS environment, max(reward_max) AS most FROM environments
            WHERE purpose = 'training' OR name NOT IN (SELECT name FROM environments WHERE purpose = 'training')
            GROUP BY ALL),
        highest AS (SELECT environment, coalesce(any_value(most), max(reward)) AS most
            FROM samples LEFT JOIN declared USING (environment) GROUP BY environment),
        by_step AS (SELECT prompt_key, environment, step, count(*) AS n, sum(reward) AS total,
                count_if(coalesce(metrics['correct'] >= 1, reward >= most)) AS num_right,
                min((attempt, sample_id, group_id)) AS first
            FROM passing JOIN highest USING (environment) GROUP BY ALL)
        SELECT prompt_key, environment, sum(n)::BIGINT AS n, sum(num_right)::BIGINT AS num_right,
            sum(num_right) / sum(n) AS pass_rate, sum(total) / sum(n) AS reward_mean, min(step) AS first_step,
            max(step) AS last_step, min(step) FILTER (num_right > 0) AS first_right, list(step ORDER BY step) AS steps,
            list(n ORDER BY step) AS counts, list(num_right ORDER BY step) AS rights,
            arg_min(first, step) AS first
        FROM by_step GROUP BY prompt_key, environment"""
    order = f"{column} {'ASC' if column == query.sort else 'DESC'} NULLS LAST, first_step, prompt_key"
    with _filtered(store, query) as (view, base, conditions):
        where = " AND ".join([*base, *conditions.values(), "reward IS NOT NULL"])
        view.fetch(f"CREATE TEMP VIEW passing AS FROM samples WHERE {where}")
        view.fetch(f"CREATE TEMP TABLE prompts AS {by_prompt}")
        counts = ", ".join(f"count_if({condition}) AS {name}" for name, condition in MARKS.items())
        (marks,) = view.rows(f"SELECT count(*) AS total, {counts} FROM prompts")
        chosen = f"FROM prompts WHERE {MARKS.get(query.mark, 'true')} ORDER BY {order}"
        rows = view.rows(f"{chosen} LIMIT {query.limit} OFFSET {query.offset}")
    for row in rows:
        row["attempt"], row["sample_id"], row["group_id"] = row.pop("first")
    texts = beginnings(store, rows)
    for row in rows:
        row["prompt"] = texts.get(key_of(row), {}).get("prompt") or ""
    return {**marks, "rows": rows}


def _facets(
    view: View, base: Sequence[str], conditions: Mapping[str, str], every: Mapping[str, Sequence[Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Counts the samples for all values of the facets in `every`. `base` always applies; `conditions` are by facet."""
    # tag:x stands for the value of tag x.
    names = {
        name: f"tags[{sql_text(name.removeprefix('tag:'))}]" if name.startswith("tag:") else name for name in every
    }
    where = " AND ".join([*base, *conditions.values()])
    grouped = _grouped(view, {name: names[name] for name in names if name not in conditions}, where)
    for name in conditions.keys() & names.keys():
        others = " AND ".join([*base, *(text for other, text in conditions.items() if other != name)])
        grouped |= _grouped(view, {name: names[name]}, others)
    return {name: _facet(name, values, grouped[name]) for name, values in every.items()}


def export(store: RunStore, query: ExportQuery) -> tuple[int, Iterator[bytes]]:
    """Returns the number of samples that pass all filters, and the first of them as lines of JSON.

    Lines have all columns and follow the order of the record.
    """
    order = _order(query.sort)
    with _filtered(store, query) as (view, base, conditions):
        where = " AND ".join([*base, *conditions.values()])
        ((total,),) = view.fetch(f"SELECT count(*) FROM samples WHERE {where}")
        first = f"SELECT rowid AS place, * FROM samples WHERE {where} ORDER BY {order} LIMIT {query.limit}"
        chosen = view.columns(f"SELECT attempt, sample_id, step FROM ({first}) ORDER BY place")
    return total, (pydantic_core.to_json(row, inf_nan_mode="null") + b"\n" for row in store.whole_samples(chosen))


@contextmanager
def _filtered(store: RunStore, filters: Filters) -> Iterator[tuple[View, list[str], dict[str, str]]]:
    """Yields a view with the samples, and SQL conditions: a list of general ones, and one per facet."""
    base, conditions = filters.conditions()
    base.append(store.visible())
    store.refresh("samples")
    hits = NO_HITS
    if text := filters.search.strip():
        hits = store.search(text)
        base.append("((attempt, sample_id) IN (FROM hits) OR (attempt, prompt_key) IN (FROM hits))")
    with store.view(hits=hits) as view:
        yield view, base, conditions


def beginnings(store: RunStore, members: Sequence[Row]) -> dict[Key, Row]:
    """Returns `RunStore.beginnings` of some samples, without the common prefix of an environment's prompts."""
    texts = store.beginnings(members, COMPARED)
    leave_out_common_prefix(texts, members)
    for text in texts.values():
        text.update({"prompt": text["prompt"][:BEGINNING], "answer": (text["answer"] or "")[:BEGINNING]})
    return texts


def leave_out_common_prefix(texts: Mapping[Key, Row], members: Sequence[Row]) -> None:
    """Shortens the prompts in `texts`, which often begin with the same instruction in all samples of an environment."""
    prompts: dict[str | None, set[str]] = defaultdict(set)
    for row in members:
        prompts[row["environment"]].add(texts[key_of(row)]["prompt"])
    ends = {environment: (min(some), max(some)) for environment, some in prompts.items() if len(some) > 1}
    same = {environment: first[: num_equal(first, last)] for environment, (first, last) in ends.items()}
    for row in members:
        prefix = same.get(row["environment"], "")
        cut = max(prefix.rfind(" "), prefix.rfind("\n")) + 1
        if cut > SAME and (text := texts[key_of(row)])["prompt"].startswith(prefix):
            text["prompt"] = f"… {text['prompt'][cut:]}"


def _order(sort: str) -> str:
    """Returns an SQL order. Raises `UserError` for an unknown name."""
    name = sort.removeprefix("-")
    if name.startswith(METRIC):
        column = f"metrics[{sql_text(name.removeprefix(METRIC))}]"
    elif name in SORTS:
        column = name
    else:
        raise UserError(
            f"sort={sort!r} is not possible. Use {', '.join(SORTS)}, or {METRIC}NAME for a sample metric, with - in "
            "front for descending."
        )
    return f"{column} {'DESC' if sort.startswith('-') else 'ASC'} NULLS LAST, attempt, group_id, sample_index"


def _within(text: str) -> str:
    """Returns an SQL condition for a range `name=low..high`. Raises `UserError`."""
    name, equals, ends = text.rpartition("=")
    low, dots, high = ends.partition("..")
    if not equals or not dots or not (low or high):
        raise UserError(f"range={text!r} is not a range. Write it as NAME=LOW..HIGH, with one end at least.")
    column = name if name in NUMBERS else f"metrics[{sql_text(name)}]"
    parts = ((">=", low), ("<=", high))
    # NaN counts as larger than all other values.
    return " AND ".join([f"NOT isnan({column})", *(f"{column} {sign} {_number(end)!r}" for sign, end in parts if end)])


def _condition(name: str, values: Sequence[str]) -> str:
    """Returns an SQL condition for the selected values of a facet."""
    if name not in ("reward", "age"):
        return f"{name} IN ({', '.join(sql_text(value) for value in values)})"
    each = []
    for value in values:
        bounds = _RANGE.match(value)
        low, high = (_number(bounds[1]), _number(bounds[2])) if bounds else _shown_as(value)
        each.append(f"({name} >= {low!r} AND {name} <= {high!r})")
    return f"({' OR '.join(each)})"


def _grouped(view: View, names: Mapping[str, str], where: str) -> dict[str, dict[Any, int]]:
    """Counts the samples for each value of some expressions, in one pass."""
    counted: dict[str, dict[Any, int]] = {name: {} for name in names}
    if names:
        columns = ", ".join(f"{expression} AS c{place}" for place, expression in enumerate(names.values()))
        cells = [f"c{place}" for place in range(len(names))]
        sets = ", ".join(f"({cell})" for cell in cells)
        shown = ", ".join(f"grouping({cell}), {cell}" for cell in cells)
        inner = f"SELECT {columns} FROM samples WHERE {where}"
        for number, *found in view.fetch(f"SELECT count(*), {shown} FROM ({inner}) GROUP BY GROUPING SETS ({sets})"):
            place = next(place for place in range(len(names)) if found[2 * place] == 0)
            counted[list(names)[place]][found[2 * place + 1]] = number
    return counted


def _facet(name: str, every: Sequence[Any], counted: Mapping[Any, int]) -> list[dict[str, Any]]:
    """Returns each value with its count, also with 0. If there are many rewards, returns ranges."""
    if name == "reward" and len(every) > MOST_VALUES:
        ranges = []
        finite = [value for value in every if math.isfinite(value)]  # infinite values are in no range
        for low, high in pairwise(_edges(finite[0], finite[-1])):
            inside = sum(count for value, count in counted.items() if value is not None and low <= value <= high)
            ranges.append({"value": f"{low:g} to {high:g}", "count": inside})
        return ranges
    counts: dict[str, int] = {}
    for value in every:
        text = f"{value:.{FACET_DIGITS}g}" if isinstance(value, float) else str(value)
        counts[text] = counts.get(text, 0) + counted.get(value, 0)
    return [{"value": text, "count": count} for text, count in counts.items()]


def _shown_as(text: str) -> tuple[float, float]:
    """Returns the range of the numbers that a facet shows as this text. Raises `UserError`."""
    number = _number(text)
    half = 0.5 * 10.0 ** (math.floor(math.log10(abs(number))) + 1 - FACET_DIGITS) if number else 0.0
    return number - half, number + half


def _edges(low: float, high: float) -> list[float]:
    """Returns round edges for ranges that cover [low, high]."""
    width = (high - low) / NUM_RANGES
    unit = 10.0 ** math.floor(math.log10(width))
    width = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= width)
    first = math.floor(low / width)
    return [width * number for number in range(first, math.ceil(high / width) + 1)]


def _number(text: str) -> float:
    """Parses a number of a filter. Raises `UserError` for anything else."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{text!r} is not a number. Use a value or a range that a facet lists, such as `0 to 0.5`.")
    return number
