"""Spans of a step: on the host's clock, and on a device's that is laid over it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
import torch

from telescope.trainer.metrics import OPERATIONS, timing_metrics
from telescope.utils.timeline import Span, Timeline

CLOCK_SKEW = 1234.5
"""What a device's clock shows when the host's shows 0."""


@dataclass
class Device:
    """A stream that works on what it is given, one thing after the other, on a host whose clock a test sets."""

    host: float = 100.0
    free_at: float = 0.0
    events: list[object] = field(default_factory=list)

    def launch(self, seconds: float) -> None:
        """The host gives work to the stream and goes on at once."""
        self.free_at = max(self.free_at, self.host) + seconds

    def wait(self) -> None:
        self.host = max(self.host, self.free_at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    simulated = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            simulated.free_at = self.at = max(simulated.free_at, simulated.host)

        def elapsed_time(self, later: Event) -> float:
            return (later.at - self.at) * 1000

        def synchronize(self) -> None:
            assert self.at <= simulated.host, "finish waits for the device in the middle of its work"

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(time, "perf_counter", lambda: simulated.host)
    monkeypatch.setattr(time, "time", lambda: simulated.host + CLOCK_SKEW)
    return simulated


def test_device_spans_show_execution_and_not_launch_times(device):
    timeline = Timeline(torch.device("cuda"), rank=3)
    with timeline.span("forward", 0):
        device.launch(2.0)
    device.host += 0.5
    with timeline.span("backward", 0):
        device.launch(4.0)
    device.wait()
    forward, backward = timeline.finish()
    assert (forward.name, forward.start, forward.end) == ("forward", 100 + CLOCK_SKEW, 102 + CLOCK_SKEW)
    assert (backward.start, backward.end) == (102 + CLOCK_SKEW, 106 + CLOCK_SKEW)
    assert (backward.rank, backward.micro_batch) == (3, 0)


def test_a_step_that_begins_on_a_busy_device_is_aligned_at_its_first_idle_moment(device):
    device.launch(5.0)  # of the step before: the first event happens 5 s after the host has asked for it
    timeline = Timeline(torch.device("cuda"), rank=0)
    with timeline.span("forward", 0):
        device.launch(1.0)
    device.wait()
    device.host += 3.0
    with timeline.span("optimizer"):
        device.launch(1.0)
    device.wait()
    forward, optimizer = timeline.finish()
    assert (forward.start, forward.end) == (105 + CLOCK_SKEW, 106 + CLOCK_SKEW)
    assert (optimizer.start, optimizer.end) == (109 + CLOCK_SKEW, 110 + CLOCK_SKEW)


def test_on_the_cpu_spans_are_the_host_s_own_times():
    before = time.time()
    timeline = Timeline(torch.device("cpu"), rank=0)
    with timeline.span("outer"), timeline.span("inner", 1):
        time.sleep(0.01)
    outer, inner = timeline.finish()
    assert (outer.name, inner.name) == ("outer", "inner")
    assert before - 1e-3 <= outer.start <= inner.start <= inner.end <= outer.end <= time.time() + 1e-3
    assert inner.end - inner.start >= 0.01


def test_a_timeline_that_is_off_does_not_touch_the_device():
    timeline = Timeline(torch.device("cuda"), rank=0, enabled=False)  # there may be none here
    with timeline.span("forward", 0):
        pass
    assert timeline.finish() == []


def test_timing_metrics_add_up_each_operation_and_divide_by_the_micro_batches():
    spans = [Span("forward", 1.0, 2.0, micro_batch=0), Span("forward", 4.0, 7.0, micro_batch=1), Span("else", 0.0, 9.0)]
    metrics = timing_metrics(spans, 2)
    assert metrics["timing_forward_total"] == 4.0
    assert metrics["timing_forward_microbatch_mean"] == 2.0
    assert metrics["timing_optimizer_total"] == 0.0
    assert "timing_reference_logprobs_total" not in metrics, "there is no such pass"
    assert timing_metrics([Span("reference_logprobs", 1.0, 3.5)], 2)["timing_reference_logprobs_total"] == 2.5
    assert {f"timing_{operation}_microbatch_mean" for operation in OPERATIONS} <= metrics.keys()
