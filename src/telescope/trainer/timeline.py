"""Where a step's time goes: named spans, and the `timing_*` metrics made of them.

Owns measuring. Invariant: measuring never waits for the device; on GPU a span is two events on the stream, read once
after the step has been synchronised for its metrics anyway. Times are wall-clock seconds (`time.time()`), so that spans
of several processes can be laid over each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from telescope.trainer.batch import Span

OPERATIONS = (
    "forward",
    "backward",
    "loss_computation",
    "compute_kl",
    "compute_entropy",
    "data_to_device",
    "prepare_tensors",
)
"""Operations that are measured per micro-batch. `compute_entropy` is the fused pass for logprob and entropy."""


@dataclass(slots=True)
class _Mark:
    name: str
    micro_batch: int | None
    start: float | torch.cuda.Event
    end: float | torch.cuda.Event


class Timeline:
    """Spans of one step of one rank."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self._rank = rank
        self._on_gpu = device.type == "cuda"
        self._marks: list[_Mark] = []
        self._wall_start = time.time()
        self._clock_start = time.perf_counter()
        self._event_start = self._now() if self._on_gpu else None

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, name: str, micro_batch: int | None = None) -> Iterator[None]:
        """Measure the work enqueued inside."""
        start = self._now()
        yield
        self._marks.append(_Mark(name, micro_batch, start, self._now()))

    def _wall(self, moment: float | torch.cuda.Event) -> float:
        if isinstance(moment, float):
            return self._wall_start + moment - self._clock_start
        assert isinstance(self._event_start, torch.cuda.Event)
        return self._wall_start + self._event_start.elapsed_time(moment) / 1000

    def finish(self) -> list[Span]:
        """All spans, by start. On GPU the device must have been synchronised."""
        spans = [Span(m.name, self._wall(m.start), self._wall(m.end), self._rank, m.micro_batch) for m in self._marks]
        return sorted(spans, key=lambda span: span.start)


def timing_metrics(spans: list[Span], num_micro_batches: int) -> dict[str, float]:
    """`timing_<operation>_total` and `timing_<operation>_microbatch_mean` in seconds, of one rank's spans."""
    metrics: dict[str, float] = {}
    for operation in OPERATIONS:
        total = sum(span.end - span.start for span in spans if span.name == operation)
        metrics[f"timing_{operation}_total"] = total
        metrics[f"timing_{operation}_microbatch_mean"] = total / num_micro_batches if num_micro_batches else 0.0
    return metrics
