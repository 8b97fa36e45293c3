"""Gauges and spans of a real run."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Any

import pytest
from tests.e2e.stack.conftest import LongRun, Stack

from telescope.record.reader import Run

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

VLLM_METRICS = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_sum", "vllm:e2e_request_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_bucket",
}  # fmt: skip
TRACE_SECONDS = 30.0
"""How long traces may take to arrive: vLLM sends them once a second, on a machine that may be busy."""


async def test_every_part_of_a_run_is_measured_and_every_request_traced(stack: Stack, long_run: LongRun) -> None:
    run = long_run.outcome
    gauges = run.record.table("gauges").to_pylist(maps_as_pydicts="strict")
    by_part: dict[tuple[Any, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in gauges:
        by_part[row["component"], row["rank"], row["server"]][row["name"]].append(row["value"])
    assert by_part["inference", None, 0].keys() >= VLLM_METRICS
    generated = by_part["inference", None, 0]["vllm:generation_tokens_total"]
    assert generated == sorted(generated)
    assert generated[-1] > generated[0]
    for rank in range(2):
        assert min(by_part["trainer", rank, None]["process_memory_bytes"]) > 2**26
    assert max(by_part["host", None, None]["cpu_utilization_percent"]) > 0
    assert {row["node"] for row in gauges if row["component"] in ("host", "trainer", "inference")} != {None}
    trainer = {row["name"] for row in run.record.table("spans").to_pylist() if row["component"] == "trainer"}
    assert {"forward", "backward", "gradient_reduction", "optimizer", "weight_sync", "waiting_for_data"} <= trainer
    num_steps = len(run.steps())
    last_steps = [sample for sample in run.samples(status="kept") if sample["step"] >= num_steps - 4]
    await the_requests_are_traced(stack, last_steps)


async def the_requests_are_traced(stack: Stack, samples: list[dict[str, Any]]) -> None:
    """Traces go to the record of the parts, which outlives those of single runs here."""
    wanted = {sample["sample_id"]: sample for sample in samples}
    deadline = time.monotonic() + TRACE_SECONDS
    spans: dict[str, dict[str, dict[str, Any]]] = {}
    rows: list[dict[str, Any]] = []
    while spans.keys() != wanted.keys():
        assert time.monotonic() < deadline, f"{len(spans)} of {len(wanted)} samples are traced"
        await asyncio.sleep(0.5)
        rows = await asyncio.to_thread(
            lambda: Run(stack.folder / "parts").table("spans").to_pylist(maps_as_pydicts="strict")
        )
        spans = defaultdict(dict)
        for row in rows:
            sample = wanted.get(row["sample_id"])
            if row["component"] == "inference" and sample is not None and row["start"] >= sample["started_at"] - 0.1:
                spans[row["sample_id"]][row["name"]] = row
    names = {(row["component"], row["name"]) for row in rows}
    assert {("weights", "weight_sync"), ("weights", "weight_transfer"), ("trainer", "weight_broadcast_gather")} <= names
    for name, sample in wanted.items():
        queue, prefill, decode = (spans[name][part] for part in ("queue", "prefill", "decode"))
        assert sample["started_at"] - 0.1 <= queue["start"] <= queue["end"] == prefill["start"]
        assert prefill["end"] == decode["start"] <= decode["end"] <= sample["generated_at"] + 0.1
        assert (decode["server"], decode["attributes"]["lane"]) == (sample["server"], str(sample["lane"]))
        assert decode["attributes"]["tokens"] == str(sample["completion_tokens"])
