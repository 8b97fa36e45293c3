"""What torch's allocator holds on this rank's GPU.

Owns the names of these gauges. A reading takes a snapshot of counters that the allocator keeps anyway; it does not
touch the stream. The CPU has no allocator of its own to ask, so a rank there reports the memory of its process alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from telescope.record.gauges import Reading


def memory_reader(device: torch.device) -> Callable[[], list[Reading]]:
    """A function that reads the memory of this process, on a GPU what torch's allocator knows of it."""
    return (lambda: _of_allocator(device)) if device.type == "cuda" else _of_process()


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


def _of_process() -> Callable[[], list[Reading]]:
    import psutil

    process = psutil.Process()
    return lambda: [Reading(time.time(), "process_memory_bytes", float(process.memory_info().rss))]
