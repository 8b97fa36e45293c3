"""This version of torch has the private parts that checkpoints use, and they behave as expected."""

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from telescope.errors import RunError
from telescope.trainer.backends.fsdp.torch_internals import SharedCopies, shard_sizes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CPU = torch.device("cpu")


def test_a_copy_is_complete_in_shared_memory_and_its_memory_is_kept():
    copies, weight = SharedCopies(CPU), torch.arange(8.0)
    first = copies.copy({"model": {"weight": weight}, "step": 1})
    assert first["step"] == 1
    assert first["model"]["weight"].is_shared()
    assert first["model"]["weight"].equal(weight)
    address = first["model"]["weight"].data_ptr()
    weight += 1
    assert first["model"]["weight"][0] == 0, "training goes on without changing the copy"
    second = copies.copy({"model": {"weight": weight}, "step": 2})
    assert second["model"]["weight"].equal(weight)
    assert second["model"]["weight"].data_ptr() == address


@pytest.mark.parametrize(("message", "expected"), [
    ("unable to allocate shared memory(shm) for file </torch_1>", OSError), ("shapes differ", RuntimeError),
])  # fmt: skip
def test_only_missing_memory_is_reported_as_such(monkeypatch, message, expected):
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError(message)

    copies = SharedCopies(CPU)
    monkeypatch.setattr(copies._stager, "stage", fails)
    with pytest.raises(expected, match=r"shm|shapes"):
        copies.copy({})


def test_the_index_names_the_files_and_their_sizes(tmp_path):
    dcp.save({"weight": torch.zeros(100)}, checkpoint_id=str(tmp_path), no_dist=True)
    ((name, size),) = shard_sizes(tmp_path).items()
    assert 400 <= size <= (tmp_path / name).stat().st_size
    (tmp_path / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(RunError, match="metadata cannot be read"):
        shard_sizes(tmp_path)
