"""Writes the FSDP backend's sharded state to checkpoints in the background, and loads them.

Owns the format, which is `torch.distributed.checkpoint` (DCP) and loads on any number of ranks. A save copies the
shards of this rank into host memory that a second process shares (pinned on a GPU, allocated once). Training pauses for
the copy only; the second process (`checkpoint_writer`) then writes the files.

Invariants: one save at a time. A save that fails leaves its folder incomplete and changes nothing else.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from telescope.errors import RunError
from telescope.trainer.backends.fsdp.checkpoint_writer import write_checkpoints
from telescope.trainer.backends.fsdp.torch_internals import SharedCopies, read_index, read_part, shard_sizes
from telescope.trainer.lora import is_adapter
from telescope.weights.plan import TensorMeta

MODEL, OPTIMIZER = "model", "optimizer"
"""Keys of the saved state. A checkpoint without training state has only the first."""


START_METHOD = "spawn"
"""A fork would copy the rank's locks and CUDA context, which do not work in another process."""

STOP_SECONDS = 5.0


class BackgroundSaver:
    """Saves the checkpoints of one rank. Create it once, on all ranks: it keeps the writer and the copy's memory."""

    def __init__(self, device: torch.device, store: tuple[str, int]) -> None:
        """Starts the writer in the background. `store` is host and port of the ranks' store."""
        self.copies = SharedCopies(device)
        self._store = store
        self._num_writers = 0
        self._is_writing = False
        self._start_writer()

    def _start_writer(self) -> None:
        context: Any = torch.multiprocessing.get_context(START_METHOD)  # the name of the method determines its type
        self._pipe, child = context.Pipe()
        arguments = (child, self._store, self._num_writers, dist.get_rank(), dist.get_world_size())
        self._process = context.Process(target=write_checkpoints, args=arguments, name="checkpoints", daemon=True)
        self._process.start()
        child.close()  # so that `recv` ends when the process ends
        self._num_writers += 1

    def start(self, state: dict[str, Any], directory: Path) -> None:
        """Copies `state` and starts to write it. Collective. Call `wait` for the last save first.

        If one rank has no memory for the copy, none writes, and all raise `OSError`.
        """
        assert not self._is_writing, "the last checkpoint is still being written"
        if not _on_all_ranks(self._process.is_alive()):
            # Their group needs all of them.
            self.close()
            self._start_writer()
        problem: OSError | None = None
        copy: dict[str, Any] = {}
        try:
            copy = self.copies.copy(state)
        except OSError as error:
            problem = error
        if not _on_all_ranks(problem is None):
            raise problem or OSError("another rank could not copy its state")
        self._pipe.send((copy, directory))
        self._is_writing = True

    def wait(self) -> None:
        """Waits until the files of the last save are on disk. Raises `OSError` if they cannot be written."""
        if not self._is_writing:
            return
        try:
            problem = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(STOP_SECONDS)
            code = self._process.exitcode
            raise OSError(f"the process that writes checkpoints has ended with exit code {code}") from error
        finally:
            self._is_writing = False
        if problem is not None:
            raise OSError(problem)

    def close(self) -> None:
        """Ends the writer."""
        self._pipe.close()
        self._process.kill()
        self._process.join(STOP_SECONDS)


def _on_all_ranks(holds: bool) -> bool:
    flag = torch.tensor(int(holds))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def training_state(policy: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Returns the weights by their names in the model, and the optimizer's state if there is one. Collective.

    Of a model with adapters these are the trained adapters alone, because the run's first model has the other weights.
    """
    model_state, optimizer_state = state_dict.get_state_dict(policy, optimizer or [])
    adapters = {name for name, p in policy.named_parameters() if is_adapter(name) and p.requires_grad}
    state: dict[str, Any] = {MODEL: {n: value for n, value in model_state.items() if not adapters or n in adapters}}
    return state if optimizer is None else state | {OPTIMIZER: optimizer_state}


def missing_files(directory: Path, train_backend: str) -> list[str]:
    """Returns descriptions of a missing index, and of missing or truncated shards.

    Empty for a backend with another format.
    """
    if not (directory / ".metadata").exists():
        return [".metadata, the index of the shards, does not exist"] if train_backend == "fsdp" else []
    try:
        sizes = shard_sizes(directory)
    except RunError as error:
        return [f".metadata, the index of the shards, cannot be read ({error.__cause__})"]
    missing = []
    for name, size in sorted(sizes.items()):
        path = directory / name
        if not path.exists():
            missing.append(f"{name} does not exist")
        elif path.stat().st_size < size:
            missing.append(f"{name} has {path.stat().st_size:,} of {size:,} bytes")
    return missing


def load_training_state(policy: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Loads a checkpoint that any number of ranks saved. Collective.

    The optimizer keeps the settings of the config. It also keeps its state if the checkpoint has none.
    """
    saved = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    has_optimizer = any(name.startswith(f"{OPTIMIZER}.") for name in saved)
    state = training_state(policy, optimizer if has_optimizer else None)
    dcp.load(state, checkpoint_id=str(directory))
    state_dict.set_model_state_dict(policy, state[MODEL], options=state_dict.StateDictOptions(strict=False))
    if has_optimizer:
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        state_dict.set_optimizer_state_dict(policy, optimizer, state[OPTIMIZER])
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)


def saved_weights(directory: Path) -> list[TensorMeta]:
    """Returns the metadata of a checkpoint's weights by their names in the model. Raises `RunError` for damage."""
    return [
        TensorMeta(name.removeprefix(f"{MODEL}."), tuple(entry.size), str(entry.properties.dtype).partition(".")[2])
        for name, entry in read_index(directory).state_dict_metadata.items()
        if name.startswith(f"{MODEL}.") and isinstance(entry, TensorStorageMetadata)
    ]


def read_weights(directory: Path, metas: Sequence[TensorMeta]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields whole tensors in the order of `metas`, one at a time. Raises `RunError` for a damaged checkpoint."""
    index = read_index(directory)
    for meta in metas:
        yield meta.name, read_part(directory, index, f"{MODEL}.{meta.name}", ())
