"""Groups, samples and one sample with everything about it: plain data for the API.

Filters, sorting and facets run on the columns that the store keeps in memory; texts are read from the files for the
rows of an answer only.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from telescope.dashboard.registry import config_of
from telescope.dashboard.store import NotFoundError, Row, RunStore
from telescope.dashboard.token_texts import find_tokenizer, token_texts
from telescope.errors import UserError
from telescope.record.query import sql_text

BEGINNING = 200
"""Characters of a prompt or an answer in a list."""

NEAR_STEPS = 20
SMALL_BYTES = 32 * 2**20
"""Rows of a list come with their texts when they lie within so many steps, or when the record is this small.
Otherwise a list that is ordered by reward would read every text of the run."""

FACETS = ("status", "environment", "reward", "age", "stop_reason", "eval_name")
MOST_VALUES = 12
"""Distinct rewards that a facet lists one by one; more are shown as ranges."""
NUM_RANGES = 5

SORTS = (
    *("step", "reward", "advantage", "completion_tokens", "prompt_tokens", "total_tokens", "num_turns", "age"),
    *("started_at", "finished_at", "status", "environment", "group_id"),
)

_RANGE = re.compile(r"^(\S+) to (\S+)$")


def groups(store: RunStore, step: int | None, since: int | None) -> list[dict[str, Any]]:
    """Returns the groups of a step, or all from row `since` on, with their samples."""
    visible = store.visible()
    store.refresh("groups", "samples")
    where = [visible]
    parameters: list[Any] = []
    if step is not None:
        where.append("step = ?")
        parameters.append(step)
    if since is not None:
        where.append("rowid >= ?")
        parameters.append(since)
    columns = "attempt, group_id, environment, status, reason, step, reward_mean, reward_std"
    chosen = f"SELECT {columns} FROM groups WHERE {' AND '.join(where)}"
    found = store.rows(f"{chosen} ORDER BY attempt, group_id", parameters)
    members = store.rows(
        f"SELECT s.attempt, s.group_id, s.sample_id, s.reward, s.advantage, s.status, s.completion_tokens, s.metrics, "
        f"s.step FROM samples s SEMI JOIN ({chosen}) g ON s.attempt = g.attempt AND s.group_id = g.group_id "
        "ORDER BY s.sample_index",
        parameters,
    )
    texts = _beginnings(store, members)
    samples: dict[tuple[int, int], list[Row]] = defaultdict(list)
    prompts: dict[tuple[int, int], str] = {}
    for row in members:
        key = (row["attempt"], row["group_id"])
        text = texts.get((row["attempt"], row["sample_id"]), {})
        prompts.setdefault(key, text.get("prompt") or "")
        kept = {name: row[name] for name in ("reward", "advantage", "status")}
        numbers = {"length": row["completion_tokens"], "metrics": row["metrics"] or {}}
        samples[key].append({"id": row["sample_id"], **kept, **numbers, "completion": text.get("answer") or ""})
    return [
        {
            **{name: row[name] for name in columns.split(", ") if name != "group_id"},
            "id": row["group_id"],
            "prompt": prompts.get((row["attempt"], row["group_id"]), ""),
            "samples": samples[row["attempt"], row["group_id"]],
        }
        for row in found
    ]


def samples(
    store: RunStore,
    *,
    facets: Mapping[str, str],
    search: str,
    step_min: int | None,
    step_max: int | None,
    sort: str,
    offset: int,
    limit: int,
) -> dict[str, Any]:
    """Returns one page of the samples that pass all filters, with counts of each facet.

    A facet counts the samples that pass the filters of the others. Raises `UserError` for an unknown order.
    """
    column = sort.removeprefix("-")
    if column not in SORTS:
        raise UserError(f"sort={sort!r} is not possible. Use {', '.join(SORTS)}, with - in front for descending.")
    order = f"{column} {'DESC' if sort.startswith('-') else 'ASC'} NULLS LAST, attempt, group_id, sample_index"
    visible = store.visible()
    with store.exclusive():
        store.refresh("samples")
        base = [visible]
        parameters: list[Any] = []
        for name, sign, value in (("step", ">=", step_min), ("step", "<=", step_max)):
            if value is not None:
                base.append(f"{name} {sign} ?")
                parameters.append(value)
        source = "samples"
        if search.strip():
            store.search(search.strip())
            source = "(FROM samples SEMI JOIN hits USING (attempt, sample_id))"
        conditions = {name: _condition(name, facets[name].split(",")) for name in FACETS if facets.get(name)}
        where = " AND ".join([*base, *conditions.values()])
        ((total,),) = store.fetch(f"SELECT count(*) FROM {source} WHERE {where}", parameters)
        page = f"SELECT * FROM {source} WHERE {where} ORDER BY {order} LIMIT {int(limit)} OFFSET {int(offset)}"
        rows = store.rows(page, parameters)
        free = [name for name in FACETS if name not in conditions]
        grouped = _grouped(store, free, source, where, parameters)
        for name in conditions:
            others = " AND ".join([*base, *(text for other, text in conditions.items() if other != name)])
            grouped |= _grouped(store, [name], source, others, parameters)
        counts = {name: _facet(name, store.distinct(name, visible), grouped[name]) for name in FACETS}
    texts = _beginnings(store, rows) if _few_texts(store, rows) else {}
    for row in rows:
        row["metrics"], row["tags"] = row["metrics"] or {}, row["tags"] or {}
        text = texts.get((row["attempt"], row["sample_id"]), {})
        row["prompt"], row["completion"] = text.get("prompt") or "", text.get("answer") or ""
    return {"total": total, "rows": rows, "facets": counts}


def detail(store: RunStore, attempt: int, sample_id: str) -> dict[str, Any]:
    """Returns everything about a sample. Raises `NotFoundError` if there is none or a later attempt superseded it."""
    visible = store.visible()
    store.refresh("samples", "spans")
    known = store.rows(
        f"SELECT step FROM samples WHERE {visible} AND attempt = ? AND sample_id = ?", [attempt, sample_id]
    )
    if not known:
        raise NotFoundError(f"Attempt {attempt} has no sample {sample_id!r}, or a later attempt replaced it.")
    whole = store.texts(["samples", "turns", "tool_calls", "info", "tokens"], attempt, sample_id, known[0]["step"])
    (sample, *_) = whole["samples"]
    turns = sorted(whole["turns"], key=lambda row: row["turn"])
    add_tokens(turns, sorted(whole["tokens"], key=lambda row: row["part"]))
    add_texts(store, turns)
    spans = 'SELECT name, start, "end" FROM spans WHERE attempt = ? AND sample_id = ? ORDER BY start'
    return {
        **sample,
        **{name: sample[name] or {} for name in ("metrics", "tags", "golden", "divergences")},
        "info_turns": _json(sample["info_turns"]),
        "turns": turns,
        "tool_calls": sorted(whole["tool_calls"], key=lambda row: row["call"]),
        "info": sorted(whole["info"], key=lambda row: (row["number"], row["key"])),
        "spans": store.rows(spans, [attempt, sample_id]),
    }


def add_tokens(turns: Sequence[Row], sequences: Sequence[Row]) -> None:
    """Gives each answer of the model its part of the recorded training sequences.

    Tokens that the model sampled have a version of 0 or more, in the order of the answers.
    """
    sampled = [
        {
            "token_ids": sequence["token_ids"][place],
            "logprobs": sequence["engine_logprobs"][place],
            "trainer_logprobs": sequence["trainer_logprobs"][place],
            "entropies": sequence["entropies"][place],
            "versions": sequence["versions"][place],
            "mask": sequence["trained"][place],
        }
        for sequence in sequences
        for place, version in enumerate(sequence["versions"] or ())
        if version >= 0
    ]
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    lengths = [turn["num_tokens"] or 0 for turn in answers]
    if not sampled or sum(lengths) != len(sampled):
        return
    begin = 0
    for turn, length in zip(answers, lengths, strict=True):
        own = sampled[begin : begin + length]
        begin += length
        turn.update({name: [token[name] for token in own] for name in sampled[0]})


def add_texts(store: RunStore, turns: Sequence[Row]) -> None:
    """Gives each turn with token ids the texts of its tokens, if the run's tokenizer is on this machine."""
    if not any(turn.get("token_ids") for turn in turns):
        return
    model = config_of(store.run)[0].get("model")
    tokenizer = find_tokenizer(store.run.files.run_dir, model if isinstance(model, str) else None)
    if tokenizer is None:
        return
    for turn in turns:
        if turn.get("token_ids"):
            turn["tokens"] = token_texts(tokenizer, turn["token_ids"])


def _few_texts(store: RunStore, rows: Sequence[Row]) -> bool:
    """Returns whether the beginnings of these rows are quick to read: in a small record, or all within a few steps."""
    steps = [row["step"] for row in rows if row["step"] is not None]
    if not steps or max(steps) - min(steps) <= NEAR_STEPS:
        return True
    return sum(file.num_bytes for file in store.run.table_files("samples")) <= SMALL_BYTES


def _beginnings(store: RunStore, members: Sequence[Row]) -> dict[tuple[int, str], Row]:
    steps = [row["step"] for row in members if row["step"] is not None]
    if not steps:
        return {}
    ids = ", ".join(str(group) for group in {row["group_id"] for row in members})
    return store.beginnings(f"step BETWEEN {min(steps)} AND {max(steps)} AND group_id IN ({ids})", BEGINNING)


def _condition(name: str, values: Sequence[str]) -> str:
    """Returns an SQL condition for the chosen values of a facet."""
    if name not in ("reward", "age"):
        return f"{name} IN ({', '.join(sql_text(value) for value in values)})"
    each = []
    for value in values:
        bounds = _RANGE.match(value)
        low, high = (_number(bounds[1]), _number(bounds[2])) if bounds else (_number(value), _number(value))
        each.append(f"({name} >= {low!r} AND {name} <= {high!r})")
    return f"({' OR '.join(each)})"


def _grouped(
    store: RunStore, names: Sequence[str], source: str, where: str, parameters: Sequence[Any]
) -> dict[str, dict[Any, int]]:
    """Returns how many samples have each value of each column, in one pass over them."""
    counted: dict[str, dict[Any, int]] = {name: {} for name in names}
    if names:
        sets = ", ".join(f"({name})" for name in names)
        shown = ", ".join(f"grouping({name}), {name}" for name in names)
        sql = f"SELECT count(*), {shown} FROM {source} WHERE {where} GROUP BY GROUPING SETS ({sets})"
        for number, *cells in store.fetch(sql, parameters):
            place = next(place for place in range(len(names)) if cells[2 * place] == 0)
            counted[names[place]][cells[2 * place + 1]] = number
    return counted


def _facet(name: str, every: Sequence[Any], counted: Mapping[Any, int]) -> list[dict[str, Any]]:
    """Returns each value with its count. Values without any stay, with 0; many rewards become ranges."""
    if name == "reward" and len(every) > MOST_VALUES:
        ranges = []
        for low, high in pairwise(_edges(every[0], every[-1])):
            inside = sum(count for value, count in counted.items() if value is not None and low <= value <= high)
            ranges.append({"value": f"{low:g} to {high:g}", "count": inside})
        return ranges
    return [{"value": _shown(value), "count": counted.get(value, 0)} for value in every]


def _edges(low: float, high: float) -> list[float]:
    """Returns round edges of ranges that cover [low, high]."""
    width = (high - low) / NUM_RANGES
    unit = 10.0 ** math.floor(math.log10(width))
    width = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= width)
    first = math.floor(low / width)
    return [width * number for number in range(first, math.ceil(high / width) + 1)]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _number(text: str) -> float:
    """Reads a number of a facet. Raises `UserError` for anything else."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{text!r} is not a number. Use a value or a range that a facet lists, such as `0 to 0.5`.")
    return number


def _json(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text
