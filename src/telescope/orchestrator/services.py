"""Services of the loops, and protocols of trainer and weight sync.

Names and types only; the composition root creates the services, and `telescope.testing` the fakes.
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
    """Interface of the trainer for the loops."""

    async def train_step(self, inputs: list[StepInput]) -> StepResult: ...


class WeightSyncPort(Protocol):
    """Sends the trainer's current weights to every engine that is up. Returns step metrics of the sync."""

    async def sync(self) -> dict[str, float]: ...


@dataclass
class Services:
    """Services that the loops use and do not own."""

    environments: EnvironmentPool
    environment_keys: list[str]
    """The pool's key of each environment entry of the config."""
    slots: RequestSlotPool
    engines: Sequence[Engine]
    trainer: TrainerPort
    weights: WeightSyncPort
    recorder: Recorder
    step_log: StepLogPort
    filters: SampleFilters
    """Filters and penalties for scored samples."""
    infos: Sequence[EnvironmentInfo]
    """Description of the environment of each entry of the config."""
    report_engine_failure: Callable[[int, InfrastructureError], None] = lambda server, error: None
