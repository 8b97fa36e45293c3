"""Turns rows of the table `step_stats` into the histograms of each step.

    distribution/<number>                  over all samples of the step
    distribution/<environment>/<number>    over those of an environment, in a run of several

Invariant: a step comes once, with all its histograms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from telescope.trackers.base import Histogram


class StepHistograms:
    """Keeps the rows of the newest step between calls, because more of them may come."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Mapping[str, Any]]] = {}
        self._last_step = -1

    def take(
        self, rows: Iterable[Mapping[str, Any]], *, last: bool = False
    ) -> Iterator[tuple[int, dict[str, Histogram]]]:
        """Adds new rows, and yields the steps that are complete, in order. `last`: no more rows come."""
        for row in rows:
            # After a restart of the trainer from an earlier step, what was sent stays.
            if row["step"] > self._last_step and row["histogram"]:
                self._rows.setdefault(row["step"], []).append(row)
        for step in sorted(self._rows)[: None if last else -1]:
            self._last_step = step
            yield step, _histograms(self._rows.pop(step))


def _histograms(rows: list[Mapping[str, Any]]) -> dict[str, Histogram]:
    has_several = len({row["environment"] for row in rows} - {""}) > 1
    shown = [row for row in rows if has_several or not row["environment"]]
    names = ["/".join(filter(None, ("distribution", row["environment"], row["metric"]))) for row in shown]
    return {name: (row["histogram"], row["bin_edges"]) for name, row in zip(names, shown, strict=True)}
