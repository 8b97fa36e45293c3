"""Rows of the record about sandboxes: a span per provider call, and gauges over all rollout workers.

A worker encodes the spans, so the driver does no work per call.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from telescope.record.convert import Batch, decode, encode
from telescope.record.tables import TABLES
from telescope.sandbox.activity import Activity, SandboxSpan

GAUGE_SECONDS = 5.0
"""Interval of the gauges."""

NAMES = {"execute": "exec", "upload_bytes": "upload", "upload_file": "upload", "read_bytes": "read"}
"""Names of operations in the record. Other methods keep their own names."""

TOTALS = {"create": "sandbox_creates_total", "exec": "sandbox_execs_total"}
"""Gauges that count successful operations."""


@dataclass(slots=True)
class SandboxNews:
    """A worker's sandbox activity since its last report, and its number of sandboxes by provider."""

    spans: bytes | None
    """Encoded rows of `spans`."""
    alive: dict[str, int]
    counts: Counter[tuple[str, str, str]]
    """Operations by kind, provider and error."""


def sandbox_news(activity: Activity, worker: int) -> SandboxNews | None:
    """Returns the activity since the last call. None if there never was any."""
    spans, counts, alive = activity.take()
    if not (counts or alive):
        return None
    rows = [_span_row(span, worker) for span in spans]
    return SandboxNews(encode(TABLES["spans"], rows, set()) if rows else None, alive, counts)


def _span_row(span: SandboxSpan, worker: int) -> dict[str, Any]:
    attributes = {"provider": span.provider, "sandbox": span.sandbox_id, "error": span.error, "worker": str(worker)}
    return {
        "name": NAMES.get(span.kind, span.kind),
        "component": "sandbox",
        "sample_id": span.sample_id or None,
        "start": span.start,
        "end": span.end,
        "attributes": {name: value for name, value in attributes.items() if value},
    }


class SandboxRecord:
    """The driver's side: writes the workers' spans as they arrive, and gauges at intervals from the first use."""

    def __init__(self, write: Callable[[str, dict[str, Any] | Batch], None]) -> None:
        self._write = write
        self._alive: dict[int, dict[str, int]] = {}
        """Live sandboxes by worker and provider."""
        self._totals: Counter[tuple[str, str, str, str]] = Counter()
        """Totals by gauge, provider, operation and error."""
        self._due = 0.0

    def add(self, worker: int, news: SandboxNews | None) -> None:
        if news is not None:
            self._alive[worker] = news.alive
            if news.spans is not None:
                self._write("spans", Batch(decode(TABLES["spans"], news.spans), len(news.spans)))
            for (kind, provider, error), number in news.counts.items():
                name = NAMES.get(kind, kind)
                if error and error != "CancelledError":
                    self._totals["sandbox_failures_total", provider, name, error] += number
                elif not error and name in TOTALS:
                    self._totals[TOTALS[name], provider, "", ""] += number
        if time.monotonic() >= self._due:
            self.write_gauges()

    def lost(self, worker: int) -> None:
        """Forgets the sandboxes of a lost worker."""
        self._alive.pop(worker, None)

    def write_gauges(self) -> None:
        now, self._due = time.time(), time.monotonic() + GAUGE_SECONDS
        alive = Counter(dict.fromkeys((provider for _, provider, *_ in self._totals), 0))
        for of_worker in self._alive.values():
            alive.update(of_worker)
        values = {("sandboxes_alive", provider, "", ""): number for provider, number in alive.items()}
        for name in TOTALS.values():  # a counter must begin at 0, or its first increase would be invisible
            values |= {(name, provider, "", ""): 0 for provider in alive}
        for (name, provider, operation, error), number in (values | self._totals).items():
            labels = {"provider": provider} | ({"operation": operation, "error": error} if error else {})
            row = {"time": now, "name": name, "component": "sandbox", "value": float(number), "labels": labels}
            self._write("gauges", row)
