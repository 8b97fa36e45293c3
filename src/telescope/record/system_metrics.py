"""Gauges of one machine: processor, memory, network and GPUs.

Reads the host through psutil and GPUs through NVML (`nvidia-ml-py`). Owns the names of these gauges. CPU percentages
are over all cores since the previous reading. Counters start with the machine. All GPUs of the machine are read, under
the index that `nvidia-smi` shows; reading does not disturb their work.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from telescope.record.gauges import Reading, ReadingBatch, Sampler

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
"""Holds Ray's object store and the memory that torch's processes share."""

WATTS_PER_MILLIWATT = 1e-3


class MachineSampler:
    """Samples this machine every `interval` seconds until `stop`.

    Host and GPUs have a thread each, so that a hanging NVML call does not stop the host's gauges. Gauges that cannot be
    read are logged once.
    """

    def __init__(self, interval: float) -> None:
        self._samplers = [Sampler("machine", interval, host_reader())]
        try:
            self._samplers.append(Sampler("gpus", interval, GpuReader()))
        except NoGpusError as error:
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
        )

    def stop(self) -> None:
        """Stops the threads."""
        for sampler in self._samplers:
            sampler.stop()


def host_reader() -> Callable[[], list[Reading]]:
    """Returns a function that reads this machine's gauges."""
    psutil.cpu_percent()  # the first call has no earlier reading to compare with
    shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None

    def read() -> list[Reading]:
        now = time.time()
        memory = psutil.virtual_memory()
        network = psutil.net_io_counters()
        values = {
            "cpu_utilization_percent": psutil.cpu_percent(),
            "load_average_1m": os.getloadavg()[0],
            "memory_used_bytes": memory.total - memory.available,
            "memory_total_bytes": memory.total,
            "swap_used_bytes": psutil.swap_memory().used,
        }
        if network is not None:
            values |= {"network_sent_bytes": network.bytes_sent, "network_received_bytes": network.bytes_recv}
        if shared is not None:
            values["shared_memory_used_bytes"] = psutil.disk_usage(str(shared)).used
        return [Reading(now, name, float(value)) for name, value in values.items()]

    return read


DISK_FREE, DISK_TOTAL = "disk_free_bytes", "disk_total_bytes"


def read_disk(folder: Path) -> list[Reading]:
    """Reads the disk of a folder. Raises `OSError`."""
    now, disk = time.time(), shutil.disk_usage(folder)
    return [Reading(now, DISK_TOTAL, float(disk.total)), Reading(now, DISK_FREE, float(disk.free))]


class NoGpusError(Exception):
    """No NVIDIA GPU can be read here. The message gives the reason."""


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
"""Gauges of a GPU, and how NVML is asked. Utilizations are shares of recent time with kernels and memory access."""


class GpuReader:
    """Reads every GPU of this machine. Raises `NoGpusError` without a GPU or without NVML."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise NoGpusError("nvidia-ml-py is not installed") from error
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._devices = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            raise NoGpusError(f"NVML reports: {error}") from error
        if not self._devices:
            raise NoGpusError("NVML finds no GPU")
        self._unsupported: set[tuple[int, str]] = set()

    @property
    def names(self) -> list[str]:
        """Model names by GPU index."""
        return [_text(self._nvml.nvmlDeviceGetName(device)) for device in self._devices]

    def __call__(self) -> list[Reading]:
        readings = []
        for index, device in enumerate(self._devices):
            now = time.time()
            for name, ask in GPU_QUANTITIES.items():
                if (index, name) in self._unsupported:
                    continue
                try:
                    readings.append(Reading(now, name, float(ask(self._nvml, device)), gpu=index))
                except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_NoPermission):
                    self._unsupported.add((index, name))  # not asked again
        return readings


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
