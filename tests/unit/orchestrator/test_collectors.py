"""Collecting gauges into the record, with independent sources."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from telescope.config import TelescopeConfig
from telescope.orchestrator.collectors import GIVEN_GPU, Source, collect, gauge_row, sources_of
from telescope.record.gauges import Reading, ReadingBatch


class Rows:
    def __init__(self, wanted: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self.wanted = wanted
        self.enough = asyncio.Event()

    def write(self, table: str, row: dict[str, Any]) -> None:
        assert table == ("nodes" if "cpu" in row else "gauges")
        self.rows.append(row)
        if len(self.rows) >= self.wanted:
            self.enough.set()


async def collected(sources: list[Source], wanted: int) -> list[dict[str, Any]]:
    rows = Rows(wanted)
    task = asyncio.create_task(collect(sources, rows))  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        await rows.enough.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return rows.rows


async def test_a_source_that_fails_or_hangs_delays_no_other_and_is_reported_once(caplog: pytest.LogCaptureFixture):
    numbers = iter(range(10**6))

    async def good() -> ReadingBatch:
        return ReadingBatch([Reading(1.0, "n", float(next(numbers)))], [])

    async def failing() -> ReadingBatch:
        raise RuntimeError("the actor is gone")

    async def hanging() -> ReadingBatch:
        await asyncio.Event().wait()
        raise AssertionError

    sources = [Source("a", {}, 0.001, failing), Source("b", {}, 0.001, hanging), Source("c", {}, 0.001, good)]
    with caplog.at_level(logging.WARNING):
        rows = await collected(sources, 20)
    assert [row["value"] for row in rows[:20]] == [float(n) for n in range(20)]
    assert ["the actor is gone" in record.message for record in caplog.records] == [True]


async def test_a_source_that_recovers_is_polled_again():
    answers = iter([RuntimeError("restarting"), ReadingBatch([Reading(1.0, "n", 1.0)], ["said by the source"])])

    async def take() -> ReadingBatch:
        answer = next(answers, ReadingBatch([], []))
        if isinstance(answer, Exception):
            raise answer
        return answer

    rows = await collected([Source("a", {}, 0.001, take)], 1)
    assert rows[0]["value"] == 1.0


async def test_the_hardware_and_the_gpus_of_a_source_are_written_once():
    async def take() -> ReadingBatch:
        return ReadingBatch([Reading(1.0, "n", 1.0)], [], node="box", gpus=(2, 3), hardware={"cpu": "EPYC"})

    rows = await collected([Source("server 1", {"component": "inference", "server": 1}, 0.001, take)], 10)
    assert [row for row in rows if "cpu" in row] == [{"cpu": "EPYC", "node": "box"}]
    given = [row for row in rows if row.get("name") == GIVEN_GPU]
    of_rows = [(row["component"], row["server"], row["node"], row["gpu"]) for row in given]
    assert of_rows == [("inference", 1, "box", 2), ("inference", 1, "box", 3)]


def test_a_row_names_its_component():
    rank = Source("rank", {"component": "trainer", "rank": 4}, 1.0, None)  # type: ignore[arg-type]
    machine = Source("machine", {}, 1.0, None)  # type: ignore[arg-type]
    memory = gauge_row(Reading(1.0, "torch_memory_allocated_bytes", 5.0), rank, ReadingBatch([], [], "box", (6,)))
    assert (memory["component"], memory["rank"], memory["node"], memory["gpu"]) == ("trainer", 4, "box", 6)
    power = gauge_row(Reading(1.0, "gpu_power_watts", 5.0, gpu=3), machine, ReadingBatch([], [], "box"))
    assert (power["component"], power["node"], power["gpu"]) == ("gpu", "box", 3)
    load = gauge_row(Reading(1.0, "load_average_1m", 5.0, (("a", "b"),)), machine, ReadingBatch([], [], "box"))
    assert (load["component"], load["gpu"], load["labels"]) == ("host", None, {"a": "b"})


def test_each_source_is_polled_at_its_interval() -> None:
    config = TelescopeConfig.model_validate(
        {
            "model": "m", "environments": [{"name": "countdown"}], "inference_num_workers": 1,
            "system_metrics_collection_interval_seconds": 7, "ray_torch_memory_drain_interval_seconds": 0.125,
        }
    )  # fmt: skip
    cluster = SimpleNamespace(names=["shelf"], here="box", world_size=2, take_readings=lambda name: None)
    sources = sources_of(config, None, cluster, cluster, cluster)  # type: ignore[arg-type]
    assert {source.name: source.interval for source in sources} == {
        "this machine": 7, "machine shelf": 7, "inference server 0": 7,
        "trainer rank 0": 0.125, "trainer rank 1": 0.125,
    }  # fmt: skip
