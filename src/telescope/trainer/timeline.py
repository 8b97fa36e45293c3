"""Spans and `timing_*` metrics of a training step, and allocator gauges.

Owns measuring, and the conversion from the device's clock to the wall clock. Times are wall-clock seconds
(`time.time()`), so that spans of several processes are comparable.

Invariants: measuring never waits for the device. On a GPU a span is two events on the stream of the measured work;
`finish` reads them after the wait for the step's metrics. On the CPU the host's clock is read. A timeline that is off
costs one test of a flag. A reading of the allocator copies counters that it keeps anyway and does not touch the stream.

The clocks: an event knows only its time after another event. Nothing happens on the device before the host requests it,
so for every event i: offset + device_i >= host_i. The smallest offset that satisfies all of these is exact to the time
of one launch if the stream was empty at any moment of the step, as it is at its start. Each step computes its offset
anew, so that the clocks do not drift apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from telescope.record.gauges import Reading
from telescope.trainer.batch import Span

OPERATIONS = (
    "forward", "backward", "loss_computation", "compute_kl", "compute_entropy", "data_to_device",
    "prepare_tensors", "gradient_reduction",
)  # fmt: skip
"""Operations that are measured per micro-batch. `compute_entropy` is the fused pass for logprob and entropy;
`gradient_reduction` overlaps `backward`, on a separate stream on a GPU."""

STEP_OPERATIONS = ("gradient_norm", "optimizer")
"""Operations that are measured per optimizer step."""


@dataclass(slots=True)
class _Moment:
    """A point of a stream (None: host time only), and when the host requested it, by `time.perf_counter()`."""

    host: float
    event: torch.cuda.Event | None = None


@dataclass(slots=True)
class _Mark:
    name: str
    micro_batch: int | None
    start: _Moment
    end: _Moment


class Timeline:
    """Spans of one step of one rank. `enabled=False` measures nothing."""

    def __init__(self, device: torch.device, rank: int, *, enabled: bool = True) -> None:
        self._rank = rank
        self._enabled = enabled
        self._on_gpu = device.type == "cuda"
        self._marks: list[_Mark] = []
        if enabled:
            self._wall = time.time() - time.perf_counter()
            self._first = self._now()

    def _now(self) -> _Moment:
        # The host's clock is read first, so that the offset does not include the launch.
        moment = _Moment(time.perf_counter())
        if self._on_gpu:
            moment.event = torch.cuda.Event(enable_timing=True)
            moment.event.record()
        return moment

    @contextmanager
    def span(self, name: str, micro_batch: int | None = None) -> Iterator[None]:
        """Measures the work that is enqueued inside, on the current stream."""
        if not self._enabled:
            yield
            return
        start = self._now()
        yield
        self._marks.append(_Mark(name, micro_batch, start, self._now()))

    def finish(self) -> list[Span]:
        """Returns all spans, by start. On a GPU this waits for the measured work, which has usually ended."""
        if not self._marks:
            return []
        if self._on_gpu:
            self._marks[-1].end.event.synchronize()  # type: ignore[union-attr]
        times = [(self._seconds(mark.start), self._seconds(mark.end)) for mark in self._marks]
        offset = self._wall
        if self._on_gpu:  # of the device's clock to `time.perf_counter()`
            differences = [self._first.host]
            for mark, (start, end) in zip(self._marks, times, strict=True):
                differences += (mark.start.host - start, mark.end.host - end)
            offset += max(differences)
        spans = [
            Span(mark.name, start + offset, end + offset, self._rank, mark.micro_batch)
            for mark, (start, end) in zip(self._marks, times, strict=True)
        ]
        return sorted(spans, key=lambda span: span.start)

    def _seconds(self, moment: _Moment) -> float:
        """Returns the time on the moment's clock. That is the host's, or seconds after the timeline's first event."""
        if moment.event is None:
            return moment.host
        assert self._first.event is not None
        return self._first.event.elapsed_time(moment.event) / 1000


def timing_metrics(spans: list[Span], num_micro_batches: int) -> dict[str, float]:
    """Computes `timing_<operation>_total` and `timing_<operation>_microbatch_mean` of one rank, in seconds."""
    totals = dict.fromkeys((*OPERATIONS, *STEP_OPERATIONS), 0.0)
    for span in spans:
        if span.name in totals:
            totals[span.name] += span.end - span.start
    metrics = {f"timing_{operation}_total": seconds for operation, seconds in totals.items()}
    for operation in OPERATIONS:
        metrics[f"timing_{operation}_microbatch_mean"] = totals[operation] / max(num_micro_batches, 1)
    return metrics


def memory_reader(device: torch.device) -> Callable[[], list[Reading]]:
    """Returns a function that reads the memory in use: torch's on a GPU, else the process's."""
    if device.type == "cuda":
        return lambda: _of_allocator(device)
    import psutil

    process = psutil.Process()
    return lambda: [Reading(time.time(), "process_memory_bytes", float(process.memory_info().rss))]


def _of_allocator(device: torch.device) -> list[Reading]:
    now = time.time()
    stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)
    if not stats:
        return []  # nothing has been allocated yet
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    values = {
        "torch_memory_allocated_bytes": allocated["current"],
        "torch_memory_allocated_peak_bytes": allocated["peak"],
        "torch_memory_reserved_bytes": reserved["current"],
        "torch_memory_reserved_peak_bytes": reserved["peak"],
        "torch_memory_alloc_retries": stats["num_alloc_retries"],
        "torch_memory_ooms": stats["num_ooms"],
    }
    return [Reading(now, name, float(value)) for name, value in values.items()]
