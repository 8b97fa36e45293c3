"""What a live run does right now: plain data for the API.

Owns how `now.json`, the samples in flight and the newest gauges become one answer. Needs no database.
"""

from __future__ import annotations

import time
from typing import Any

import pyarrow.compute as pc

from telescope.record.reader import Run

NEWEST_GAUGES = 4000
"""Rows of gauges, from the end, that are looked through: those of about 20 seconds."""

WAITING = "vllm:num_requests_waiting"


def now_of(run: Run) -> dict[str, Any]:
    """Returns phase, requests, servers and queue of a run. `live` is false, and the rest empty, when it has ended."""
    now = run.now()
    if now is None:
        now = {}
    components = {str(part): str(doing) for part, doing in (now.get("components") or {}).items()}
    numbers = ("time", "phase", "step", "version", "num_generating", "num_slots", "eval_done", "eval_total")
    rates = ("num_open_groups", "num_finished_groups", "tokens_per_second", "seconds_left")
    oldest, tokens = _in_flight(run) if now else (None, 0)
    return {
        "live": run.status == "live",
        **{name: now.get(name) for name in (*numbers, *rates)},
        "trainer": components.pop("trainer", None),
        "servers": [
            {"name": part, "doing": components.pop(part)}
            for part in sorted(components, key=_number)
            if part.startswith("server ")
        ],
        "components": components,
        "num_waiting": _waiting(run) if now else None,
        "oldest_seconds": None if oldest is None else max(0.0, time.time() - oldest),
        "tokens_in_flight": tokens,
    }


def _in_flight(run: Run) -> tuple[float | None, int]:
    """Returns when the oldest running sample began, and the tokens of all."""
    rows = run.in_flight()
    return pc.min(rows["started_at"]).as_py(), pc.sum(rows["completion_tokens"]).as_py() or 0


def _waiting(run: Run) -> int | None:
    """Returns the requests that wait in the engines, by their newest gauges. None if they are not recorded."""
    rows, _ = run.rows_since("gauges", max(0, run.num_rows("gauges") - NEWEST_GAUGES), ["name", "server", "value"])
    rows = rows.filter(pc.equal(rows["name"], WAITING))
    newest = dict(zip(rows["server"].to_pylist(), rows["value"].to_pylist(), strict=True))
    return int(sum(newest.values())) if newest else None


def _number(part: str) -> tuple[int, str]:
    last = part.rpartition(" ")[2]
    return (int(last) if last.isdecimal() else 0, part)
