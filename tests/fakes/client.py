"""What tests and benchmarks ask of an engine besides what a run does."""

from __future__ import annotations

from collections import Counter

from telescope.inference.base import METRICS_ROUTE
from telescope.inference.client import EngineClient
from telescope.inference.engine_metrics import parse


async def metrics_of(client: EngineClient) -> Counter[str]:
    """Returns the server's metrics by name, summed over labels (`vllm:num_requests_running`, ...)."""
    text = (await client._control("GET", METRICS_ROUTE)).decode()
    totals: Counter[str] = Counter()
    for reading in parse(text, 0.0, with_buckets=False):
        totals[reading.name] += reading.value  # type: ignore[assignment]
    return totals


def ask_for_json(client: EngineClient) -> EngineClient:
    """Makes the client ask for answers as JSON, as vLLM writes them by itself."""
    client._headers["Accept"] = "application/json"
    return client
