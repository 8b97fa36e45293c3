"""The weight sync benchmark, on components that answer at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from telescope.inference.base import METRICS_ROUTE


@pytest.fixture
def weight_sync(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with engines that settle at once."""
    import weight_sync

    monkeypatch.setattr(weight_sync, "SETTLE_SECONDS", 0.01)
    return weight_sync


class Client:
    def __init__(self) -> None:
        self.tokens = 0.0

    async def _control(self, method: str, route: str) -> bytes:
        assert (method, route) == ("GET", METRICS_ROUTE)
        return f"vllm:generation_tokens_total {self.tokens}\n".encode()

    async def generate(self, request: Any) -> None:
        await asyncio.sleep(0.001)
        self.tokens += request.max_tokens

    async def call_worker(self, method: str) -> list[dict[str, float]]:
        assert method == "telescope_sync_timings"
        return [{"seconds": 0.2, "wait_seconds": 0.1, "load_seconds": 0.05, "swap_seconds": 0.01}]


class Weights:
    """Reports its durations; the first sync is slower, since it connects."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.versions: list[int] = []

    async def sync(self) -> dict[str, float]:
        self.versions.append(self.trainer.version)
        await asyncio.sleep(0.02)
        first = len(self.versions) == 1
        return {
            "timing_weight_sync_trainer_total": 9.0 if first else 0.3,
            "timing_weight_sync_inference_total": 0.1,
            "weight_sync/bytes": 2e9,
            "weight_sync/background": 1.0,
            "weight_sync/transfer_seconds/server_0": 0.25,
            "weight_sync/transfer_seconds/server_1": 0.2,
        }


async def test_the_first_sync_is_not_counted_and_rates_use_medians(weight_sync: Any) -> None:
    trainer = SimpleNamespace(queue=asyncio.Lock(), version=0)
    parts: Any = SimpleNamespace(
        trainer=trainer,
        inference=SimpleNamespace(clients=[Client(), Client()]),
        config=SimpleNamespace(trainer_num_workers=1),
    )
    weights: Any = Weights(trainer)
    async with weight_sync.load(parts, requests=3):
        row = await weight_sync.measure_kind(parts, weights, "tiny", num_syncs=4)
    assert weights.versions == [1, 2, 3, 4, 5]
    assert len(row["syncs"]) == 4
    assert row["median_seconds"]["stall"] == row["worst_seconds"]["stall"] == 0.3
    assert row["median_seconds"]["transfer"] == 0.25
    assert row["median_seconds"]["total"] >= 0.02
    assert row["gigabytes_per_second"]["transfer"] == 8.0
    assert row["gigabytes_per_second"]["swap"] == 200.0
    assert row["background_servers"] == 1
    assert all(rate > 0 for rate in row["tokens_per_second"].values())


def test_a_model_of_the_benchmark_is_complete(weight_sync: Any, tmp_path: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    weight_sync.write_model(weight_sync.MORE_SHAPES["tiny"], tmp_path, torch.device("cpu"))
    weight_sync.finish_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id is not None
    assert len(tokenizer) <= 2048
    weight_sync.print_table({"cases": []})
