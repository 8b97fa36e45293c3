"""Defines the interface of training backends, and looks up their class.

The worker calls a backend and users subclass it (`train_backend: "my_package.my_module:MyBackend"`). It owns the model,
its sharding, the optimizer, and the collectives between its ranks. A subclass may implement only some methods: it
inherits missing methods and `super()` from the FSDP backend. A backend that shards the model in another way derives
from `telescope.trainer.step.RLBackend`, which has the RL step. Invariant: one queue in the driver calls methods marked
collective on all ranks in the same order.
"""

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from telescope.errors import ConfigError
from telescope.trainer.batch import Layout, SampleTokens
from telescope.utils.text import did_you_mean
from telescope.utils.timeline import Span
from telescope.weights.model_folder import ModelOrigin
from telescope.weights.plan import TensorMeta

__all__ = ["TensorMeta", "TrainingBackend", "find_backend"]


class TrainingBackend(ABC):
    """One rank of the trainer. The process group exists before the backend."""

    compiles: bool = False
    """Whether `warm_up` must compile something. Set by `init`, and equal on all ranks."""
    store_address: tuple[str, int] = ("", 0)
    """Host and port of the `TCPStore` with which the ranks found each other. Set before `init`."""
    origin: ModelOrigin | None = None
    """Run and step of the weights, which `save_hf` writes beside them. Set before `save_hf`."""

    def __init__(self, config: Any, rank: int, world_size: int, device: torch.device) -> None:
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.device = device

    @property
    def layout(self) -> Layout:
        """This rank's place among all ranks, after `init`. By default every rank trains its own rows."""
        return Layout(self.rank, self.world_size)

    @abstractmethod
    def init(self) -> None:
        """Loads and shards the model and makes the optimizer. Collective."""

    @abstractmethod
    def train_step(self, trainer_data: dict[str, Any]) -> dict[str, float]:
        """Runs one training step. Returns its metrics, equal on all ranks. Collective.

        `trainer_data` has this rank's `step`, `version` and `minibatches` (see `trainer.batch.StepInput`). Every key of
        the result is recorded; `section/group/metric` determines where it is shown. A subclass may call
        `super().train_step(trainer_data)` and add keys; those of rank 0 are recorded.
        """

    @abstractmethod
    def save_checkpoint(self, step: int, directory: Path) -> None:
        """Writes this rank's weights and optimizer state after `step` steps into `directory`. Collective.

        Returns when the weights may change again. The files need not be complete before `finish_checkpoint` returns.
        """

    def finish_checkpoint(self) -> None:  # noqa: B027  # a subclass that saves at once needs nothing here
        """Waits until the files of the last `save_checkpoint` are complete. Raises `OSError` if they cannot be.

        Called in another thread while this rank trains on. By default, `save_checkpoint` has already written the files.
        """

    @abstractmethod
    def load_checkpoint(self, step: int, directory: Path) -> None:
        """Loads a checkpoint that any number of ranks wrote with `save_checkpoint`. Collective."""

    @abstractmethod
    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields full tensors with their Hugging Face names, on this rank's device. Collective.

        Every rank must drain it; the order is the same on all. A tied tensor is yielded once. `dtype` defaults to the
        stored dtype, which tensors with `TensorMeta.exact` keep. On a rank that sends no weights (`layout`), only names
        and shapes must be correct.
        """

    @abstractmethod
    def weight_metadata(self) -> list[TensorMeta]:
        """Returns the metadata of `named_weights`, in its order, without communication."""

    @abstractmethod
    def sequence_logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Computes the logprob of each token except the first. Collective."""

    @abstractmethod
    def save_hf(self, directory: Path) -> None:
        """Writes the model as a Hugging Face checkpoint (rank 0 writes). Collective.

        Raises `OSError` on rank 0 when the disk cannot take it; the ranks can then save again elsewhere.
        """

    def save_adapter(self, directory: Path, dtype: torch.dtype | None = None) -> int:
        """Writes the adapters in peft's format on rank 0. Collective. `dtype` defaults to the stored dtype.

        Returns the bytes of the weights on rank 0. Raises `OSError` there.
        """
        raise NotImplementedError(f"{type(self).__name__} has no adapters: set lora_rank to 0")

    @abstractmethod
    def take_spans(self) -> list[Span]:
        """Returns this rank's spans since the last call."""

    def take_tokens(self) -> list[SampleTokens]:
        """Returns the recorded tokens that this rank trained since the last call.

        They belong to the samples in `trainer_data["recorded"]`. A backend need not keep any.
        """
        return []

    def warm_up(self) -> None:
        """Compiles training steps by passes over an arbitrary row. Collective.

        Called after `init` if `compiles` is set. Changes no weights, gradients, optimizer state or random numbers.
        """
        raise NotImplementedError(f"{type(self).__name__} sets `compiles` but has no `warm_up`")

    def close(self) -> None:  # noqa: B027  # most subclasses start nothing
        """Ends what the backend has started outside this process."""


def find_backend(name: str) -> type[TrainingBackend]:
    """Returns the class of `train_backend`: a built-in name or `package.module:Class`.

    A subclass of `TrainingBackend` with abstract methods inherits them, and `super()`, from the FSDP backend. Raises
    `ConfigError` if the class does not exist or is no backend.
    """
    if name == "fsdp":
        from telescope.trainer.backends.fsdp.backend import FSDPBackend

        return FSDPBackend
    if name == "megatron":
        from telescope.trainer.backends.megatron import load_backend

        return load_backend()
    module_name, colon, class_name = name.partition(":")
    if not colon:
        raise ConfigError(f"train_backend: {name!r} is unknown: use 'fsdp', 'megatron' or 'package.module:Class'")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything during its import
        raise ConfigError(
            f"train_backend: {name!r} cannot be imported: {type(error).__name__}: {error}. Correct it, install it, add "
            "its folder to PYTHONPATH, or start the run in that folder"
        ) from error
    if not hasattr(module, class_name):
        raise ConfigError(
            f"train_backend: {name!r} cannot be imported: {module.__file__} has no {class_name}."
            f"{did_you_mean(class_name, vars(module))}"
        )
    found = getattr(module, class_name)
    if not (isinstance(found, type) and issubclass(found, TrainingBackend)):
        raise ConfigError(f"train_backend: {name!r} is not a subclass of telescope.trainer.backends.TrainingBackend")
    if inspect.isabstract(found):
        from telescope.trainer.backends.fsdp.backend import FSDPBackend

        found = type(found.__name__, (found, FSDPBackend), {"__doc__": found.__doc__})
        assert issubclass(found, TrainingBackend)
    return found
