"""Adapts torch's private staging buffers and index of shards.

For a new version of torch, check this module first (`tests/unit/trainer/test_torch_internals.py`). Tested with 2.11 and
2.13.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from telescope.errors import RunError

NO_SHARED_MEMORY = ("shared memory", "unable to resize file", "unable to mmap", "No space left")
"""Parts of torch's messages when /dev/shm is full."""


class SharedCopies:
    """Copies states into a staging buffer in shared host memory.

    The buffer is pinned if the device is a GPU, and used again for the next copy. torch's public `DefaultStager` is
    closed after one copy in torch 2.11.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._stager = StateDictStager(pin_memory=self._on_gpu, share_memory=True)

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns a complete copy of the state. Raises `OSError` if there is too little memory for it."""
        try:
            copy: dict[str, Any] = self._stager.stage(state, non_blocking=self._on_gpu)
        except RuntimeError as error:
            if any(part in str(error) for part in NO_SHARED_MEMORY):
                raise OSError(f"the state cannot be copied to shared memory (/dev/shm): {error}") from error
            raise
        if self._on_gpu:
            torch.cuda.synchronize()
        return copy


def read_index(directory: Path) -> Metadata:
    """Returns the index of a checkpoint's shards. Raises `RunError` if it cannot be read."""
    try:
        return dcp.FileSystemReader(directory).read_metadata()
    except Exception as error:  # it is a pickle, which raises anything if it is damaged
        raise RunError(f"{directory} is damaged: its .metadata cannot be read ({error}). Use another step") from error


def shard_sizes(directory: Path) -> dict[str, int]:
    """Returns the files in a checkpoint's index, with minimum sizes in bytes. Raises the errors of `read_index`."""
    sizes: dict[str, int] = {}
    for stored in (read_index(directory).storage_data or {}).values():
        sizes[stored.relative_path] = max(sizes.get(stored.relative_path, 0), stored.offset + stored.length)
    return sizes


def read_part(directory: Path, index: Metadata, name: str, first: tuple[int, ...]) -> torch.Tensor:
    """Reads a part of a checkpoint's tensor, without a process group. Raises `RunError` for a damaged checkpoint.

    `first` are indices in the first dimensions, which the part lacks.
    """
    entry = index.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    offsets = torch.Size([*first, *[0] * (len(entry.size) - len(first))])
    sizes = torch.Size([*[1] * len(first), *entry.size[len(first) :]])
    part = torch.empty(sizes, dtype=entry.properties.dtype)
    items = create_read_items_for_chunk_list(name, entry, [ChunkStorageMetadata(offsets, sizes)])
    planner = _OnePart(part)
    reader = dcp.FileSystemReader(directory)
    reader.set_up_storage_reader(index, is_coordinator=True)
    try:
        reader.read_data(LoadPlan(items), planner).wait()
    except Exception as error:  # of archives, pickles or files
        raise RunError(f"{directory} is damaged: {name} cannot be read ({error}). Use another step") from error
    return part.reshape(entry.size[len(first) :])


class _OnePart(DefaultLoadPlanner):
    """Reads all items into one tensor."""

    def __init__(self, part: torch.Tensor) -> None:
        super().__init__()
        self.part = part

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.part
