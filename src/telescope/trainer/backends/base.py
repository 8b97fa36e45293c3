"""What a training backend must be able to do.

Owns the interface that the worker drives and users subclass (`train_backend: "my_package.my_module:MyBackend"`). A
backend owns the model, how it is sharded, the optimizer, and the collectives between its ranks. A subclass need not
implement all of it: what it leaves out, and what its `super()` calls, is the FSDP backend's. Invariant: every method
that is marked collective is called on all ranks, in the same order, by one queue in the driver.
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
    """One rank of the trainer. The process group exists when the backend is made."""

    compiles: bool = False
    """Set by `init`: the first step would compile something, so that `warm_up` is called. Equal on all ranks."""

    def __init__(self, config: Any, rank: int, world_size: int, device: torch.device) -> None:
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.device = device

    @abstractmethod
    def init(self) -> None:
        """Load and shard the model, make the optimizer. Collective."""

    @abstractmethod
    def train_step(self, trainer_data: dict[str, Any]) -> dict[str, float]:
        """Do one training step and return its metrics, equal on all ranks. Collective.

        `trainer_data` holds this rank's `step`, `version` and `minibatches` (see `trainer.batch.StepInput`). Every key
        of the result is recorded; `section/group/metric` says where it is shown. A subclass may call
        `super().train_step(trainer_data)` and add keys; those of rank 0 count.
        """

    @abstractmethod
    def save_checkpoint(self, step: int, directory: Path) -> None:
        """Write this rank's share of weights and optimizer state after `step` steps into `directory`. Collective."""

    @abstractmethod
    def load_checkpoint(self, step: int, directory: Path) -> None:
        """Continue from what `save_checkpoint` wrote, with any number of ranks. Collective."""

    @abstractmethod
    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors under their Hugging Face names, one at a time, on this rank's device. Collective: every rank
        takes every tensor, in the same order. A tied tensor comes once. In `dtype`, by default the one they have."""

    @abstractmethod
    def weight_metadata(self) -> list[TensorMeta]:
        """What `named_weights` will yield, in its order, without any communication."""

    @abstractmethod
    def sequence_logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Logprob of each token but the first given those before it, under the current weights. Collective."""

    @abstractmethod
    def save_hf(self, directory: Path) -> None:
        """Write the model as a Hugging Face checkpoint (rank 0 writes). Collective.

        Raises `OSError` on rank 0 when the disk cannot take it; the ranks can then save again elsewhere.
        """

    @abstractmethod
    def take_spans(self) -> list[Span]:
        """Spans measured since the last call, this rank's."""

    def warm_up(self) -> None:
        """Compile what training steps will run, by a forward and a backward pass over a row of no meaning. Collective.

        Called after `init`, if it set `compiles`. Weights, gradients, optimizer and random numbers are as before.
        """
        raise NotImplementedError(f"{type(self).__name__} compiles, but does not say how to warm up")

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied ones once."""
