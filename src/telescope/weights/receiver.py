"""The engine's end of a weight transfer: receives buckets in place, or into staging buffers while it samples.

Does not know vLLM: `load` is the model's own weight loader. Every worker of an engine receives everything and keeps its
own shard. vLLM's layers are known by class name and attributes only, so that tests can use stand-ins.

Invariants: bucket i + 1 is in flight while bucket i is loaded. A buffer is not reused, because a loader may keep a view
of it until the rest of a fused layer arrives, unless the loader copies (`ReceiveBuffers`). The sender is notified that
a worker has everything only after the device has finished loading.

`StagingBuffers` is a second set of a model's parameters. It owns those tensors, the module tree that passes them to the
model's own weight loader, and the swap. `OverlappedReceive` is one sync in progress: a thread with its own CUDA stream.
The caller pauses the engine and swaps after `finish`. Invariants:
- Loading modifies no tensor and no module of the model: the tree consists of new module objects that share everything
  except parameters with the model's. So one thread may load while another computes.
- A swap copies into the existing storage of the parameters, because captured CUDA graphs contain addresses.
- A staging buffer starts as a copy of its parameter, so that parameters that are not sent keep their values.
- Staging buffers have the layout in which layers compute. A model with a layer that computes with anything derived
  from its parameters (packed for the CPU, quantized, experts, latent attention) cannot have them and is updated in
  place.
- The thread ends at the transfer's deadline, when the sender exits, or when the communicator is aborted; `finish`
  raises its exception in the calling thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from telescope.errors import DeadlineExceeded
from telescope.utils.process import start_daemon_thread
from telescope.utils.text import listed
from telescope.weights.communicator import Broadcast, Communicator
from telescope.weights.plan import UpdateInfo, plan_buckets, tensor_in

NamedTensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class ReceiveReport:
    """Seconds of one sync on a worker: total, waiting for bytes, loading them."""

    seconds: float
    wait_seconds: float
    load_seconds: float


class ReceiveBuffers:
    """Two buffers that all syncs reuse, for loaders that copy tensors at once.

    Reuse needs no waiting: on a GPU a broadcast into a buffer is queued behind the copies out of it. After an aborted
    transfer they must be replaced, because gloo may still write into them.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor | None] = [None, None]

    def take(
        self, index: int, num_elements: int, dtype: torch.dtype, device: torch.device, pinned: bool
    ) -> torch.Tensor:
        """Returns a buffer of at least `num_elements`: buffer `index` mod 2, replaced if it is too small.

        A device without an index means the current device.
        """
        buffer = self._buffers[index % 2]
        fits = buffer is not None and buffer.numel() >= num_elements
        if buffer is None or not fits or buffer.dtype != dtype or buffer.device.type != device.type:
            self._buffers[index % 2] = None  # frees the old buffer before the new one is allocated
            buffer = torch.empty(num_elements, dtype=dtype, device=device, pin_memory=pinned)
            self._buffers[index % 2] = buffer
        return buffer[:num_elements]


def receive(
    communicator: Communicator,
    update: UpdateInfo,
    load: Callable[[NamedTensors], object],
    *,
    device: torch.device,
    pin_memory: bool = True,
    buffers: ReceiveBuffers | None = None,
) -> ReceiveReport:
    """Receives every bucket of `update` and passes its tensors, on `device`, to `load`.

    `buffers` are reused; without them every bucket has a new buffer. Raises `TransferError` or `DeadlineExceeded` after
    aborting the communicator. An exception of `load` aborts it too, so that the sender is notified at once.
    """
    start = time.monotonic()
    deadline = start + update.timeout_seconds
    wait_seconds = load_seconds = 0.0
    communicator.agree(update.digest, deadline)
    staged = communicator.backend == "gloo"
    pinned = staged and pin_memory and device.type == "cuda"

    where = torch.device("cpu") if staged else device
    dtype: torch.dtype = getattr(torch, update.dtype)
    buckets = plan_buckets(update)

    def begin(index: int) -> Broadcast:
        size = buckets[index].num_elements
        if buffers is not None:
            return communicator.broadcast(buffers.take(index, size, dtype, where, pinned))
        return communicator.broadcast(torch.empty(size, dtype=dtype, device=where, pin_memory=pinned))

    try:
        ahead = begin(0) if buckets else None
        for index, bucket in enumerate(buckets):
            assert ahead is not None
            current = ahead
            ahead = begin(index + 1) if index + 1 < len(buckets) else None
            waited = time.monotonic()
            current.wait(deadline)
            loading = time.monotonic()
            flat = current.tensor.to(device)
            load([(meta.name, tensor_in(flat, meta, at)) for meta, at in bucket.entries])
            wait_seconds += loading - waited
            load_seconds += time.monotonic() - loading
        settling = time.monotonic()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        load_seconds += time.monotonic() - settling
    except Exception as error:
        communicator.abort(f"rank {communicator.rank} failed while loading weights: {error}")
        raise
    report = ReceiveReport(time.monotonic() - start, wait_seconds, load_seconds)
    communicator.conclude(deadline)
    return report


_JOIN_SECONDS = 30.0
"""Time limit for an aborted thread to end. It usually takes milliseconds."""


@dataclass(eq=False)
class OverlappedReceive:
    """One sync that is received into staging buffers. The constructor starts it and returns at once."""

    communicator: Communicator
    update: UpdateInfo
    staging: StagingBuffers
    buffers: ReceiveBuffers
    device: torch.device
    skip: frozenset[str] = frozenset()
    pin_memory: bool = True

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.update.timeout_seconds
        self._outcome = start_daemon_thread(self._run, "telescope-receive")

    def finish(self) -> ReceiveReport:
        """Waits for the complete sync. Raises the thread's error, or `DeadlineExceeded`."""
        if not wait([self._outcome], max(0.0, self._deadline - time.monotonic()) + 1.0).done:
            raise DeadlineExceeded(
                f"weight transfer: version {self.update.version} was not received within "
                f"{self.update.timeout_seconds:g} s"
            )
        return self._outcome.result()

    def abandon(self, reason: str) -> None:
        """Aborts the transfer and waits until the thread has ended."""
        if not self._outcome.done():
            self.communicator.abort(reason)
            assert wait([self._outcome], _JOIN_SECONDS).done, "the thread of an aborted transfer is still running"

    def _run(self) -> ReceiveReport:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the device of this thread
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        with torch.no_grad(), torch.cuda.stream(stream) if stream else nullcontext():
            return receive(
                self.communicator,
                self.update,
                lambda tensors: self.staging.load((n, t) for n, t in tensors if n not in self.skip),
                device=self.device,
                pin_memory=self.pin_memory,
                buffers=self.buffers,
            )


PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""Classes of `quant_method` that compute with the parameter as it was loaded (on a GPU)."""

MAX_REASONS = 3


def why_in_place(model: nn.Module) -> str | None:
    """Returns why this model cannot have staging buffers. None if it can."""
    return listed(_reasons(model), MAX_REASONS, "; ") or None


def _reasons(model: nn.Module) -> Iterator[str]:
    for place, module in model.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        if any("MoE" in kind for kind in kinds):
            yield f"{place} has experts"
            continue
        if any("MLA" in kind for kind in kinds):
            yield f"{place} is latent attention, which keeps products of its weights"
            continue
        parameters = list(module.parameters(recurse=False))
        method = getattr(module, "quant_method", None)
        if not parameters:
            continue
        if method is not None and type(method).__name__ not in PLAIN_METHODS:
            yield f"{place} is quantized ({type(method).__name__})"
        captured = getattr(getattr(module, "cpu_linear", None), "__closure__", None)  # on a CPU with oneDNN
        if captured or any(p.numel() == 0 for p in parameters):
            yield f"{place} computes with a packed copy of its weight"


class StagingBuffers:
    """The staging buffers of one model. They take as much memory as its parameters."""

    def __init__(self, model: nn.Module) -> None:
        assert (reason := why_in_place(model)) is None, reason
        self._staging: dict[int, nn.Parameter] = {}
        self._parameters: list[nn.Parameter] = []
        self._tree: Any = self._twin(model, {})

    @property
    def num_bytes(self) -> int:
        return sum(staged.numel() * staged.element_size() for staged in self._staging.values())

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads tensors into the buffers with the model's own loader."""
        self._tree.load_weights(tensors)

    @torch.no_grad()
    def swap(self) -> None:
        """Copies every buffer into its parameter. The model must not be computing."""
        staging = [self._staging[id(parameter)].data for parameter in self._parameters]
        torch._foreach_copy_([parameter.data for parameter in self._parameters], staging)

    def _twin(self, module: nn.Module, twins: dict[int, nn.Module]) -> nn.Module:
        """Returns a copy of the module with buffers as parameters. Shared modules and parameters stay shared."""
        if (known := twins.get(id(module))) is not None:
            return known
        twin = object.__new__(type(module))
        twins[id(module)] = twin
        own = dict(module.__dict__)
        own["_parameters"] = {
            name: None if parameter is None else self._stage(parameter)
            for name, parameter in module._parameters.items()
        }
        own["_buffers"] = dict(module._buffers)
        own["_modules"] = {
            name: None if child is None else self._twin(child, twins) for name, child in module._modules.items()
        }
        twin.__dict__.update(own)
        return twin

    def _stage(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns a buffer with the parameter's class and attributes, because loaders read both."""
        if (known := self._staging.get(id(parameter))) is not None:
            return known
        staged: Any = nn.Parameter(parameter.data.clone(), requires_grad=False)
        staged.__class__ = type(parameter)
        staged.__dict__ = dict(parameter.__dict__)
        self._staging[id(parameter)] = staged
        self._parameters.append(parameter)
        return staged
