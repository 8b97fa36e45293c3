"""Evaluates the rules after each step of a live run, and reports new findings.

Owns the history that the rules read, and the repetition of alerts. A problem is reported again only after it has been
gone for `rules.WINDOW` steps or has lasted for `SILENT_STEPS`, so that a lasting or flickering problem is not an alert
per step.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from telescope.health import rules
from telescope.health.rules import EvalPoint, Finding, History

SILENT_STEPS = 100

DISK_SILENT_SECONDS = 3600.0


class Watch:
    """Watches one run with a `config`. Not thread-safe. Memory: 8 numbers per step and metric that a rule reads."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._config = config or {}
        self._steps: list[int] = []
        self._seconds: list[float] = []
        self._columns: dict[str, list[float | None]] = {name: [] for name in rules.READ}
        self._evals: list[EvalPoint] = []
        self._seen_at: dict[str, int] = {}
        self._fired_at: dict[str, int] = {}
        self._stalled_after: int | None = None
        self._disk_at: dict[str, float] = {}

    @property
    def history(self) -> History:
        return History(self._columns, self._steps, self._evals, self._config)

    def resume(self, steps: Iterable[tuple[int, Mapping[str, float]]], evals: Iterable[EvalPoint]) -> None:
        """Loads the steps and evals of earlier attempts. What they had reported is not reported again."""
        for step, metrics in steps:
            self._add(step, metrics)
        self._evals.extend(evals)
        for found in rules.findings(self.history):
            self._fired_at[found.kind] = self._seen_at[found.kind] = self._steps[-1]

    def after_step(self, step: int, metrics: Mapping[str, float], seconds: float | None = None) -> list[Finding]:
        """Returns new findings after a step of `seconds`. A step that is trained again replaces the earlier one."""
        self._add(step, metrics)
        if seconds is not None:
            self._seconds = [*self._seconds[1 - rules.WINDOW :], seconds]
        return self._news()

    def after_eval(self, point: EvalPoint) -> list[Finding]:
        self._evals.append(point)
        return self._news() if self._steps else []

    def while_waiting(self, silence: float) -> list[Finding]:
        """Returns a stall, once. `silence` is the seconds since the last step ended."""
        usual = statistics.median(self._seconds) if self._seconds else None
        found = rules.stalled(silence, usual)
        if found is None or self._stalled_after == self._steps[-1]:
            return []
        self._stalled_after = self._steps[-1]
        return [found]

    def check_disk(self, free: float, total: float, folder: str, now: float) -> list[Finding]:
        """Returns a nearly full disk, once per hour and level. Sizes in bytes, `now` in seconds."""
        found = rules.disk(free, total, folder)
        if found is None or now - self._disk_at.get(found.level, -math.inf) < DISK_SILENT_SECONDS:
            return []
        self._disk_at[found.level] = now
        return [found]

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._steps and step <= self._steps[-1]:
            kept = sum(one < step for one in self._steps)
            del self._steps[kept:]
            for values in self._columns.values():
                del values[kept:]
            self._evals = [point for point in self._evals if point.step < step]
        for name, value in metrics.items():
            if name not in self._columns and not math.isfinite(value):
                self._columns[name] = [None] * len(self._steps)
        for name, values in self._columns.items():
            values.append(metrics.get(name))
        self._steps.append(step)

    def _news(self) -> list[Finding]:
        step = self._steps[-1]
        news = []
        for found in rules.findings(self.history):
            kind = found.kind
            gone = step - self._seen_at.get(kind, -math.inf) > rules.WINDOW
            if gone or step - self._fired_at.get(kind, -math.inf) >= SILENT_STEPS:
                self._fired_at[kind] = step
                news.append(found)
            self._seen_at[kind] = step
        return news
