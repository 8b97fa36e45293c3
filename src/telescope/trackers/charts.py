"""Turns rows of the record into numbers for charts and into histograms of steps, for trackers."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from telescope.trackers.base import Histogram

SECTIONS = {"host": "system", "gpu": "system", "trainer": "system", "inference": "vllm", "orchestrator": "orchestrator"}
"""Section of each component's charts."""

LEFT_OUT = ("_bucket", "gpu_given", "engine_clock_seconds")
"""Suffixes of gauges that are not useful as charts."""

COUNTERS = ("_total", "_sum", "_count", "network_sent_bytes", "network_received_bytes")
"""Suffixes of gauges that only grow while their process runs."""

Series = tuple[str, str, tuple[str, ...], Any, Any, Any, Any]
"""Component, name, values of labels, node, GPU, rank, server."""


class GaugeCharts:
    """Turns rows of `gauges` into numbers for charts. Keeps the last value of each counter between calls.

    A run samples hundreds of series per second, too many for a tracker. The record has each of them; a tracker gets one
    number over the rows of some seconds and over all machines, GPUs, ranks and servers:

        a gauge        mean; with several series also name/min and name/max of their means
        a counter      growth per second, summed: `..._total` becomes `..._per_second`
        a histogram    mean of the new values: `..._sum` and `..._count` become `..._mean`
    """

    def __init__(self) -> None:
        self._last: dict[Series, tuple[float, float]] = {}

    def values(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        """Returns the numbers of new rows by the names of their charts."""
        readings: dict[Series, list[tuple[float, float]]] = defaultdict(list)
        for row in rows:
            if row["value"] is not None and not row["name"].endswith(LEFT_OUT):
                labels = tuple(value or "" for _, value in sorted(dict(row["labels"] or ()).items()))
                series = (row["component"], row["name"], labels, row["node"], row["gpu"], row["rank"], row["server"])
                readings[series].append((row["time"], row["value"]))
        means: dict[str, list[float]] = defaultdict(list)
        rates: dict[str, float] = defaultdict(float)
        sums: dict[str, float] = defaultdict(float)
        counts: dict[str, float] = defaultdict(float)
        for series, found in readings.items():
            name = series[1]
            if not name.endswith(COUNTERS):
                means[_chart(series, name)].append(sum(value for _, value in found) / len(found))
                continue
            before, earlier = self._last.get(series, found[0])
            now, value = self._last[series] = found[-1]
            grown = value - earlier if value >= earlier else value  # a counter starts from 0 with its process
            if name.endswith("_sum"):
                sums[_chart(series, name.removesuffix("_sum"))] += grown
            elif name.endswith("_count"):
                counts[_chart(series, name.removesuffix("_count"))] += grown
            elif now > before:
                rates[_chart(series, f"{name.removesuffix('_total')}_per_second")] += grown / (now - before)
        charts = {chart: sum(each) / len(each) for chart, each in means.items()} | rates
        for chart, each in means.items():
            charts |= {f"{chart}/min": min(each), f"{chart}/max": max(each)} if len(each) > 1 else {}
        return charts | {f"{chart}_mean": sums[chart] / n for chart, n in counts.items() if n and chart in sums}


def _chart(series: Series, name: str) -> str:
    """Returns the name of a chart: section, name without vLLM's prefix, and labels."""
    return "/".join([SECTIONS.get(series[0], series[0]), name.rpartition(":")[2], *series[2]])


class StepHistograms:
    """Turns rows of `step_stats` into the histograms of each step. Each step is yielded once, with all its histograms.

        distribution/<number>                  over all samples of the step
        distribution/<environment>/<number>    over the samples of an environment, if a run has several

    Keeps the rows of the newest step between calls, because more rows may follow.
    """

    def __init__(self, last_step: int = -1) -> None:
        self._rows: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        self._last_step = last_step

    def take(
        self, rows: Iterable[Mapping[str, Any]], *, last: bool = False
    ) -> Iterator[tuple[int, dict[str, Histogram]]]:
        """Adds new rows and yields the complete steps in order. With `last`, no more rows follow."""
        for row in rows:
            # If the trainer restarts from an earlier step, steps that were sent are not sent again.
            if row["step"] > self._last_step and row["histogram"]:
                self._rows[row["step"]].append(row)
        for step in sorted(self._rows)[: None if last else -1]:
            self._last_step = step
            of_step = self._rows.pop(step)
            has_several = len({row["environment"] for row in of_step} - {""}) > 1
            shown = [row for row in of_step if has_several or not row["environment"]]
            names = ["/".join(filter(None, ("distribution", row["environment"], row["metric"]))) for row in shown]
            yield step, {name: (row["histogram"], row["bin_edges"]) for name, row in zip(names, shown, strict=True)}
