"""A killed server restarts with the same KV cache on a GPU that a trainer shares. Run by hand on a GPU."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.integration.weights.vllm_server import make_model
from tests.processes import free_port, wait_for

from telescope.config import TelescopeConfig, load_config
from telescope.config.memory import GIB, trainer_share
from telescope.inference.base import Address
from telescope.inference.server import InferenceServer

pytestmark = pytest.mark.gpu

START_SECONDS = 400.0
FULL = 0.99
"""Of the blocks that there were: the size is read from a log in hundredths of a GiB."""


@pytest.mark.timeout(900)
def test_a_killed_server_comes_back_with_its_cache_while_the_trainer_uses_its_whole_share(tmp_path: Path) -> None:
    make_model(tmp_path / "model", tied=True, num_heads=2)
    fields = {
        "model": tmp_path / "model", "environments": "[{name: countdown}]", "device": "cuda", "share_gpus": "true",
        "inference_num_workers": 1, "trainer_num_workers": 1, "max_model_len": 256, "max_tokens": 64,
    }  # fmt: skip
    config = load_config(None, [f"--{name}={value}" for name, value in fields.items()]).config
    server = InferenceServer(config, Address(0, "127.0.0.1", free_port(), "secret"), str(tmp_path / "model"), tmp_path)
    try:
        info = server.start()
        before = cache_blocks(server)
        with trainer_at_its_bound(config):
            os.killpg(os.getpgid(info.pid), signal.SIGKILL)
            wait_for(lambda: server.status().restarts == 1, "noticing", 60)
            wait_for(lambda: server.status().state != "restarting", "restart", START_SECONDS)
            status = server.status()
            assert (status.state, status.restarts) == ("ready", 1), status.error
            assert FULL * before <= cache_blocks(server) <= before
    finally:
        server.stop()


@contextmanager
def trainer_at_its_bound(config: TelescopeConfig) -> Iterator[None]:
    """This process allocates the share of a rank, with the same limit, and keeps freeing and allocating a part."""
    memory = torch.cuda.get_device_properties(0).total_memory
    share = trainer_share(config, memory)
    gc.collect()  # what earlier tests of this process hold is not a trainer's
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(share / memory, 0)
    part = min(8 * GIB, share // 4)
    kept = torch.empty(share - part - GIB // 4 - torch.cuda.memory_reserved(), dtype=torch.uint8, device="cuda")
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            block = torch.ones(part, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            time.sleep(0.2)
            del block
            torch.cuda.empty_cache()
            time.sleep(0.2)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield
        assert worker.is_alive(), "the trainer ran out of memory"
    finally:
        ended.set()
        worker.join(30)
        del kept
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


def cache_blocks(server: InferenceServer) -> int:
    """How many blocks the KV cache has, as the server reports."""
    found = re.search(r'vllm:cache_config_info\{[^}]*num_gpu_blocks="(\d+)"', server.metrics_text() or "")
    return int(found[1])
