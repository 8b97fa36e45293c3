"""What a rank reports that runs out of memory."""

import pytest
import torch

from telescope.config import TelescopeConfig
from telescope.errors import RunError
from telescope.trainer.batch import StepInput
from telescope.trainer.worker import Trainer


class FullBackend:
    def train_step(self, trainer_data):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_rank_that_runs_out_of_gpu_memory_names_the_fields_to_change():
    trainer = Trainer(TelescopeConfig(environments=[{"name": "countdown"}]), 1, 2, "127.0.0.1", 1)
    trainer.backend = FullBackend()
    with pytest.raises(RunError, match=r"rank 1 ran out of GPU memory in step 7: CUDA out .* Lower seq_len or"):
        trainer.train_step(StepInput(step=7, version=7, minibatches=[]))
