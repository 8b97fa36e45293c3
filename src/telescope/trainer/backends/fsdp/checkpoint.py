"""Checkpoints of the FSDP backend: sharded weights and optimizer state, written in the background.

Owns the format, that of `torch.distributed.checkpoint` (DCP), which loads on any number of ranks. A save copies the
shards of this rank into host memory that a second process shares (pinned on a GPU, allocated once). Training stands
still for the copy only; the second process then writes the files.

Invariants: one save at a time. A save that fails leaves its folder incomplete and changes nothing else.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._async_process_executor import _AsyncCheckpointProcess
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from telescope.errors import RunError
from telescope.weights.plan import TensorMeta

MODEL, OPTIMIZER = "model", "optimizer"
"""Keys of the saved state. A checkpoint without training state has the first only."""


def share_store(address: str, port: int) -> None:
    """Lets the writing processes find each other through the ranks' own store.

    By default DCP opens another store, on every interface.
    """
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), DCP_USE_PREFIX_STORE="1")


_write_requests = _AsyncCheckpointProcess._checkpointing_subprocess


def _exit_with_the_rank() -> None:
    """Ends this process when its rank was killed, so that it does not write into a folder that is used again."""
    rank = multiprocessing.parent_process()
    assert rank is not None
    rank.join()
    os._exit(1)


def _write_quietly(*arguments: Any) -> None:
    """The main function of the writing process, which would log every request to the terminal, and outlive its rank."""
    logging.disable(logging.INFO)
    threading.Thread(target=_exit_with_the_rank, daemon=True).start()
    _write_requests(*arguments)


class _KeptStager(AsyncStager):
    """Copies states into host memory that it keeps for the next copy, shared with the writing process.

    torch's `DefaultStager` is closed after one copy in torch 2.11.
    """

    _synchronize_after_execute = False

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._copier = StateDictStager(pin_memory=self._on_gpu, share_memory=True)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns a copy of the state, complete."""
        copy: dict[str, Any] = self._copier.stage(state_dict, non_blocking=self._on_gpu)
        if self._on_gpu:
            torch.cuda.synchronize()
        return copy

    def synchronize_staging(self) -> None:
        """Does nothing: `stage` returns a complete copy."""

    def close(self) -> None:
        """Keeps the memory for the next save."""


class BackgroundSaver:
    """The saves of one rank. Make it once: the memory of the copy and the writing process are kept."""

    def __init__(self, device: torch.device) -> None:
        _AsyncCheckpointProcess._checkpointing_subprocess = staticmethod(_write_quietly)  # type: ignore[assignment,method-assign]
        self._stager = _KeptStager(device)
        self._pending: Future[Any] | None = None

    def start(self, state: dict[str, Any], directory: Path) -> None:
        """Copies `state` and starts to write it. Collective. The last save must have been waited for.

        Raises `OSError` if there is no memory for the copy.
        """
        assert self._pending is None, "the last checkpoint is still being written"
        try:
            result = dcp.async_save(
                state,
                storage_writer=dcp.FileSystemWriter(directory),
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self._stager,
            )
        except RuntimeError as error:
            raise OSError(f"the state cannot be copied to shared memory (/dev/shm): {error}") from error
        assert isinstance(result, Future)
        self._pending = result

    def wait(self) -> None:
        """Waits until the files of the last save are on disk. Raises `OSError` if they cannot be written."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except dcp.CheckpointException as error:
            reasons = sorted({str(failure[0]) for failure in error.failures.values()})
            raise OSError("; ".join(reasons)) from None
        except (EOFError, RuntimeError) as error:
            raise OSError(f"the process that writes the checkpoint has ended: {error}") from error


def training_state(policy: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Returns the weights and, with an optimizer, its state, by their names in the model. Collective."""
    if optimizer is None:
        return {MODEL: get_model_state_dict(policy)}
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    return {MODEL: model_state, OPTIMIZER: optimizer_state}


def missing_files(directory: Path) -> list[str]:
    """Returns what a checkpoint lacks: its index, or shards that are absent or shorter than the index says."""
    try:
        metadata = dcp.FileSystemReader(directory).read_metadata()
    except FileNotFoundError:
        return [".metadata, the index of the shards, does not exist"]
    except Exception as error:  # it is a pickle, which raises anything when it is damaged
        return [f".metadata, the index of the shards, cannot be read ({type(error).__name__}: {error})"]
    needed: dict[str, int] = {}
    for stored in (metadata.storage_data or {}).values():
        needed[stored.relative_path] = max(needed.get(stored.relative_path, 0), stored.offset + stored.length)
    missing = []
    for name, size in sorted(needed.items()):
        path = directory / name
        if not path.exists():
            missing.append(f"{name} does not exist")
        elif path.stat().st_size < size:
            missing.append(f"{name} has {path.stat().st_size:,} of {size:,} bytes")
    return missing


def load_training_state(policy: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Loads a checkpoint, saved by any number of ranks. Collective.

    Settings of the optimizer stay those of the config. Its state too, if the checkpoint has none.
    """
    saved = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    has_optimizer = any(name.startswith(f"{OPTIMIZER}.") for name in saved)
    state = training_state(policy, optimizer if has_optimizer else None)
    dcp.load(state, checkpoint_id=str(directory))
    set_model_state_dict(policy, state[MODEL])
    if has_optimizer:
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        set_optimizer_state_dict(policy, optimizer, state[OPTIMIZER])
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)


READ_BYTES = 256 << 20
"""Weights that are read at a time; a larger tensor alone."""


def saved_weights(directory: Path) -> list[TensorMeta]:
    """Returns the weights of a checkpoint by their names in the model. Raises `RunError` for a damaged one."""
    try:
        saved = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    except Exception as error:  # a pickle
        raise RunError(f"{directory} is damaged: its .metadata cannot be read ({error!r}). Use another step") from error
    return [
        TensorMeta(name.removeprefix(f"{MODEL}."), tuple(entry.size), str(entry.properties.dtype).partition(".")[2])
        for name, entry in saved.items()
        if name.startswith(f"{MODEL}.") and isinstance(entry, TensorStorageMetadata)
    ]


def read_weights(
    directory: Path, metas: Sequence[TensorMeta], *, read_bytes: int = READ_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields whole tensors of a checkpoint, in the order of `metas`, without a process group.

    Memory holds `read_bytes` of them, or the largest. Raises `RunError` for a damaged checkpoint.
    """
    waiting = list(metas)
    while waiting:
        state: dict[str, torch.Tensor] = {}
        num_bytes = 0
        while waiting and (not state or num_bytes < read_bytes):
            meta = waiting.pop(0)
            key = f"{MODEL}.{meta.name}"
            state[key] = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype))
            num_bytes += state[key].nbytes
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that there is no process group
                dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
        except dcp.CheckpointException as error:
            reasons = "; ".join(sorted({str(failure[0]) for failure in error.failures.values()}))
            raise RunError(f"{directory} is damaged: {reasons}. Use another step") from error
        while state:
            name = next(iter(state))
            yield name.removeprefix(f"{MODEL}."), state.pop(name)
