"""The interface of a training backend.

The worker calls it and users subclass it (`train_backend: "my_package.my_module:MyBackend"`). A backend owns the model,
its sharding, the optimizer, and the collectives between its ranks. A subclass may implement a part: missing methods,
and `super()` calls, are those of the FSDP backend. Invariant: methods marked collective are called on all ranks in the
same order, by one queue in the driver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from telescope.trainer.batch import Span
from telescope.weights.plan import TensorMeta


class TrainingBackend(ABC):
    """One rank of the trainer. The process group exists before the backend."""

    compiles: bool = False
    """Set by `init`: whether `warm_up` must compile something. Equal on all ranks."""

    def __init__(self, config: Any, rank: int, world_size: int, device: torch.device) -> None:
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.device = device

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
        """Writes this rank's weights and optimizer state after `step` steps into `directory`. Collective."""

    @abstractmethod
    def load_checkpoint(self, step: int, directory: Path) -> None:
        """Loads a checkpoint of `save_checkpoint`, with any number of ranks. Collective."""

    @abstractmethod
    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields full tensors with their Hugging Face names, on this rank's device. Collective.

        Every rank must drain it; the order is the same on all. A tied tensor is yielded once. In `dtype`, by default as
        stored.
        """

    @abstractmethod
    def weight_metadata(self) -> list[TensorMeta]:
        """Returns the metadata of `named_weights`, in its order, without communication."""

    @abstractmethod
    def sequence_logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Computes the logprob of each token except the first under the current weights. Collective."""

    @abstractmethod
    def save_hf(self, directory: Path) -> None:
        """Writes the model as a Hugging Face checkpoint (rank 0 writes). Collective.

        Raises `OSError` on rank 0 when the disk cannot take it; the ranks can then save again elsewhere.
        """

    @abstractmethod
    def take_spans(self) -> list[Span]:
        """Returns this rank's spans since the last call."""

    def warm_up(self) -> None:
        """Compiles training steps by a forward and a backward pass over an arbitrary row. Collective.

        Called after `init` if that set `compiles`. Changes no weights, gradients, optimizer state or random numbers.
        """
        raise NotImplementedError(f"{type(self).__name__} sets `compiles` but has no `warm_up`")

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Number of parameters of the whole model, tied ones once."""
