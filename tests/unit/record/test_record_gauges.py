"""Sampled numbers: dropped readings lose no information, and failures end nothing."""

import os
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from tests.documented_metrics import undocumented

from telescope.record import gauges
from telescope.record.gauges import REPEAT_SECONDS, Reading, Sampler, Thinning
from telescope.record.system_metrics import GpuReader, MachineSampler
from telescope.record.tables import TABLES


def kept(values: list[float]) -> list[tuple[float, float]]:
    """(time, value) of the kept readings of one number that is read once per second."""
    thin = Thinning()
    return [(r.time, r.value) for second, value in enumerate(values) for r in thin([Reading(second, "n", value)])]


def test_the_first_and_last_reading_of_a_constant_number_are_kept():
    assert kept([5, 5, 5, 5, 7, 7, 5]) == [(0, 5), (3, 5), (4, 7), (5, 7), (6, 5)]


def test_a_line_through_kept_readings_passes_through_all_readings():
    values = [1, 1, 1, 4, 4, 2, 2, 2, 2, 9, 9, 9, 0]
    points = dict(kept(values))
    for second, value in enumerate(values):
        before = max(t for t in points if t <= second)
        after = min(t for t in points if t >= second)
        assert points[before] == points[after] == value


def test_a_constant_number_is_repeated_at_intervals():
    times = [t for t, _ in kept([3.0] * 100)]
    assert times == list(range(0, 100, int(REPEAT_SECONDS)))


def test_a_clock_that_is_set_back_hides_no_constant_number():
    thin = Thinning()
    assert len(thin([Reading(5000.0, "n", 1.0)])) == 1
    assert [reading.time for reading in thin([Reading(float(at), "n", 1.0) for at in range(15)])] == [0.0, 10.0]


def test_numbers_of_one_name_differ_by_label_and_gpu():
    thin = Thinning()
    rows = [Reading(0, "n", 1.0), Reading(0, "n", 1.0, (("le", "1"),)), Reading(0, "n", 1.0, gpu=0)]
    assert thin(rows) == rows
    assert thin([Reading(1, "n", 1.0, gpu=1)]) != []


def test_a_failing_read_is_reported_once_per_error_type_and_retried():
    answers = [OSError("gone"), OSError("still gone"), ValueError("odd"), [Reading(1.0, "n", 2.0)]]
    sampler = Sampler("test", 60.0, Mock(side_effect=answers))
    for _ in range(4):
        sampler.sample()
    batch = sampler.take()
    assert [reading.value for reading in batch.readings] == [2.0]
    assert ["gone" in problem for problem in batch.problems] == [True, False]
    assert sampler.take().problems == []


def test_a_full_buffer_drops_and_counts_the_oldest_readings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gauges, "MAX_BUFFERED", 3)
    counter = iter(range(100))
    sampler = Sampler("test", 60.0, lambda: [Reading(time.time(), "n", float(next(counter)))])
    for _ in range(5):
        sampler.sample()
    batch = sampler.take()
    assert [reading.value for reading in batch.readings] == [2.0, 3.0, 4.0]
    assert "2 readings were dropped" in batch.problems[0]


def test_a_hanging_read_blocks_neither_take_nor_stop():
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


def test_processor_and_memory_of_this_machine_are_sampled():
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
    """NVML with GPUs that do not report power."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})
    NVMLError_NoPermission = type("NVMLError_NoPermission", (NVMLError,), {})
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2
    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, num_gpus: int = 1) -> None:
        super().__init__("pynvml")
        self.power_asked = 0
        answers = {
            "Init": None, "DeviceGetCount": num_gpus, "DeviceGetTemperature": 61, "DeviceGetName": "NVIDIA H100",
            "DeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=41), "SystemGetDriverVersion": "550.54",
            "DeviceGetMemoryInfo": SimpleNamespace(used=3, total=8), "SystemGetCudaDriverVersion": 12040,
            "DeviceGetEnforcedPowerLimit": 700_000,
        }  # fmt: skip
        for name, answer in answers.items():
            setattr(self, f"nvml{name}", lambda *_, answer=answer: answer)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetClockInfo(self, device: int, clock: int) -> int:
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 2619}[clock]

    def nvmlDeviceGetNvLinkState(self, device: int, link: int) -> int:
        if link == 4 or device == 1:
            raise self.NVMLError_NotSupported
        return 1

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        self.power_asked += 1
        raise self.NVMLError_NotSupported


def test_a_call_that_a_gpu_does_not_support_is_not_repeated(monkeypatch: pytest.MonkeyPatch):
    nvml = FakeNvml(num_gpus=2)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    read = GpuReader()
    for _ in range(3):
        found = {(reading.gpu, reading.name): reading.value for reading in read()}
    assert nvml.power_asked == 2
    assert found[1, "gpu_utilization_percent"] == 97
    assert found[1, "gpu_memory_used_bytes"] == 3
    assert found[0, "gpu_sm_clock_mhz"] == 1980
    power = {name: value for (gpu, name), value in found.items() if gpu == 0 and "power" in name}
    assert power == {"gpu_power_limit_watts": 700}
    assert undocumented(name for _, name in found) == []


def test_a_gpu_that_is_lost_hides_no_other(monkeypatch: pytest.MonkeyPatch):
    nvml = FakeNvml(num_gpus=3)

    def ask(device: int, *_: int) -> int:
        if device == lost:
            raise nvml.NVMLError("GPU is lost")
        return device

    lost = 0
    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByIndex", ask)
    monkeypatch.setattr(nvml, "nvmlDeviceGetTemperature", ask)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    sampler = Sampler("gpus", 60.0, GpuReader())
    lost = 1  # later
    sampler.sample()
    batch = sampler.take()
    assert [r.value for r in batch.readings if r.name == "gpu_temperature_celsius"] == [2.0]
    assert len(batch.problems) == 1 and "GPU is lost" in batch.problems[0]


def test_a_machine_sends_its_hardware_with_its_gauges(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(num_gpus=2))
    machine = MachineSampler(60)
    hardware = machine.take().hardware
    machine.stop()
    assert set(hardware) == set(TABLES["nodes"].column_names) - {"attempt", "node"}
    assert hardware["gpus"] == ["NVIDIA H100, 4 NVLinks", "NVIDIA H100"]
    assert hardware["gpu_driver"] == "550.54, CUDA 12.4"
    assert hardware["num_cores"] == os.cpu_count()
    assert hardware["memory_bytes"] == psutil.virtual_memory().total
    assert hardware["cpu"]
    assert hardware["os"]


def test_a_machine_without_gpus_has_no_gpu_gauges(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(RuntimeError, match="nvidia-ml-py"):
        GpuReader()
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(num_gpus=0))
    with pytest.raises(RuntimeError, match="no GPU"):
        GpuReader()
