"""Numbers on their way into `gauges`: what is left out loses nothing, and what fails ends nothing."""

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType

import pytest
from tests.documented_metrics import undocumented

from telescope.record import gauges
from telescope.record.gauges import REPEAT_SECONDS, Reading, Sampler, Thinned
from telescope.record.system_metrics import GpuReader, MachineSampler, NoGpusError


def kept(values: list[float]) -> list[tuple[float, float]]:
    """(time, value) of what is kept of one number that is read once a second."""
    thin = Thinned()
    return [(r.time, r.value) for second, value in enumerate(values) for r in thin([Reading(second, "n", value)])]


def test_of_a_number_that_stays_the_same_the_first_and_the_last_reading_are_kept():
    assert kept([5, 5, 5, 5, 7, 7, 5]) == [(0, 5), (3, 5), (4, 7), (5, 7), (6, 5)]


def test_a_line_through_what_is_kept_passes_through_everything_that_was_read():
    values = [1, 1, 1, 4, 4, 2, 2, 2, 2, 9, 9, 9, 0]
    points = dict(kept(values))
    for second, value in enumerate(values):
        before = max(t for t in points if t <= second)
        after = min(t for t in points if t >= second)
        assert points[before] == points[after] == value


def test_a_number_that_stands_still_is_repeated_now_and_then():
    times = [t for t, _ in kept([3.0] * 100)]
    assert times == list(range(0, 100, int(REPEAT_SECONDS)))


def test_numbers_of_one_name_are_told_apart_by_label_and_gpu():
    thin = Thinned()
    rows = [Reading(0, "n", 1.0), Reading(0, "n", 1.0, (("le", "1"),)), Reading(0, "n", 1.0, gpu=0)]
    assert thin(rows) == rows
    assert thin([Reading(1, "n", 1.0, gpu=1)]) != []


def test_a_read_that_fails_is_said_once_a_kind_and_tried_again():
    answers = iter([OSError("gone"), OSError("still gone"), ValueError("odd"), [Reading(1.0, "n", 2.0)]])

    def read() -> list[Reading]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    sampler = Sampler("test", 60.0, read)
    for _ in range(4):
        sampler.sample()
    taken = sampler.take()
    assert [reading.value for reading in taken.readings] == [2.0]
    assert ["gone" in problem for problem in taken.problems] == [True, False]
    assert sampler.take().problems == []


def test_readings_that_nobody_takes_are_dropped_the_oldest_first_and_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gauges, "MAX_WAITING", 3)
    counter = iter(range(100))
    sampler = Sampler("test", 60.0, lambda: [Reading(time.time(), "n", float(next(counter)))])
    for _ in range(5):
        sampler.sample()
    taken = sampler.take()
    assert [reading.value for reading in taken.readings] == [2.0, 3.0, 4.0]
    assert "2 readings were dropped" in taken.problems[0]


def test_a_reader_that_hangs_keeps_nobody_from_taking_or_stopping():
    entered, leave = threading.Event(), threading.Event()

    def read() -> list[Reading]:
        entered.set()
        leave.wait(60)
        return []

    sampler = Sampler("test", 0.01, read)
    sampler.start()
    try:
        assert entered.wait(30)
        assert sampler.take().readings == []
        sampler.stop(timeout=0.05)
    finally:
        leave.set()


def test_this_machine_says_what_its_processor_and_memory_do():
    machine = MachineSampler(0.01)
    found: dict[str, float] = {}
    deadline = time.monotonic() + 30
    while "cpu_utilization_percent" not in found and time.monotonic() < deadline:
        time.sleep(0.02)
        found |= {reading.name: reading.value for reading in machine.take().readings}
    machine.stop()
    assert 0 <= found["cpu_utilization_percent"] <= 100
    assert 0 < found["memory_used_bytes"] < found["memory_total_bytes"]


class FakeNvml(ModuleType):
    """NVML with one GPU, which does not know of power."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})
    NVMLError_NoPermission = type("NVMLError_NoPermission", (NVMLError,), {})
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2

    def __init__(self, num_gpus: int = 1) -> None:
        super().__init__("pynvml")
        self.num_gpus = num_gpus
        self.power_asked = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, device: int):
        return type("Rates", (), {"gpu": 97, "memory": 41})

    def nvmlDeviceGetMemoryInfo(self, device: int):
        return type("Memory", (), {"used": 3, "total": 8})

    def nvmlDeviceGetTemperature(self, device: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetClockInfo(self, device: int, clock: int) -> int:
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 2619}[clock]

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        self.power_asked += 1
        raise self.NVMLError_NotSupported


def test_what_a_gpu_does_not_know_is_left_out_and_not_asked_again(monkeypatch: pytest.MonkeyPatch):
    nvml = FakeNvml(num_gpus=2)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    read = GpuReader()
    for _ in range(3):
        found = {(reading.gpu, reading.name): reading.value for reading in read()}
    assert nvml.power_asked == 2
    assert found[1, "gpu_utilization_percent"] == 97
    assert found[1, "gpu_memory_used_bytes"] == 3
    assert found[0, "gpu_sm_clock_mhz"] == 1980
    assert not any("power" in name for _, name in found)
    assert undocumented(name for _, name in found) == []


def test_a_machine_without_gpus_is_no_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoGpusError, match="nvidia-ml-py"):
        GpuReader()
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(num_gpus=0))
    with pytest.raises(NoGpusError, match="no GPU"):
        GpuReader()
