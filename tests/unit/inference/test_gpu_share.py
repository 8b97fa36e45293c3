"""Memory flags of a server on a shared GPU, alone and beside a trainer."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.config import TelescopeConfig
from telescope.config.memory import CUDA_CONTEXT_BYTES, ENGINE_WORKSPACE_BYTES, GIB, EngineMemory, trainer_share
from telescope.inference.vllm.launch import kv_cache_of_a_restart, memory_arguments

LOG = [
    "(EngineCore pid=7) INFO 11-21 10:00:01 [gpu_worker.py:759] Available KV cache memory: 23.46 GiB",
    "(EngineCore pid=7) INFO 11-21 10:00:01 [kv_cache_utils.py:1316] GPU KV cache size: 219,680 tokens",
]


def config_of(**fields: Any) -> TelescopeConfig:
    one = {"inference_num_workers": 1, "trainer_num_workers": 1, "share_gpus": True, "device": "cuda"}
    shared = {**one, "weight_broadcast_cpu_staging": True, "environments": [{"name": "a"}], "model": "m"}
    return TelescopeConfig.model_validate({**shared, **fields})


def arguments_of(config: TelescopeConfig, memory: int, staging: int, kv_cache: int | None) -> dict[str, str]:
    flags = memory_arguments(config, staging_bytes=staging, gpu_memory_bytes=memory, kv_cache_bytes=kv_cache)
    return dict(zip(flags[::2], flags[1::2], strict=True))


def starts(memory: int, free: int, utilization: str) -> bool:
    """Whether vLLM goes on when `free` of the GPU's bytes are free, which it reads after its own context is made."""
    return free >= math.ceil(memory * float(utilization))


memories = st.integers(12, 192).map(lambda gib: gib * GIB)
shares = st.integers(30, 85).map(lambda percent: percent / 100)


@given(memories, shares, st.integers(0, 8))
def test_a_restart_fits_beside_a_trainer_at_its_limit(memory: int, share: float, staging: int):
    config = config_of(gpu_memory_utilization=share)
    beside = trainer_share(config, memory) + CUDA_CONTEXT_BYTES
    free = memory - beside - CUDA_CONTEXT_BYTES
    again = arguments_of(config, memory, staging * GIB, 4 * GIB)
    assert starts(memory, free, again["--gpu-memory-utilization"])
    if trainer_share(config, memory):
        assert free >= int(memory * share) - 1, "what the first start took, beside the trainer and both contexts"


def test_only_a_restart_gets_the_cache_size():
    config = config_of(gpu_memory_utilization=0.5)
    assert arguments_of(config, 80 * GIB, 0, None) == {"--gpu-memory-utilization": "0.5"}
    assert arguments_of(config, 80 * GIB, 8 * GIB, None) == {"--gpu-memory-utilization": "0.4"}
    again = arguments_of(config, 80 * GIB, 8 * GIB, 123)
    kept = (8 * GIB + CUDA_CONTEXT_BYTES + ENGINE_WORKSPACE_BYTES) / (80 * GIB)
    assert again == {"--gpu-memory-utilization": f"{0.5 - kept:.4g}", "--kv-cache-memory-bytes": "123"}


@pytest.mark.parametrize("version_before", [[], ["Available KV cache memory: 9.00 GiB"]])
def test_the_cache_size_is_the_logs_last_rounded_down(version_before: list[str]):
    size = kv_cache_of_a_restart([*version_before, *LOG], None)
    assert size is not None
    assert 23.45 * GIB < size <= 23.455 * GIB + 1
    assert kv_cache_of_a_restart(["Available KV cache memory: 0.00 GiB"], None) is None


def test_a_log_without_the_size_falls_back_to_the_estimate():
    estimate = EngineMemory(1, 0, 5 * GIB, 1, 1, 1, 1)
    assert kv_cache_of_a_restart(["no such line"], estimate) == 5 * GIB
    assert kv_cache_of_a_restart(LOG, estimate) == kv_cache_of_a_restart(LOG, None)
    assert kv_cache_of_a_restart(["no such line"], None) is None


def test_the_trainers_share_is_the_rest_minus_both_contexts():
    config = config_of(gpu_memory_utilization=0.4)
    assert trainer_share(config, 80 * GIB) == 48 * GIB - 2 * CUDA_CONTEXT_BYTES
    assert trainer_share(config, GIB) == 0
