"""The step meter: what is counted, what a reader sees, and what `/metrics` reports."""

import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.fakes.asgi import respond, send_request

from telescope.inference.base import METRICS_ROUTE
from telescope.inference.engine_metrics import parse
from telescope.inference.vllm.step_meter import (
    STEP_METER_VARIABLE,
    StepMeter,
    StepMetricsMiddleware,
    StepReading,
    metrics_text,
    read_meter,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def test_busy_is_the_time_with_a_step_scheduled_and_not_finished(tmp_path: Path) -> None:
    clock = Clock()
    meter = StepMeter(tmp_path / "steps", now=clock)
    for tokens in (40, 2):
        clock.advance(5.0)  # nothing is scheduled
        meter.scheduled()
        clock.advance(0.25)
        meter.finished(tokens, running=2)
    reading = read_meter(tmp_path / "steps")
    assert (reading.busy_seconds, reading.steps, reading.tokens, reading.running) == (0.5, 2, 42, 2)


def test_steps_that_began_requests_are_counted_among_all_steps(tmp_path: Path) -> None:
    meter = StepMeter(tmp_path / "steps")
    for began in (True, False, True, False):
        meter.scheduled()
        meter.finished(8, running=4, began=began)
    reading = read_meter(tmp_path / "steps")
    assert (reading.steps, reading.beginning_steps, reading.running, reading.tokens) == (4, 2, 4, 32)


def test_steps_that_overlap_count_their_time_once(tmp_path: Path) -> None:
    clock = Clock()
    meter = StepMeter(tmp_path / "steps", now=clock)
    meter.scheduled()
    for _ in range(3):  # an engine that schedules ahead: the next one before the last has finished
        clock.advance(1.0)
        meter.scheduled()
        clock.advance(1.0)
        meter.finished(1, running=1)
    clock.advance(1.0)
    meter.finished(1, running=0)
    reading = read_meter(tmp_path / "steps")
    assert (reading.busy_seconds, reading.steps) == (7.0, 4)


def test_the_current_step_counts_up_to_the_reading(tmp_path: Path) -> None:
    meter = StepMeter(tmp_path / "steps")
    meter.scheduled()
    first, second = read_meter(tmp_path / "steps"), read_meter(tmp_path / "steps")
    assert 0 <= first.busy_seconds < second.busy_seconds
    assert second.busy_seconds - first.busy_seconds == pytest.approx(second.clock - first.clock)


def test_a_new_engine_begins_with_zeros_and_a_missing_one_has_no_reading(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "steps"
    assert read_meter(path) is None
    for _ in range(2):
        meter = StepMeter(path)
        reading = read_meter(path)
        assert (reading.busy_seconds, reading.steps) == (0.0, 0)
        meter.scheduled()
        meter.finished(1, 1)


def test_an_engine_killed_during_a_step_does_not_stay_busy(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from telescope.inference.vllm.step_meter import StepMeter\n"
        "meter = StepMeter(Path(sys.argv[1])); meter.scheduled(); print('scheduled', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "steps")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout.readline() == "scheduled\n"
        assert read_meter(tmp_path / "steps") is not None
        engine.kill()
    assert read_meter(tmp_path / "steps") is None


def test_an_engine_that_stopped_while_it_wrote_has_no_reading(tmp_path: Path) -> None:
    meter = StepMeter(tmp_path / "steps")
    meter.scheduled()
    with open(tmp_path / "steps", "r+b") as file:
        file.write(struct.pack("<Q", 3))
    assert read_meter(tmp_path / "steps") is None


def test_a_reader_never_sees_half_a_write(tmp_path: Path) -> None:
    """Each step has one token more than the one before, so that tokens follow from steps in every state."""
    meter = StepMeter(tmp_path / "steps")
    stop = threading.Event()

    def write() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            meter.scheduled()
            meter.finished(step, running=step)

    seen: list[StepReading] = []
    writer = threading.Thread(target=write)
    writer.start()
    try:
        while len(seen) < 1000:  # as many are None as meet a write again and again
            reading = read_meter(tmp_path / "steps")
            if reading is not None:
                seen.append(reading)
    finally:
        stop.set()
        writer.join()
    assert all(reading.tokens == reading.steps * (reading.steps + 1) // 2 for reading in seen)


async def through_middleware(path: Path | None, route: str) -> tuple[dict[bytes, bytes], bytes]:
    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/plain"), (b"content-length", b"17")]
        await respond(send, b"vllm:x_total 1.0\n", headers=headers)

    with patch.dict(os.environ, {STEP_METER_VARIABLE: str(path)}):
        middleware = StepMetricsMiddleware(vllm)
    response = await send_request(middleware, route, method="GET", headers=[(b"accept-encoding", b"gzip")])
    return response.headers, response.body


async def test_metrics_include_the_meter_and_vllms_own(tmp_path: Path) -> None:
    clock = Clock()
    meter = StepMeter(tmp_path / "steps", now=clock)
    meter.scheduled()
    clock.advance(1.5)
    meter.finished(64, running=1)
    for route in (METRICS_ROUTE, METRICS_ROUTE + "/"):  # vLLM redirects one to the other
        headers, body = await through_middleware(tmp_path / "steps", route)
        assert headers[b"content-length"] == str(len(body)).encode()
        values = {reading.name: reading.value for reading in parse(body.decode(), 0.0)}
        assert values["vllm:x_total"] == 1.0
        assert values["telescope:engine_busy_seconds_total"] == 1.5
        assert values["telescope:engine_steps_total"] == 1.0
        assert values["telescope:engine_step_tokens_total"] == 64.0
        assert values["telescope:engine_clock_seconds"] > 0


async def test_without_a_meter_and_on_other_routes_answers_pass_through(tmp_path: Path) -> None:
    StepMeter(tmp_path / "steps")
    for path, route in ((None, METRICS_ROUTE), (tmp_path / "none", METRICS_ROUTE), (tmp_path / "steps", "/")):
        assert await through_middleware(path, route) == (
            {b"content-type": b"text/plain", b"content-length": b"17"},
            b"vllm:x_total 1.0\n",
        )


def test_readings_lose_nothing_as_text(tmp_path: Path) -> None:
    StepMeter(tmp_path / "steps")
    reading = read_meter(tmp_path / "steps")
    clock = next(each for each in parse(metrics_text(reading).decode(), 0.0) if "clock" in each.name)
    assert clock.value == reading.clock
