"""How much memory user code may take."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

SMALLEST_LIMIT_BYTES = 2 * 2**30


def machine_memory_bytes() -> int:
    """Physical memory, or what the container may use of it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _CGROUP_LIMITS:
        path = Path(file)
        text = path.read_text().strip() if path.exists() else "max"
        if text.isdigit():
            memory = min(memory, int(text))
    return memory


def default_memory_limit() -> int:
    """What one worker may allocate beyond what it has loaded: a quarter of the machine, so that a reward that never
    stops allocating fails before the engine or the trainer does."""
    return max(machine_memory_bytes() // 4, SMALLEST_LIMIT_BYTES)
