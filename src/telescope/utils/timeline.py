"""Spans of work on a device or on the host.

Owns measuring, and the conversion from the device's clock to the wall clock. Times are wall-clock seconds
(`time.time()`), so that spans of several processes are comparable.

Invariants: measuring never waits for the device. On a GPU a span is two events on the stream of the measured work;
`finish` reads them after the wait for the step's metrics. On the CPU the host's clock is read. A timeline that is off
costs one test of a flag.

The clocks: an event knows only its time after another event. Nothing happens on the device before the host requests it,
so for every event i: offset + device_i >= host_i. The smallest offset that satisfies all of these is exact to the time
of one launch if the stream was empty at any moment of the step, as it is at its start. Each step computes its offset
anew, so that the clocks do not drift apart.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Span:
    """A named interval, in seconds of the wall clock (`time.time()`)."""

    name: str
    start: float
    end: float
    rank: int = 0
    micro_batch: int | None = None


@dataclass(slots=True)
class _Moment:
    """A point of a stream (None: host time only), and when the host requested it, by `time.perf_counter()`."""

    host: float
    event: torch.cuda.Event | None = None


class Timeline:
    """The spans of one step on one rank. `enabled=False` measures nothing."""

    def __init__(self, device: torch.device, rank: int, *, enabled: bool = True) -> None:
        self._rank = rank
        self._enabled = enabled
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, int | None, _Moment, _Moment]] = []
        """Names, micro-batches, starts and ends of spans."""
        if enabled:
            self._wall = time.time() - time.perf_counter()
            self._first = self._now()

    def _now(self) -> _Moment:
        # The host's clock is read first, so that the offset does not include the launch.
        moment = _Moment(time.perf_counter())
        if self._on_gpu:
            import torch

            moment.event = torch.cuda.Event(enable_timing=True)
            moment.event.record()
        return moment

    @contextmanager
    def span(self, name: str, micro_batch: int | None = None) -> Iterator[None]:
        """Measures the work that is enqueued inside the block, on the current stream."""
        if not self._enabled:
            yield
            return
        start = self._now()
        yield
        self._marks.append((name, micro_batch, start, self._now()))

    def finish(self) -> list[Span]:
        """Returns all spans, sorted by start. On a GPU this waits for the measured work, which has usually ended."""
        if not self._marks:
            return []
        if self._on_gpu:
            self._marks[-1][-1].event.synchronize()  # type: ignore[union-attr]
        times = [(self._seconds(start), self._seconds(end)) for _, _, start, end in self._marks]
        offset = self._wall
        if self._on_gpu:  # offset from the device's clock to `time.perf_counter()`
            differences = [self._first.host]
            for (_, _, *moments), seconds in zip(self._marks, times, strict=True):
                differences += [moment.host - second for moment, second in zip(moments, seconds, strict=True)]
            offset += max(differences)
        spans = [
            Span(name, start + offset, end + offset, self._rank, micro_batch)
            for (name, micro_batch, _, _), (start, end) in zip(self._marks, times, strict=True)
        ]
        return sorted(spans, key=lambda span: span.start)

    def _seconds(self, moment: _Moment) -> float:
        """Returns the time of a moment: on the host's clock, or in seconds after the timeline's first event."""
        if moment.event is None:
            return moment.host
        assert self._first.event is not None
        return self._first.event.elapsed_time(moment.event) / 1000
