"""Sends server-sent events about runs: growing tables and changes of status.

One stream serves all runs of a page, because a browser opens at most six connections to a server. An event's id has the
number of rows of each table, so that a page that reconnects gets exactly the events that it missed.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import msgspec
import pydantic_core

from telescope.dashboard.remote import RemoteCopy, RunCopy
from telescope.record.reader import Run
from telescope.record.tables import IN_FLIGHT, TABLES

LIVE_SECONDS = 1.0
"""Time between two polls of a live run's folders. A run flushes every 2 seconds."""

ENDED_SECONDS = 5.0
"""Time between two polls of an ended run, which may be resumed."""

CHECK_SECONDS = 0.5
"""Longest time between two checks whether the page or the server is gone."""

KEEPALIVE_SECONDS = 10.0
"""Time between two empty events, which keep the connection open in proxies and show a page that the server works."""

RETRY_MILLISECONDS = 1000

REMOVED = "removed"
"""Status of a run whose folder was removed or moved. A page reads a run again when its status changes."""


class TableSizes:
    """Counts the rows of each table of a run. Lists a folder again only if it has changed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: dict[str, tuple[int, int]] = {}

    def read(self) -> dict[str, int]:
        """Returns the number of rows of each existing table."""
        for name in TABLES:
            folder = self._run.files.table(name)
            try:
                modified = folder.stat().st_mtime_ns
                if self._seen.get(name, (0, 0))[0] != modified:
                    self._seen[name] = (modified, self._run.num_rows(name))
            except OSError:  # there is no such table, or a network drive fails and the next poll may succeed
                continue
        sizes = {name: rows for name, (_, rows) in self._seen.items()}
        with suppress(OSError):
            # This is a replaced file, not a table, so its time replaces the number of rows.
            sizes[IN_FLIGHT] = self._run.files.in_flight.stat().st_mtime_ns
        return sizes


async def run_events(
    runs: Mapping[str, Run],
    last_id: str | None,
    is_gone: Callable[[], Awaitable[bool]],
    copies: Mapping[str, RunCopy] | None = None,
) -> AsyncIterator[bytes]:
    """Yields the events of some runs until the page is gone. `copies` are the copies of runs on W&B."""
    copies = copies or {}
    shown: dict[str, RemoteCopy] = {}
    sizes = {run_id: TableSizes(run) for run_id, run in runs.items()}
    sent = parse_id(last_id)
    states: dict[str, str] = {}
    due = dict.fromkeys(runs, 0.0)
    yield f"retry: {RETRY_MILLISECONDS}\n\n".encode()
    silent = 0.0
    while not await is_gone():
        for run_id in [run_id for run_id in runs if due[run_id] <= 0]:
            now, state = await asyncio.to_thread(_look, sizes[run_id], runs[run_id])
            before = sent.get(run_id, {})
            grown = {name: rows for name, rows in now.items() if before.get(name) != rows}
            sent[run_id] = now
            # First, because a page that gets the sizes of an ended run need not read its tables again.
            if state != states.get(run_id):
                states[run_id] = state
                yield _event("status", {"run": run_id, "status": state}, sent)
            copy = copies[run_id].state if run_id in copies else None
            if copy is not None and copy != shown.get(run_id):
                shown[run_id] = copy
                yield _event("remote", {"run": run_id, "remote": asdict(copy)}, sent)
            if grown:
                silent = 0.0
                yield _event("tables", {"run": run_id, "tables": grown}, sent)
            changes = state == "live" or (copy is not None and copy.phase in ("listed", "syncing"))
            due[run_id] = LIVE_SECONDS if changes else ENDED_SECONDS
        seconds = min(CHECK_SECONDS, *due.values())
        silent += seconds
        if silent >= KEEPALIVE_SECONDS:
            silent = 0.0
            yield b"event: alive\ndata: 0\n\n"
        await asyncio.sleep(seconds)
        due = {run_id: left - seconds for run_id, left in due.items()}


def _look(sizes: TableSizes, run: Run) -> tuple[dict[str, int], str]:
    return sizes.read(), run.status if run.files.run_dir.is_dir() else REMOVED


def parse_id(text: str | None) -> dict[str, dict[str, int]]:
    """Parses an id: `{"first": {"steps": 12, "samples": 1536}}`. Returns an empty dictionary for anything else."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, dict[str, int]])
    except msgspec.DecodeError:
        return {}


def _event(name: str, data: dict[str, Any], sizes: Mapping[str, Any]) -> bytes:
    return f"event: {name}\nid: {json.dumps(sizes)}\ndata: ".encode() + pydantic_core.to_json(data) + b"\n\n"
