"""GPU memory flags of a server that shares its GPU.

A server that shares its GPU starts alone on it, and vLLM sizes its KV cache from what it measures under
`gpu_memory_utilization`. At a restart the trainer is there, and two steps of vLLM go wrong (0.26 and 0.32,
`request_memory` and `Worker.determine_available_memory`): it refuses to start when less than `gpu_memory_utilization`
of the whole GPU is free after its CUDA context is created, and it counts what the trainer allocates or frees during
profiling as its own, which gives a smaller cache or a failed assertion. So a restart passes the cache size of the first
start, with which vLLM measures nothing, and requires less free memory.

Owns these flags and reading the size from vLLM's log. The trainer's share is `config.memory.trainer_share`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from telescope.config import TelescopeConfig
from telescope.config.memory import CUDA_CONTEXT_BYTES, ENGINE_WORKSPACE_BYTES, GIB, EngineMemory

LEAST_SHARE = 0.01
KV_CACHE_LINE = re.compile(r"Available KV cache memory: (\d+\.\d+) GiB")
ROUNDING_BYTES = GIB // 200
"""The log rounds to hundredths of a GiB, so up to this much of the size may not exist."""


def memory_arguments(
    config: TelescopeConfig,
    *,
    staging_bytes: int,
    gpu_memory_bytes: int | None,
    kv_cache_bytes: int | None,
) -> list[str]:
    """Returns the memory flags of a server on a GPU of `gpu_memory_bytes`, `staging_bytes` of which stay free for its
    staging buffer.

    `kv_cache_bytes` is set for a restart beside a trainer: the size of the earlier KV cache. None: vLLM measures.
    """
    # vLLM sizes its KV cache from the free memory under this bound; the staging buffer is allocated later.
    reserved = staging_bytes
    if kv_cache_bytes is not None:
        # The bound now only sets how much must be free. The context of this process is created before the check;
        # activations and CUDA graphs are allocated after it.
        reserved += CUDA_CONTEXT_BYTES + ENGINE_WORKSPACE_BYTES
    share = reserved / gpu_memory_bytes if gpu_memory_bytes else 0.0
    arguments = ["--gpu-memory-utilization", f"{max(config.gpu_memory_utilization - share, LEAST_SHARE):.4g}"]
    if kv_cache_bytes is not None:
        arguments += ["--kv-cache-memory-bytes", str(kv_cache_bytes)]
    return arguments


def measured_kv_cache(log: Iterable[str]) -> int | None:
    """Returns the KV cache size in bytes from vLLM's log, or None."""
    found = [match for line in log if (match := KV_CACHE_LINE.search(line))]
    if not found:
        return None
    size = int(float(found[-1][1]) * GIB) - ROUNDING_BYTES
    return size if size > 0 else None


def kv_cache_of_a_restart(log: Iterable[str], estimate: EngineMemory | None) -> int | None:
    """Returns the KV cache size for a restart: as measured, else as estimated.

    None when neither is known: vLLM then measures again.
    """
    return measured_kv_cache(log) or (estimate.kv_cache if estimate is not None else None) or None
