"""What a run that is stopped or fails still writes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.orchestrator.fakes import config_of
from tests.unit.orchestrator.test_checkpoints import FileTrainer

from telescope.orchestrator.checkpoints import Checkpointer
from telescope.orchestrator.run import _TrainingRun
from telescope.orchestrator.run_state import RunState


@pytest.mark.parametrize(
    ("version", "is_settled", "saved"),
    [
        pytest.param(3, True, [3], id="another component failed"),
        pytest.param(3, False, [], id="a step failed, which some ranks may have taken"),
        pytest.param(4, True, [], id="the weights were not sent"),
    ],
)
async def test_after_an_error_a_checkpoint_is_written_if_the_ranks_have_the_weights_of_the_last_step(
    tmp_path: Path, version: int, is_settled: bool, saved: list[int]
) -> None:
    run = _TrainingRun(config_of(run_dir=str(tmp_path / "run"), checkpoint_every=9), [], None)
    trainer: Any = FileTrainer()
    trainer.version, trainer.is_settled = version, is_settled
    run._status.version = 3
    checkpointer = Checkpointer(run._config, run._checkpoints, trainer, run._status, seconds_left=run._seconds_left)
    orchestrator: Any = SimpleNamespace(run_state=lambda: RunState(step=3))
    components: Any = SimpleNamespace(trainer=trainer)
    assert run._seconds_left() is None
    await run._save_after_error(components, orchestrator, checkpointer)
    assert run._checkpoints.steps() == saved
    left = run._seconds_left()
    assert left is not None and 500 < left <= 600
    run._leaving_at = time.monotonic() - 700
    assert run._seconds_left() == 0


async def test_a_trainer_that_fails_too_does_not_hide_the_first_error(tmp_path: Path) -> None:
    run = _TrainingRun(config_of(run_dir=str(tmp_path / "run"), checkpoint_every=9), [], None)
    trainer: Any = FileTrainer()
    trainer.version, trainer.is_settled, trainer.copy_error = 0, True, RuntimeError("gone")
    checkpointer = Checkpointer(run._config, run._checkpoints, trainer, run._status)
    orchestrator: Any = SimpleNamespace(run_state=lambda: RunState(step=0))
    run._status.version = 0
    checkpointer._last_step = -1
    await run._save_after_error(SimpleNamespace(trainer=trainer), orchestrator, checkpointer)  # type: ignore[arg-type]
    assert run._checkpoints.steps() == []
    await asyncio.sleep(0)
