"""The process that writes the checkpoints of a rank."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from telescope.trainer.backends.fsdp.checkpoint import BackgroundSaver


class NotedGpus:
    """Becomes a tensor in the process that receives it, which first notes the GPUs that it may use."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return note_gpus, (self.file,)


def note_gpus(file: Path) -> torch.Tensor:
    file.write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    return torch.ones(1)


def test_the_writer_sees_no_gpu_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    saver = BackgroundSaver(torch.device("cpu"), ("127.0.0.1", store.port))
    monkeypatch.setattr(saver.copies, "copy", lambda state: state)
    try:
        saver.start({"weight": NotedGpus(tmp_path / "gpus")}, tmp_path / "checkpoint")
        saver.wait()
    finally:
        saver.close()
        dist.destroy_process_group()
    assert (tmp_path / "gpus").read_text() == ""
    assert (tmp_path / "checkpoint" / ".metadata").exists()
