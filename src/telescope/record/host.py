"""What a machine is doing: processor, memory, network, through psutil.

Owns the names of these gauges. Percentages are over all cores, since the reading before; counters grow from the start
of the machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from telescope.record.gauges import Reading

SHARED_MEMORY = Path("/dev/shm")
"""Where Ray's object store lies, and what torch's processes share."""


def host_reader() -> Callable[[], list[Reading]]:
    """A function that reads this machine's gauges. Raises `ImportError` where psutil is not installed."""
    import psutil

    psutil.cpu_percent()  # the first call has nothing to compare with
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
