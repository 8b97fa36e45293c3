"""Server-sent events of a run: which tables grew, and changes of its status.

An event's id has the number of rows of each table, so that a page that reconnects gets what it missed and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pydantic_core

from telescope.record.reader import Run
from telescope.record.segments import snapshot
from telescope.record.tables import TABLES

LIVE_SECONDS = 1.0
"""Time between two looks at the folders of a live run. A run flushes every 2 seconds."""

ENDED_SECONDS = 5.0
"""The same for a run that has ended, and may be resumed."""

KEEPALIVE_SECONDS = 20.0
"""Time between two comments, so that proxies keep a silent connection open."""

RETRY_MILLISECONDS = 1000


class TableSizes:
    """Rows of each table of a run. A folder that did not change is not listed again."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: dict[str, tuple[int, int]] = {}

    def read(self) -> dict[str, int]:
        """Returns the number of rows of each table that exists."""
        for name in TABLES:
            folder = self._run.files.table(name)
            try:
                modified = folder.stat().st_mtime_ns
            except OSError:
                continue
            if self._seen.get(name, (0, 0))[0] != modified:
                self._seen[name] = (modified, snapshot(folder).end)
        return {name: rows for name, (_, rows) in self._seen.items()}


async def run_events(run: Run, last_id: str | None, is_gone: Callable[[], Awaitable[bool]]) -> AsyncIterator[bytes]:
    """Yields the events of a run until the page is gone."""
    sizes = TableSizes(run)
    sent = parse_id(last_id)
    status = None
    yield f"retry: {RETRY_MILLISECONDS}\n\n".encode()
    silent = 0.0
    while not await is_gone():
        now, state = await asyncio.to_thread(lambda: (sizes.read(), run.status))
        grown = {name: rows for name, rows in now.items() if sent.get(name) != rows}
        if grown:
            sent = now
            yield _event("tables", {"tables": grown}, format_id(now))
        if state != status:
            status = state
            yield _event("status", {"status": state}, format_id(now))
        seconds = LIVE_SECONDS if state == "live" else ENDED_SECONDS
        silent = 0.0 if grown else silent + seconds
        if silent >= KEEPALIVE_SECONDS:
            silent = 0.0
            yield b": still here\n\n"
        await asyncio.sleep(seconds)


def format_id(sizes: dict[str, int]) -> str:
    """Returns the id of an event: `steps=12,samples=1536`."""
    return ",".join(f"{name}={rows}" for name, rows in sorted(sizes.items()))


def parse_id(text: str | None) -> dict[str, int]:
    """Reads what `format_id` wrote. Anything else is ignored."""
    pairs = (part.partition("=") for part in (text or "").split(","))
    return {name: int(rows) for name, _, rows in pairs if name in TABLES and rows.isdecimal()}


def _event(name: str, data: dict[str, Any], event_id: str) -> bytes:
    return f"event: {name}\nid: {event_id}\ndata: ".encode() + pydantic_core.to_json(data) + b"\n\n"
