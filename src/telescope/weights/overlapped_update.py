"""Receives a sync into staging buffers while the engine samples.

`StagingBuffers` is a second set of a model's parameters. It owns those tensors, the module tree that passes them to the
model's own weight loader, and the swap. `OverlappedReceive` is one sync in progress: a thread with its own CUDA stream.
The transfer itself is `receiver`. The caller pauses the engine and swaps after `finish`. vLLM's layers are known by
class name and attributes only; vLLM is not imported, so that tests can use stand-ins.

Invariants:
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

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from telescope.errors import DeadlineExceeded
from telescope.weights.communicator import Communicator
from telescope.weights.plan import UpdateInfo
from telescope.weights.receiver import ReceiveBuffers, ReceiveReport, receive

_JOIN_SECONDS = 30.0
"""Limit for the end of an aborted thread, which takes milliseconds."""


class OverlappedReceive:
    """One sync that is received into staging buffers. The constructor starts it and returns at once."""

    def __init__(
        self,
        communicator: Communicator,
        update: UpdateInfo,
        staging: StagingBuffers,
        buffers: ReceiveBuffers,
        *,
        device: torch.device,
        skip: frozenset[str] = frozenset(),
        pin_memory: bool = True,
    ) -> None:
        self.update = update
        self._communicator = communicator
        self._staging = staging
        self._buffers = buffers
        self._device = device
        self._skip = skip
        self._pin_memory = pin_memory
        self._deadline = time.monotonic() + update.timeout_seconds
        self._report: ReceiveReport | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="telescope-receive", daemon=True)
        self._thread.start()

    def finish(self) -> ReceiveReport:
        """Waits for the complete sync. Raises the error of the thread, or `DeadlineExceeded`."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()) + 1.0)
        if self._thread.is_alive():
            raise DeadlineExceeded(
                f"weight transfer: version {self.update.version} was not received within "
                f"{self.update.timeout_seconds:g} s"
            )
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def abandon(self, reason: str) -> None:
        """Aborts the transfer and waits until the thread has ended."""
        if self._thread.is_alive():
            self._communicator.abort(reason)
            self._thread.join(_JOIN_SECONDS)
            assert not self._thread.is_alive(), "the thread of an aborted transfer is still running"

    def _run(self) -> None:
        try:
            with torch.no_grad():
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # of this thread
                    with torch.cuda.stream(torch.cuda.Stream(self._device)):
                        self._report = self._receive()
                else:
                    self._report = self._receive()
        except Exception as error:  # raised by `finish`
            self._error = error

    def _receive(self) -> ReceiveReport:
        return receive(
            self._communicator,
            self.update,
            lambda tensors: self._staging.load((n, t) for n, t in tensors if n not in self._skip),
            device=self._device,
            pin_memory=self._pin_memory,
            buffers=self._buffers,
        )


PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""Classes of `quant_method` that compute with the parameter as it was loaded (on a GPU)."""

MAX_REASONS = 3


def why_in_place(model: nn.Module) -> str | None:
    """Returns why this model cannot have staging buffers, or None if it can."""
    reasons = list(_reasons(model))
    if not reasons:
        return None
    more = f" and {len(reasons) - MAX_REASONS} more" if len(reasons) > MAX_REASONS else ""
    return "; ".join(reasons[:MAX_REASONS]) + more


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
        elif any(p.numel() == 0 for p in parameters) or _is_packed(module):
            yield f"{place} computes with a packed copy of its weight"


def _is_packed(module: nn.Module) -> bool:
    """Returns whether a CPU layer has a packed weight, which `cpu_linear` captures (not without oneDNN)."""
    return bool(getattr(getattr(module, "cpu_linear", None), "__closure__", None))


class StagingBuffers:
    """Staging buffers of one model. They allocate as much memory as its parameters."""

    def __init__(self, model: nn.Module) -> None:
        reason = why_in_place(model)
        if reason is not None:
            raise ValueError(f"the model cannot have staging buffers: {reason}")
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
        known = twins.get(id(module))
        if known is not None:
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
        """Returns a buffer of the parameter's class with its attributes: loaders read both."""
        known = self._staging.get(id(parameter))
        if known is not None:
            return known
        staged: Any = nn.Parameter(parameter.data.clone(), requires_grad=False)
        staged.__class__ = type(parameter)
        staged.__dict__ = dict(parameter.__dict__)
        self._staging[id(parameter)] = staged
        self._parameters.append(parameter)
        return staged
