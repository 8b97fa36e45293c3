"""What a run that is stopped or fails still writes."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.orchestrator.fakes import config_of
from tests.unit.orchestrator.test_checkpoints import FileTrainer, directory_of

from telescope.orchestrator.checkpoints import Checkpointer, CheckpointFolder
from telescope.orchestrator.run_state import RunState
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.training import Training


class Ending:
    """A training whose loops have ended after step 3, with an error."""

    def __init__(self, folder: Path, checkpoint_every: int = 9) -> None:
        self.config = config_of(checkpoint_every=checkpoint_every)
        self.folder = CheckpointFolder(folder)
        self.trainer: Any = FileTrainer()
        self.trainer.version, self.trainer.is_settled = 3, True
        status = RunStatus("test", 10, version=3)
        parts: Any = SimpleNamespace(config=self.config, trainer=self.trainer)
        nothing: Any = None
        self.training = Training(parts, nothing, nothing, status, self.folder, nothing)
        self.checkpointer = Checkpointer(
            self.config, self.folder, self.trainer, status, directory_of(), seconds_left=self.training._seconds_left
        )

    async def save(self) -> list[int]:
        orchestrator: Any = SimpleNamespace(run_state=lambda: RunState(step=3))
        await self.training._save_after_error(orchestrator, self.checkpointer)
        return self.folder.steps()


@pytest.mark.parametrize(("version", "is_settled", "saved"), [
    pytest.param(3, True, [3], id="another component failed"),
    pytest.param(3, False, [], id="a step failed, which some ranks may have taken"),
    pytest.param(4, True, [], id="the weights were not sent"),
])  # fmt: skip
async def test_after_an_error_a_checkpoint_is_written_if_the_ranks_have_the_weights_of_the_last_step(
    tmp_path, version, is_settled, saved
):
    ending = Ending(tmp_path)
    ending.trainer.version, ending.trainer.is_settled = version, is_settled
    assert ending.training._seconds_left() is None
    assert await ending.save() == saved
    left = ending.training._seconds_left()
    assert left is not None and 500 < left <= 600
    ending.training._exit_requested_at = time.monotonic() - 700
    assert ending.training._seconds_left() == 0


@pytest.mark.parametrize(("every", "is_said"), [(9, True), (0, False)])
async def test_a_checkpoint_after_an_error_is_announced_only_if_one_is_written(tmp_path, every, is_said):
    ending = Ending(tmp_path, every)
    assert await ending.save() == [3] * is_said
    assert (ending.training.status.phase == "writing a checkpoint after the error") == is_said


async def test_a_trainer_that_fails_too_does_not_hide_the_first_error(tmp_path):
    ending = Ending(tmp_path)
    ending.trainer.copy_error = RuntimeError("gone")
    assert await ending.save() == []
