"""Receiving a sync beside the engine's work: a thread with a CUDA stream of its own fills shadow tensors.

Owns the thread and what becomes of it. Does not own the shadows (`shadow`), the transfer (`receiver`) or the pause in
which the shadows become the model's weights: that is the caller's, once `finish` has returned.

Invariants: starting returns at once; the thread ends by itself at the transfer's deadline, when the sender is gone, or
when the communicator is aborted; what it raised is raised by `finish`, in the thread that asks.
"""

from __future__ import annotations

import threading
import time

import torch

from telescope.errors import DeadlineExceeded
from telescope.weights.communicator import Communicator
from telescope.weights.plan import UpdateInfo
from telescope.weights.receiver import ReceiveBuffers, ReceiveReport, receive
from telescope.weights.shadow import ShadowWeights

_JOIN_SECONDS = 30.0
"""How long an abandoned thread may take to notice; its communicator is aborted, so it takes milliseconds."""


class BackgroundReceive:
    """One sync on its way into the shadows. Started by its constructor."""

    def __init__(
        self,
        communicator: Communicator,
        update: UpdateInfo,
        shadows: ShadowWeights,
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
