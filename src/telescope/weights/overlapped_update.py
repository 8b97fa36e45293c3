"""Receiving a sync beside the engine's work: a thread with a CUDA stream of its own fills shadow tensors.

Owns the thread and what becomes of it. Does not own the shadows (`shadow`), the transfer (`receiver`) or the pause in
which the shadows become the model's weights: that is the caller's, once `finish` has returned.

Invariants: starting returns at once; the thread ends by itself at the transfer's deadline, when the sender is gone, or
when the communicator is aborted; what it raised is raised by `finish`, in the thread that asks.

A second set of a model's parameters, which a sync fills while the model goes on computing with the first.

Owns the shadow tensors, the module tree that hands them to the model's own weight loader, the rule which models can
have them, and the swap. Knows vLLM's layers by class name and attributes only and imports nothing of vLLM, so it is
tested with stand-ins. Bytes come through `receiver`.

Invariants:
- Filling touches no tensor and no module of the model itself: the tree is made of new module objects that share
  everything with the model's but their parameters. So a thread may fill while another computes.
- A swap copies into the storage that the parameters have (captured CUDA graphs hold addresses).
- A shadow begins as a copy of its parameter, so that what no tensor is sent for keeps its value.
- Shadows have the layout in which the layers compute. A model with a layer that computes with anything derived from its
  parameters (packed for the CPU, quantized, experts, latent attention) has none, and is updated in place.
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
"""How long an abandoned thread may take to notice; its communicator is aborted, so it takes milliseconds."""


class OverlappedReceive:
    """One sync on its way into the shadows. Started by its constructor."""

    def __init__(
        self,
        communicator: Communicator,
        update: UpdateInfo,
        shadows: StagingBuffers,
        buffers: ReceiveBuffers,
        *,
        device: torch.device,
        skip: frozenset[str] = frozenset(),
        pin_memory: bool = True,
    ) -> None:
        self.update = update
        self._communicator = communicator
        self._shadows = shadows
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
        """Wait until the shadows hold the whole sync. Raises what went wrong, or `DeadlineExceeded`."""
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
        """Break the transfer off and wait for the thread's end, so that nobody writes into the shadows any more."""
        if self._thread.is_alive():
            self._communicator.abort(reason)
            self._thread.join(_JOIN_SECONDS)
            assert not self._thread.is_alive(), "an aborted transfer goes on"

    def _run(self) -> None:
        try:
            with torch.no_grad():
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # of this thread
                    with torch.cuda.stream(torch.cuda.Stream(self._device)):
                        self._report = self._receive()
                else:
                    self._report = self._receive()
        except Exception as error:  # raised in the thread that finishes
            self._error = error

    def _receive(self) -> ReceiveReport:
        return receive(
            self._communicator,
            self.update,
            lambda tensors: self._shadows.load((n, t) for n, t in tensors if n not in self._skip),
            device=self._device,
            pin_memory=self._pin_memory,
            buffers=self._buffers,
        )


PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""Classes of `quant_method` that compute with the parameter as it was loaded (on a GPU)."""

MAX_REASONS = 3


def why_in_place(model: nn.Module) -> str | None:
    """Why this model cannot be given its weights in the background, or None when it can."""
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
    """On the CPU, `cpu_linear` has captured the packed weight, where there is one (oneDNN may be missing)."""
    return bool(getattr(getattr(module, "cpu_linear", None), "__closure__", None))


class StagingBuffers:
    """The shadows of one model. Allocates as much memory as the model's parameters take."""

    def __init__(self, model: nn.Module) -> None:
        reason = why_in_place(model)
        if reason is not None:
            raise ValueError(f"the model cannot have shadow weights: {reason}")
        self._shadows: dict[int, nn.Parameter] = {}
        self._parameters: list[nn.Parameter] = []
        self._tree: Any = self._twin(model, {})

    @property
    def num_bytes(self) -> int:
        return sum(shadow.numel() * shadow.element_size() for shadow in self._shadows.values())

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give tensors (the trainer's names and shapes) to the model's own loader, which writes them into shadows."""
        self._tree.load_weights(tensors)

    @torch.no_grad()
    def swap(self) -> None:
        """Copy every shadow into its parameter. The model must not be computing."""
        shadows = [self._shadows[id(parameter)].data for parameter in self._parameters]
        torch._foreach_copy_([parameter.data for parameter in self._parameters], shadows)

    def _twin(self, module: nn.Module, twins: dict[int, nn.Module]) -> nn.Module:
        """The module with shadows for parameters; modules and parameters that are shared stay shared."""
        known = twins.get(id(module))
        if known is not None:
            return known
        twin = object.__new__(type(module))
        twins[id(module)] = twin
        own = dict(module.__dict__)
        own["_parameters"] = {
            name: None if parameter is None else self._shadow(parameter)
            for name, parameter in module._parameters.items()
        }
        own["_buffers"] = dict(module._buffers)
        own["_modules"] = {
            name: None if child is None else self._twin(child, twins) for name, child in module._modules.items()
        }
        twin.__dict__.update(own)
        return twin

    def _shadow(self, parameter: nn.Parameter) -> nn.Parameter:
        """A tensor of the same class with the same attributes: loaders read both."""
        known = self._shadows.get(id(parameter))
        if known is not None:
            return known
        shadow: Any = nn.Parameter(parameter.data.clone(), requires_grad=False)
        shadow.__class__ = type(parameter)
        shadow.__dict__ = dict(parameter.__dict__)
        self._shadows[id(parameter)] = shadow
        self._parameters.append(parameter)
        return shadow
