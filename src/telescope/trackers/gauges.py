"""Turns rows of the table `gauges` into the numbers of a chart.

A run samples hundreds of series per second: too many lines for a chart of a tracker, where the record has each of them.
Over the rows of some seconds, and over all machines, GPUs, ranks and servers:

    a gauge        mean; with several series also name/min and name/max of their means
    a counter      growth per second, summed: `..._total` becomes `..._per_second`
    a histogram    mean of the new values: `..._sum` and `..._count` become `..._mean`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

SECTIONS = {"host": "system", "gpu": "system", "trainer": "system", "inference": "vllm", "orchestrator": "orchestrator"}
"""Section of the charts of each component."""

LEFT_OUT = ("_bucket", "gpu_given", "engine_clock_seconds")
"""Endings of gauges that are no number to look at."""

SINCE_START = ("network_sent_bytes", "network_received_bytes")
"""Counters whose name does not end like one."""

Series = tuple[str, str, tuple[tuple[str, str | None], ...], Any, Any, Any, Any]
"""Component, name, labels, node, GPU, rank, server."""


class GaugeCharts:
    """Keeps the last value of each counter between calls."""

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
        return charts | self._growth(newest)

    def _growth(self, newest: dict[Series, tuple[float, float]]) -> dict[str, float]:
        rates: dict[str, float] = defaultdict(float)
        sums: dict[str, float] = defaultdict(float)
        counts: dict[str, float] = defaultdict(float)
        for series, (now, value) in newest.items():
            name = series[1]
            before, earlier = self._last[series]
            self._last[series] = (now, value)
            grown = value - earlier if value >= earlier else value  # it starts from 0 with its process
            if name.endswith("_sum"):
                sums[_chart(series, name.removesuffix("_sum"))] += grown
            elif name.endswith("_count"):
                counts[_chart(series, name.removesuffix("_count"))] += grown
            elif now > before:
                rates[_chart(series, f"{name.removesuffix('_total')}_per_second")] += grown / (now - before)
        means = {f"{chart}_mean": sums[chart] / count for chart, count in counts.items() if count and chart in sums}
        return dict(rates) | means


def _chart(series: Series, name: str) -> str:
    """Returns the name of the chart: section, name without vLLM's prefix, and its labels."""
    component, _, labels, *_ = series
    texts = [value or "" for _, value in labels]
    return "/".join([SECTIONS.get(component, str(component)), name.rpartition(":")[2], *texts])
