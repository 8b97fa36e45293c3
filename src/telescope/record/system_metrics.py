"""Samples the processor, memory, network and GPUs of one machine as gauges, and the memory of a trainer rank.

Reads the host through psutil and GPUs through NVML (`nvidia-ml-py`). Owns the names of these gauges. CPU percentages
are over all cores since the previous reading. Counters start with the machine. All GPUs of the machine are read, with
the index that `nvidia-smi` shows. Reading does not disturb their work.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from telescope.record.gauges import Reading, ReadingBatch, Sampler

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
"""Contains Ray's object store and the memory that torch's processes share."""

WATTS_PER_MILLIWATT = 1e-3
MEGABITS_PER_GIGABIT = 1000


class MachineSampler:
    """Samples this machine every `interval` seconds until `stop`.

    Host and GPUs have separate threads, so that a hanging NVML call does not stop the host's gauges. Gauges that cannot
    be read are logged once.
    """

    def __init__(self, interval: float) -> None:
        self._samplers = [Sampler("machine", interval, read_host)]
        self._hardware = host_hardware()
        try:
            gpus = GpuReader()
            self._hardware |= gpus.hardware()
            self._samplers.append(Sampler("gpus", interval, gpus))
        except RuntimeError as error:
            logger.info("GPU gauges are not recorded: %s", error)
        for sampler in self._samplers:
            sampler.start()

    def take(self) -> ReadingBatch:
        """Returns the readings since the last call."""
        batches = [sampler.take() for sampler in self._samplers]
        return ReadingBatch(
            readings=[reading for batch in batches for reading in batch.readings],
            problems=[problem for batch in batches for problem in batch.problems],
            node=socket.gethostname(),
            hardware=self._hardware,
        )

    def stop(self) -> None:
        """Stops the threads."""
        for sampler in self._samplers:
            sampler.stop()


def read_host() -> list[Reading]:
    """Reads this machine's gauges."""
    now = time.time()
    memory = psutil.virtual_memory()
    network = psutil.net_io_counters()
    values = {
        # A thread's first call has no earlier one to compare with, and returns 0.
        "cpu_utilization_percent": psutil.cpu_percent() or psutil.cpu_percent(0.1),
        "load_average_1m": os.getloadavg()[0],
        "memory_used_bytes": memory.total - memory.available,
        "memory_total_bytes": memory.total,
        "swap_used_bytes": psutil.swap_memory().used,
    }
    if network is not None:
        values |= {"network_sent_bytes": network.bytes_sent, "network_received_bytes": network.bytes_recv}
    if SHARED_MEMORY.is_dir():
        values["shared_memory_used_bytes"] = psutil.disk_usage(str(SHARED_MEMORY)).used
    return [Reading(now, name, float(value)) for name, value in values.items()]


def host_hardware() -> dict[str, Any]:
    """Returns the row of this machine in the table `nodes`, without GPUs."""
    found = None
    with suppress(OSError):
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cpu = found[1] if found else platform.processor() or platform.machine()
    system = platform.system()
    with suppress(OSError):
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    links = []
    for rate in sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate")):
        with suppress(OSError):
            links.append(f"{rate.parts[-4]} port {rate.parent.name}: {rate.read_text().strip()}")
    up = {name: one.speed for name, one in psutil.net_if_stats().items() if one.isup and one.speed > 0}
    return {
        "time": time.time(), "cpu": cpu, "num_cores": os.cpu_count(), "memory_bytes": psutil.virtual_memory().total,
        "os": f"{system}, {platform.system()} {platform.release()}", "gpus": [], "gpu_driver": None,
        "links": [*links, *(f"{name}: {speed / MEGABITS_PER_GIGABIT:g} Gb/s" for name, speed in sorted(up.items()))],
    }  # fmt: skip


DISK_FREE, DISK_TOTAL = "disk_free_bytes", "disk_total_bytes"


def read_disk(folder: Path) -> list[Reading]:
    """Reads the disk that contains a folder. Raises `OSError`."""
    now, disk = time.time(), shutil.disk_usage(folder)
    return [Reading(now, DISK_TOTAL, float(disk.total)), Reading(now, DISK_FREE, float(disk.free))]


def memory_reader(device: torch.device) -> Callable[[], list[Reading]]:
    """Returns a function that reads the memory of this process: torch's on a GPU, otherwise its own."""
    if device.type != "cuda":
        process = psutil.Process()
        return lambda: [Reading(time.time(), "process_memory_bytes", float(process.memory_info().rss))]
    import torch

    def read() -> list[Reading]:
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

    return read


GPU_QUANTITIES: dict[str, Callable[[Any, Any], float]] = {
    "gpu_utilization_percent": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "gpu_memory_utilization_percent": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).memory,
    "gpu_memory_used_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "gpu_memory_total_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    "gpu_temperature_celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "gpu_power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) * WATTS_PER_MILLIWATT,
    "gpu_power_limit_watts": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) * WATTS_PER_MILLIWATT,
    "gpu_sm_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "gpu_memory_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
}
"""Gauges of a GPU, and their NVML calls. Utilizations are the shares of time with kernels or memory access."""


class GpuReader:
    """Reads every GPU of this machine. Raises `RuntimeError` with the reason if there is none, or no NVML."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise RuntimeError("nvidia-ml-py is not installed") from error
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            indices = range(pynvml.nvmlDeviceGetCount())
        except pynvml.NVMLError as error:
            raise RuntimeError(f"NVML reports: {error}") from error
        self._devices: dict[int, Any] = {}
        for index in indices:
            with suppress(pynvml.NVMLError):  # a GPU that is lost
                self._devices[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
        if not self._devices:
            raise RuntimeError("NVML finds no GPU that can be read")
        self._unsupported: set[tuple[int, str]] = set()

    def hardware(self) -> dict[str, Any]:
        """Returns the columns `gpus` and `gpu_driver` of the table `nodes`. Adds the active NVLinks to a GPU's name."""
        nvml, gpus = self._nvml, []
        with suppress(nvml.NVMLError):
            for device in self._devices.values():
                active = 0
                with suppress(nvml.NVMLError):  # raised for the first link that the GPU does not have
                    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
                        active += nvml.nvmlDeviceGetNvLinkState(device, link)
                name = nvml.nvmlDeviceGetName(device)
                gpus.append(f"{name}, {active} NVLinks" if active else name)
            cuda = nvml.nvmlSystemGetCudaDriverVersion()
            driver = f"{nvml.nvmlSystemGetDriverVersion()}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"
            return {"gpus": gpus, "gpu_driver": driver}
        return {"gpus": gpus}

    def __call__(self) -> Iterator[Reading]:
        """Yields the readings of all GPUs, then raises the error of a GPU that cannot be read, if there is one."""
        problem: Exception | None = None
        for index, device in self._devices.items():
            now = time.time()
            for name, ask in GPU_QUANTITIES.items():
                if (index, name) in self._unsupported:
                    continue
                try:
                    value = float(ask(self._nvml, device))
                except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_NoPermission):
                    self._unsupported.add((index, name))  # not queried again
                except self._nvml.NVMLError as error:  # such as a GPU that is lost
                    problem = error
                else:
                    yield Reading(now, name, value, gpu=index)
        if problem is not None:
            raise problem
