"""Builds a sample's rows of the record: turns, tool calls, notes and spans.

A rollout worker encodes the rows of all samples in a report together, so the driver builds only the rows of `samples`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from telescope.environments.tool_env import TOOL_RESULT
from telescope.record.convert import Batch, decode, encode
from telescope.record.tables import TABLES
from telescope.rollout.trajectory import Trajectory, Turn

Interval = tuple[str, float, float, dict[str, str]]  # name, start and end of a span, and its own attributes


Encoded = dict[str, tuple[bytes, list[int]]]
"""Rows of some samples: by table an encoded batch, and the number of rows of each sample."""


def encode_rows(samples: Sequence[Trajectory], warned: set[str]) -> Encoded:
    """Encodes the rows of ended samples together, and clears the fields that only these rows need.

    Warns of values that do not fit, once for each column that is not in `warned` yet.
    """
    encoded: Encoded = {}
    for table, rows_of in _TABLES.items():
        made = [rows_of(sample) for sample in samples]
        if rows := [row for each in made for row in each]:
            encoded[table] = encode(TABLES[table], rows, warned), [len(each) for each in made]
    for sample in samples:
        for turn in sample.turns:
            turn.text, turn.replies, turn.tool_calls = "", [], []
        if sample.reward is not None:
            sample.reward.info_turns.clear()
    return encoded


def assign_rows(samples: Sequence[Trajectory], encoded: Encoded) -> None:
    """Gives samples their `rows` from the result of `encode_rows`."""
    for table, (message, counts) in encoded.items():
        batch, first = decode(TABLES[table], message), 0
        for sample, count in zip(samples, counts, strict=True):
            if count:
                sample.rows[table] = Batch(batch.slice(first, count), len(message) * count // batch.num_rows)
            first += count


def turn_rows(sample: Trajectory) -> list[dict[str, Any]]:
    """Returns the rows of `turns`: the messages of model and environment in order."""
    rows: list[dict[str, Any]] = []
    answers: list[int] = []
    """Row of each completion."""

    def add(role: str, text: str, num_tokens: int, started_at: float, ended_at: float, **of_reply: Any) -> None:
        message = {"role": role, "text": text, "num_tokens": num_tokens, "started_at": started_at, "ended_at": ended_at}
        joined = dict.fromkeys(("turn_type", "restarts", "divergence", "chat", "parent", "trained")) | of_reply
        rows.append({"sample_id": sample.sample_id, "turn": len(rows), **message, **joined})

    for index, turn in enumerate(sample.turns):
        asked_at = turn.started_at if turn.parent is None else sample.turns[turn.parent].ended_at
        of_turn = {"chat": turn.chat or None, "parent": None if turn.parent is None else answers[turn.parent]}
        for number, (role, text, *turn_type) in enumerate(turn.replies):
            # Messages of one reply are tokenized together.
            added = turn.added_token_ids if number == 0 else []
            kind = (turn_type[0] or None) if turn_type else None
            restarts = index > 0 and turn.parent is None
            of_reply = {"turn_type": kind, "restarts": restarts, "divergence": turn.divergence}
            add(role, text, len(added), asked_at, turn.started_at, **of_reply, **of_turn)
        answers.append(len(rows))
        of_turn["trained"] = turn.trained
        add("assistant", turn.text, len(turn.generation.token_ids_N), turn.started_at, turn.ended_at, **of_turn)
    return rows


def tool_call_rows(sample: Trajectory) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    firsts = [0, *accumulate(len(turn.replies) + 1 for turn in sample.turns)]  # first row in `turns` of each turn
    following: dict[int | None, list[tuple[int, str]]] = {}
    """Tool results after each completion, with their rows in `turns`."""
    is_loop = bool(sample.turns) and not sample.turns[0].replies  # then a turn that restarts follows the turn before it
    for index, turn in enumerate(sample.turns):
        before = index - 1 if turn.parent is None and is_loop else turn.parent
        replies = enumerate(turn.replies, firsts[index])
        results = [(row, reply[1]) for row, reply in replies if reply[0] == "tool" or reply[2:] == (TOOL_RESULT,)]
        following.setdefault(before, results)
    for index, turn in enumerate(sample.turns):
        results, num_calls = following.get(index, []), len(turn.tool_calls)
        if len(results) != num_calls:
            results = results * num_calls if len(results) == 1 else []
        padded: Sequence[tuple[int | None, str | None]] = results or [(None, None)] * num_calls
        for call, (reply, text) in zip(turn.tool_calls, padded, strict=False):
            of_call = {"sample_id": sample.sample_id, "turn": index, "call": len(rows), "result": text}
            rows.append({**of_call, **call, "reply": reply})
    return rows


def info_rows(sample: Trajectory) -> list[dict[str, Any]]:
    """Returns the rows of `info`: one per key of each note."""
    rows = []
    for number, note in enumerate(sample.reward.info_turns if sample.reward is not None else ()):
        values = dict(note) if isinstance(note, dict) else {"": note}
        where = "turn_order" if "info_key" in values else "turn"
        turn = values.pop(where) if isinstance(values.get(where), int) else number
        kind = None
        if "info_key" in values:
            kind = values.get("info_type") and str(values["info_type"])
            values = {str(values["info_key"]): values.get("info_value")}
        for key, value in values.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            row = {"sample_id": sample.sample_id, "number": number, "turn": turn, "key": key, "value": text}
            rows.append({**row, "type": kind})
    return rows


def sample_span_rows(sample: Trajectory) -> list[dict[str, Any]]:
    """Returns a sample's spans: per turn the generation, and the environment's reply with its tool calls.

    What an agent does before its first call precedes the first turn. While other calls of the sample run there is no
    reply. The reply to the last turn is the reward. Durations of tool calls are measured, but not their starts: the
    calls of a turn are placed one after the other, or all at the start of the reply if they took longer than it in
    total.
    """
    rows: list[dict[str, Any]] = []
    # Turns are sorted by their end: the next request is the earliest start among the later turns.
    starts = [sample.finished_at, *accumulate((turn.started_at for turn in sample.turns[:0:-1]), min)][::-1]
    for index, (turn, replied_at) in enumerate(zip(sample.turns, starts, strict=False)):
        is_last = index == len(sample.turns) - 1
        intervals: list[Interval] = [("generate", turn.started_at, turn.ended_at, {})]
        if index == 0 and sample.agent_started_at is not None:
            first_at = min(each.started_at for each in sample.turns)
            intervals.insert(0, ("environment", sample.agent_started_at, first_at, {}))
        if replied_at > turn.ended_at:
            intervals += [("reward" if is_last else "environment", turn.ended_at, replied_at, {})]
            intervals += _tool_intervals(turn, replied_at)
        common = {"component": "rollout", "server": turn.server, "sample_id": sample.sample_id}
        place = {"turn": str(index), "lane": str(turn.slot)}
        for name, start, end, more in intervals:
            rows.append({**common, "name": name, "start": start, "end": end, "attributes": {**place, **more}})
    return rows


def _tool_intervals(turn: Turn, replied_at: float) -> Iterator[Interval]:
    calls = [(call["name"], call["seconds"]) for call in turn.tool_calls if call["seconds"]]
    one_by_one = sum(seconds for _, seconds in calls) <= replied_at - turn.ended_at
    start = turn.ended_at
    for name, seconds in calls:
        yield "tool", start, min(start + seconds, replied_at), {"tool": name}
        start += seconds if one_by_one else 0.0


_TABLES = {"turns": turn_rows, "tool_calls": tool_call_rows, "info": info_rows, "spans": sample_span_rows}
