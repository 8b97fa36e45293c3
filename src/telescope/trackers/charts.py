"""Turns rows of the record into what trackers draw: numbers of gauges, and histograms of steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from telescope.trackers.base import Histogram

SECTIONS = {"host": "system", "gpu": "system", "trainer": "system", "inference": "vllm", "orchestrator": "orchestrator"}
"""Section of the charts of each component."""

LEFT_OUT = ("_bucket", "gpu_given", "engine_clock_seconds")
"""Endings of gauges that are no number to look at."""

SINCE_START = ("network_sent_bytes", "network_received_bytes")
"""Counters whose name does not end like one."""

Series = tuple[str, str, tuple[tuple[str, str | None], ...], Any, Any, Any, Any]
"""Component, name, labels, node, GPU, rank, server."""


class GaugeCharts:
    """Turns rows of `gauges` into the numbers of charts. Keeps the last value of each counter between calls.

    A run samples hundreds of series per second: too many lines for a chart of a tracker, where the record has each of
    them. Over the rows of some seconds, and over all machines, GPUs, ranks and servers:

        a gauge        mean; with several series also name/min and name/max of their means
        a counter      growth per second, summed: `..._total` becomes `..._per_second`
        a histogram    mean of the new values: `..._sum` and `..._count` become `..._mean`
    """

    def __init__(self) -> None:
        self._last: dict[Series, tuple[float, float]] = {}

    def values(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        """Returns the numbers of new rows, by the name of their chart."""
        gauges: dict[str, dict[Series, list[float]]] = defaultdict(lambda: defaultdict(list))
        newest: dict[Series, tuple[float, float]] = {}
        for row in rows:
            name, value = row["name"], row["value"]
            if value is None or name.endswith(LEFT_OUT):
                continue
            labels = tuple(sorted(dict(row["labels"] or ()).items()))
            series = (row["component"], name, labels, row["node"], row["gpu"], row["rank"], row["server"])
            if name.endswith(("_total", "_sum", "_count", *SINCE_START)):
                newest[series] = (row["time"], value)
                self._last.setdefault(series, newest[series])
            else:
                gauges[_chart(series, name)][series].append(value)
        charts = {}
        for chart, of_series in gauges.items():
            means = [sum(each) / len(each) for each in of_series.values()]
            charts[chart] = sum(means) / len(means)
            if len(means) > 1:
                charts |= {f"{chart}/min": min(means), f"{chart}/max": max(means)}
        rates: dict[str, float] = defaultdict(float)
        sums: dict[str, float] = defaultdict(float)
        counts: dict[str, float] = defaultdict(float)
        for series, (now, value) in newest.items():
            name = series[1]
            before, earlier = self._last[series]
            grown = value - earlier if value >= earlier else value  # it starts from 0 with its process
            if name.endswith("_sum"):
                sums[_chart(series, name.removesuffix("_sum"))] += grown
            elif name.endswith("_count"):
                counts[_chart(series, name.removesuffix("_count"))] += grown
            elif now > before:
                rates[_chart(series, f"{name.removesuffix('_total')}_per_second")] += grown / (now - before)
        self._last |= newest
        averages = {f"{chart}_mean": sums[chart] / count for chart, count in counts.items() if count and chart in sums}
        return charts | rates | averages


def _chart(series: Series, name: str) -> str:
    """Returns the name of the chart: section, name without vLLM's prefix, and its labels."""
    component, _, labels, *_ = series
    texts = [value or "" for _, value in labels]
    return "/".join([SECTIONS.get(component, str(component)), name.rpartition(":")[2], *texts])


class StepHistograms:
    """Turns rows of `step_stats` into the histograms of each step. A step comes once, with all of them.

        distribution/<number>                  over all samples of the step
        distribution/<environment>/<number>    over those of an environment, in a run of several

    Keeps the rows of the newest step between calls, because more of them may come.
    """

    def __init__(self, last_step: int = -1) -> None:
        self._rows: dict[int, list[Mapping[str, Any]]] = {}
        self._last_step = last_step

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
