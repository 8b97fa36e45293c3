"""What the loops of a run use and do not own, and what of the trainer and of weight syncs they know.

Only names and types: the parts are made in `parts`, stand-ins of them in `fake_run` and in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from telescope.environments.worker_pool.messages import EnvironmentInfo
from telescope.environments.worker_pool.pool import EnvironmentPool
from telescope.errors import InfrastructureError
from telescope.orchestrator.filters import SampleFilters
from telescope.orchestrator.request_slots import RequestSlotPool
from telescope.orchestrator.step_recorder import StepLogPort
from telescope.record.recorder import Recorder
from telescope.rollout.types import Engine
from telescope.trainer.batch import StepInput, StepResult


class TrainerPort(Protocol):
    """The trainer, as the loops see it: all ranks behind one door."""

    async def train_step(self, inputs: list[StepInput]) -> StepResult: ...


class WeightSyncPort(Protocol):
    """Brings the trainer's current weights into every engine that is up. Returns step metrics of the sync."""

    async def sync(self) -> dict[str, float]: ...


@dataclass
class Services:
    """What the loops use and do not own."""

    environments: EnvironmentPool
    environment_keys: list[str]
    """What the pool calls the environment of each entry of the config."""
    lanes: RequestSlotPool
    engines: Sequence[Engine]
    trainer: TrainerPort
    weights: WeightSyncPort
    recorder: Recorder
    step_log: StepLogPort
    filters: SampleFilters
    """Judge every scored sample."""
    infos: Sequence[EnvironmentInfo]
    """What the environment of each entry of the config says of itself."""
    report_engine_failure: Callable[[int, InfrastructureError], None] = lambda server, error: None
