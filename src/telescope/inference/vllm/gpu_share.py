"""What a server takes of its GPU's memory when it starts, and when it starts again beside a trainer with a part of it.

A server that shares its GPU starts alone on it, and vLLM makes its KV cache of what it measures under
`gpu_memory_utilization`. When it is started again the trainer is there, and both things that vLLM then does go wrong
(0.26 and 0.32 alike, `request_memory` and `Worker.determine_available_memory`): it refuses to start when less than
`gpu_memory_utilization` of the whole GPU is free after its CUDA context is made, and it takes whatever the trainer
allocates or frees during its profiling for its own, as a smaller cache or as a failed assertion. So a restart is told
the size of the cache that the first start arrived at, with which vLLM measures nothing, and asks for less to be free.

Owns these flags and reading the size from vLLM's log. The trainer's side of the split is `config.memory.trainer_share`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from telescope.config import TelescopeConfig
from telescope.config.memory import CUDA_CONTEXT_BYTES, ENGINE_WORKSPACE_BYTES, GIB, EngineMemory

LEAST_SHARE = 0.01
KV_CACHE_LINE = re.compile(r"Available KV cache memory: (\d+\.\d+) GiB")
ROUNDING_BYTES = GIB // 200
"""The log gives hundredths of a GiB; what was rounded up may not be there."""


def memory_arguments(
    config: TelescopeConfig,
    *,
    shadow_bytes: int,
    gpu_memory_bytes: int | None,
    kv_cache_bytes: int | None,
) -> list[str]:
    """The flags of a server on a GPU of `gpu_memory_bytes`, of which `shadow_bytes` are kept for a second copy of its
    weights.

    `kv_cache_bytes` is given for a restart beside a trainer: the KV cache that there was. None: vLLM measures.
    """
    # vLLM makes its KV cache of what it finds free under this bound; the second copy is made after that.
    reserved = shadow_bytes
    if kv_cache_bytes is not None:
        # The bound now only says how much must be free. The context of this process is made before that is looked at,
        # and what activations and CUDA graphs need is taken after it.
        reserved += CUDA_CONTEXT_BYTES + ENGINE_WORKSPACE_BYTES
    share = reserved / gpu_memory_bytes if gpu_memory_bytes else 0.0
    arguments = ["--gpu-memory-utilization", f"{max(config.gpu_memory_utilization - share, LEAST_SHARE):.4g}"]
    if kv_cache_bytes is not None:
        arguments += ["--kv-cache-memory-bytes", str(kv_cache_bytes)]
    return arguments


def measured_kv_cache(log: Iterable[str]) -> int | None:
    """The size of the KV cache in bytes that a vLLM which has started says it found room for; None if it does not."""
    found = [match for line in log if (match := KV_CACHE_LINE.search(line))]
    if not found:
        return None
    size = int(float(found[-1][1]) * GIB) - ROUNDING_BYTES
    return size if size > 0 else None


def kv_cache_of_a_restart(log: Iterable[str], estimate: EngineMemory | None) -> int | None:
    """The KV cache of a server that has started, for the next time: as measured, else as estimated.

    None where neither is known: vLLM then measures again.
    """
    return measured_kv_cache(log) or (estimate.kv_cache if estimate is not None else None) or None
