"""The engine's end of a transfer: receives buckets and passes tensors on.

Owns the receive buffers. Does not know vLLM: `load` is the model's own weight loader. Every worker of an engine
receives everything and keeps its own shard.

Invariants: bucket i + 1 is in flight while bucket i is loaded. A buffer is not reused, because a loader may keep a view
of it until the rest of a fused layer arrives, unless the loader copies (`ReceiveBuffers`). The sender is notified that
a worker has everything only after the device has finished loading.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from telescope.weights.communicator import Broadcast, Communicator
from telescope.weights.plan import UpdateInfo, plan_buckets

NamedTensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class ReceiveReport:
    """Seconds of one sync on a worker: in total, waiting for bytes, loading them."""

    seconds: float
    wait_seconds: float
    load_seconds: float


class ReceiveBuffers:
    """Two buffers that all syncs reuse, for a loader that copies tensors at once.

    Reuse needs no waiting: on a GPU a broadcast into a buffer is queued behind the copies out of it. After an aborted
    transfer they must be replaced, because gloo may still write into them.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor | None] = [None, None]

    def take(
        self, index: int, num_elements: int, dtype: torch.dtype, device: torch.device, pinned: bool
    ) -> torch.Tensor:
        """Returns `num_elements` of buffer `index` mod 2, replaced if it does not fit.

        A device without an index is the current one.
        """
        buffer = self._buffers[index % 2]
        fits = buffer is not None and buffer.numel() >= num_elements
        if buffer is None or not fits or buffer.dtype != dtype or buffer.device.type != device.type:
            self._buffers[index % 2] = None  # freed before the new one is made
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
    """Receives every bucket of `update` and calls `load` with its tensors, on `device`.

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
            load([(e.name, flat[e.offset : e.offset + e.numel].view(e.shape)) for e in bucket.entries])
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
    communicator.conclude(deadline, {"wait_seconds": wait_seconds, "load_seconds": load_seconds})
    return report
