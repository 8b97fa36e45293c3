"""Collects gauges of a run's processes and machines into the record.

    trainer ranks       torch's allocator, in a thread     --+
    inference actors    vLLM's Prometheus metrics, likewise  +--Ray calls--> collect --> gauges
    other machines      processor, memory, GPUs, likewise  --+                ^
    this machine        the same, in threads of the driver -------------------+

Owns the sources and their intervals; `record.gauges` reads the values. Invariants: a collector blocks nothing else. A
source that does not respond causes a warning, is polled again, and delays no other source.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from telescope.config import TelescopeConfig
from telescope.record.gauges import Reading, ReadingBatch
from telescope.record.recorder import Recorder
from telescope.record.system_metrics import MachineSampler

if TYPE_CHECKING:
    from telescope.cluster.actors import HostGroup
    from telescope.cluster.inference_group import InferenceGroup
    from telescope.cluster.trainer_group import TrainerGroup

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 30.0  # Time for a source to respond. A rank that loads a model may block its process for long.

GIVEN_GPU = "gpu_given"
"""Gauge that is written once for each GPU assigned to a trainer rank or inference server. Its value is always 1."""


@dataclass
class Source:
    """A source of readings, polled every `interval` seconds. All its rows have `columns`."""

    name: str
    columns: dict[str, Any]
    interval: float
    take: Callable[[], Awaitable[ReadingBatch]]


async def collect(sources: list[Source], recorder: Recorder) -> None:
    """Polls the sources until cancelled, and records their readings. Continues after an error of a source."""
    await asyncio.gather(*(_collect(source, recorder) for source in sources))


async def _collect(source: Source, recorder: Recorder) -> None:
    is_failing = is_placed = False
    while True:
        await asyncio.sleep(source.interval)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                batch = await source.take()
        except Exception as error:  # a run continues without a gauge
            if not is_failing:
                logger.warning("%s: no readings (%r); retrying", source.name, error)
            is_failing = True
            continue
        is_failing = False
        for problem in batch.problems:
            logger.warning("%s: %s", source.name, problem)
        if not is_placed:
            is_placed = True
            if batch.hardware is not None:
                recorder.write("nodes", {**batch.hardware, "node": batch.node})
            for gpu in batch.gpus:
                recorder.write("gauges", gauge_row(Reading(time.time(), GIVEN_GPU, 1.0, gpu=gpu), source, batch))
        for reading in batch.readings:
            recorder.write("gauges", gauge_row(reading, source, batch))


def gauge_row(reading: Reading, source: Source, batch: ReadingBatch) -> dict[str, Any]:
    """Returns the row of a reading. A process with a single GPU is attributed to that GPU."""
    gpu = reading.gpu
    if gpu is None and len(batch.gpus) == 1:
        (gpu,) = batch.gpus
    return {
        "time": reading.time,
        "name": reading.name,
        "component": "host" if reading.gpu is None else "gpu",
        "value": reading.value,
        "node": batch.node,
        "gpu": gpu,
        "labels": dict(reading.labels),
        **source.columns,
    }


def sources_of(
    config: TelescopeConfig, machine: MachineSampler, trainer: TrainerGroup, inference: InferenceGroup, hosts: HostGroup
) -> list[Source]:
    """Returns all sources of a run. `machine` samples the driver's machine, `hosts` samples the others."""
    seconds = config.system_metrics_collection_interval_seconds

    async def take_here() -> ReadingBatch:
        return replace(machine.take(), node=hosts.here)

    sources = [Source("this machine", {}, seconds, take_here)]
    sources += [Source(f"machine {name}", {}, seconds, partial(hosts.take_readings, name)) for name in hosts.names]
    for rank in range(trainer.world_size):
        columns, drain = {"component": "trainer", "rank": rank}, config.ray_torch_memory_drain_interval_seconds
        sources.append(Source(f"trainer rank {rank}", columns, drain, partial(trainer.take_readings, rank)))
    for index in range(config.num_inference_servers):
        columns = {"component": "inference", "server": index}
        sources.append(Source(f"inference server {index}", columns, seconds, partial(inference.take_readings, index)))
    return sources
