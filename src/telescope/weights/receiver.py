"""The engine's end of a transfer: receives the buckets of a sync and hands out the tensors.

Owns the receive buffers. Does not know vLLM: `load` is the model's own weight loader. Every worker of an engine
receives everything and keeps its own shard.

Invariants: bucket i + 1 is under way while bucket i is loaded; a buffer is never used twice, because a loader may
hold on to a view of it until the rest of a fused layer has come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from telescope.weights.communicator import Broadcast, Communicator
from telescope.weights.plan import Bucket, UpdateInfo, plan_buckets

NamedTensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class ReceiveReport:
    """Seconds that a worker spent on one sync: all, waiting for bytes, loading them."""

    seconds: float
    wait_seconds: float
    load_seconds: float


def receive(
    communicator: Communicator,
    update: UpdateInfo,
    load: Callable[[NamedTensors], object],
    *,
    device: torch.device,
    pin_memory: bool = True,
) -> ReceiveReport:
    """Receive every bucket of `update` and call `load` with the tensors of each, on `device`.

    Raises `TransferError` or `DeadlineExceeded`; the communicator is aborted then, and what `load` raises aborts it
    too, so that the sender learns of it at once.
    """
    start = time.monotonic()
    deadline = start + update.timeout_seconds
    wait_seconds = load_seconds = 0.0
    communicator.agree(update.digest, deadline)
    staged = communicator.backend == "gloo"
    pinned = staged and pin_memory and device.type == "cuda"

    def begin(bucket: Bucket) -> Broadcast:
        dtype: torch.dtype = getattr(torch, update.dtype)
        where = torch.device("cpu") if staged else device
        return communicator.broadcast(torch.empty(bucket.num_elements, dtype=dtype, device=where, pin_memory=pinned))

    buckets = plan_buckets(update)
    try:
        ahead = begin(buckets[0]) if buckets else None
        for index, bucket in enumerate(buckets):
            assert ahead is not None
            current = ahead
            ahead = begin(buckets[index + 1]) if index + 1 < len(buckets) else None
            waited = time.monotonic()
            current.wait(deadline)
            loading = time.monotonic()
            flat = current.tensor.to(device)
            load([(e.name, flat[e.offset : e.offset + e.numel].view(e.shape)) for e in bucket.entries])
            wait_seconds += loading - waited
            load_seconds += time.monotonic() - loading
    except Exception as error:
        communicator.abort(f"rank {communicator.rank} failed while loading weights: {error}")
        raise
    report = ReceiveReport(time.monotonic() - start, wait_seconds, load_seconds)
    communicator.conclude(deadline, {"wait_seconds": wait_seconds, "load_seconds": load_seconds})
    return report
