"""The trainer's end of weight transfers: one `WeightSender` per trainer rank.

Owns the communicators of the engines that this rank sends to, the send buffers, and the cast to the engine's dtype.
Does not gather (the trainer's iterator does, collectively on all ranks) and does not use HTTP (the driver starts and
finishes the update on each engine: `orchestrator.weight_sync`).

Invariants: every rank drains the iterator even if engines fail, so that the trainer's collectives match. An engine that
exits or misses the deadline fails its own communicator and is listed in the report, early enough for the others to get
all buckets. Bucket i + 1 is gathered while bucket i is sent. A buffer is written again only after all its broadcasts
have ended.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

import torch

from telescope.errors import DeadlineExceeded
from telescope.utils.timeline import Timeline
from telescope.weights.communicator import Backend, Broadcast, Communicator
from telescope.weights.control_channel import Rendezvous, TransferError
from telescope.weights.fingerprint import fingerprint
from telescope.weights.plan import Bucket, InitInfo, SendReport, UpdateInfo, plan_buckets, tensor_in, to_hex

_NUM_BUFFERS = 2
"""One is sent while the other is filled."""
_PATIENCE = 0.5
"""Share of the timeout after which an engine that does not respond is given up, since all other engines wait for it."""


@dataclass(kw_only=True, eq=False)
class WeightSender:
    """Sends from one trainer rank to its engines. One thread calls the methods; any thread may `abort`."""

    device: torch.device | str = "cpu"
    cpu_staging: bool = False
    pin_memory: bool = True
    rank: int = 0
    track_spans: bool = True

    def __post_init__(self) -> None:
        self._rendezvous: dict[int, tuple[Rendezvous, InitInfo]] = {}
        self._communicators: dict[int, Communicator] = {}

    def listen(self, engine: int, *, num_workers: int, host: str, backend: Backend, timeout_seconds: float) -> InitInfo:
        """Opens a listener for an engine of `num_workers` workers. Returns the connection data for its workers.

        Does not wait. The driver posts the result to the engine while this rank runs `connect`. An earlier connection
        of the same engine is closed.
        """
        self.disconnect(engine, "the engine is reconnected")
        rendezvous = Rendezvous(host)
        info = InitInfo(
            host=host,
            port=rendezvous.port,
            token=rendezvous.token,
            world_size=num_workers + 1,
            backend=backend,
            timeout_seconds=timeout_seconds,
            pin_memory=self.pin_memory,
        )
        self._rendezvous[engine] = rendezvous, info
        return info

    def connect(self, engine: int) -> None:
        """Waits until the engine of `listen` has connected.

        Raises `DeadlineExceeded` after `timeout_seconds` of `listen`, `TransferError` on a failure or an `abort`.
        """
        announced = rendezvous, info = self._rendezvous[engine]
        try:
            device = torch.device(self.device)
            communicator = self._communicators[engine] = Communicator.connect(info, 0, device, rendezvous)
        finally:
            if self._rendezvous.get(engine) is announced:
                del self._rendezvous[engine]
        if rendezvous.aborted is not None:  # between the success and its registration above
            communicator.abort(rendezvous.aborted)
            raise TransferError(f"weight transfer: {rendezvous.aborted}")

    def abort(self, engine: int, reason: str) -> None:
        """Aborts the transfer or connection to one engine; others continue. Any thread may call it."""
        if waiting := self._rendezvous.get(engine):
            waiting[0].abort(reason)
        if communicator := self._communicators.get(engine):
            communicator.abort(reason)

    def disconnect(self, engine: int, reason: str = "disconnected") -> None:
        """Removes an engine. Its workers see the end of the control channel."""
        if waiting := self._rendezvous.pop(engine, None):
            waiting[0].abort(reason)
            waiting[0].close()
        if communicator := self._communicators.pop(engine, None):
            communicator.abort(reason)

    def close(self) -> None:
        """Closes all communicators."""
        for engine in list(self._rendezvous):
            self.disconnect(engine)
        for communicator in self._communicators.values():
            communicator.close()
        self._communicators.clear()

    def send(
        self,
        named_weights: Iterator[tuple[str, torch.Tensor]],
        update: UpdateInfo,
        engines: list[int],
        *,
        fingerprints: bool = False,
        corrupt: str | None = None,
    ) -> SendReport:
        """Sends one sync to this rank's engines among `engines`. Collective over all trainer ranks.

        `named_weights` yields (name, full tensor) in the order of `update.names`. Engine failures are in the report;
        exceptions of the iterator are raised, after the engines were notified. `corrupt` names a tensor of which one
        bit is changed after its fingerprint was computed, to imitate a transport fault that a probe must detect.
        """
        transfer = _Send(self, named_weights, update, engines, fingerprints, corrupt)
        try:
            return transfer.run()
        except Exception as error:
            for communicator in transfer.live.values():
                communicator.abort(f"the trainer failed: {error}")
            raise


@dataclass(eq=False)
class _Send:
    """One sync in progress on one rank."""

    sender: InitVar[WeightSender]
    named_weights: Iterator[tuple[str, torch.Tensor]]
    update: UpdateInfo
    engines: InitVar[list[int]]
    fingerprints: InitVar[bool]
    corrupt: str | None

    def __post_init__(self, sender: WeightSender, engines: list[int], fingerprints: bool) -> None:
        # Without engines the tensors are only fingerprinted, on the first rank.
        self.want_fingerprints = fingerprints and (bool(engines) or sender.rank == 0)
        self.only_fingerprints = self.want_fingerprints and not engines
        self.live = {e: c for e, c in sender._communicators.items() if e in engines}
        self.start = time.monotonic()
        self.deadline = self.start + self.update.timeout_seconds
        self.patience = self.update.timeout_seconds * (_PATIENCE if len(engines) > 1 else 1.0)
        self.report = SendReport()
        self.weights_device = torch.device(sender.device)
        self.device = torch.device("cpu") if sender.cpu_staging else self.weights_device
        self.staged_from_gpu = sender.cpu_staging and self.weights_device.type == "cuda"
        self.pinned = self.staged_from_gpu and sender.pin_memory
        self.buffers: list[torch.Tensor] = []
        self.in_flight: list[dict[int, Broadcast]] = [{} for _ in range(_NUM_BUFFERS)]
        self.timeline = Timeline(self.weights_device, sender.rank, enabled=sender.track_spans)

    def run(self) -> SendReport:
        buckets = plan_buckets(self.update)
        with self.timeline.span("weight_broadcast_agree"):
            limit = self._limit()
            for communicator in self.live.values():
                communicator.announce(self.update.digest)
            self._on_each(lambda engine, communicator: communicator.agree(self.update.digest, limit))
        for index, bucket in enumerate(buckets):
            slot = index % _NUM_BUFFERS
            with self.timeline.span("weight_broadcast_wait"):
                self._wait(slot)
            with self.timeline.span("weight_broadcast_gather"):
                filled = self._fill(bucket, slot, buckets)
            if filled is not None:
                self._on_each(partial(self._broadcast, slot, filled))
        for name, _ in self.named_weights:
            raise ValueError(f"the trainer yielded {name}, which is not in the plan of the sync")
        with self.timeline.span("weight_broadcast_wait"):
            for slot in range(_NUM_BUFFERS):
                self._wait(slot)
        with self.timeline.span("weight_broadcast_conclude"):
            self._on_each(self._conclude)
        self.report.spans = self.timeline.finish()
        return self.report

    def _limit(self) -> float:
        """Returns when a wait for engines that begins now ends. Those that have responded by then go on."""
        return min(self.deadline, time.monotonic() + self.patience)

    def _on_each(self, wait_for: Callable[[int, Communicator], Any]) -> None:
        """Calls `wait_for` for every engine that has not failed."""
        for engine, communicator in list(self.live.items()):
            try:
                wait_for(engine, communicator)
            except (TransferError, DeadlineExceeded) as error:
                self._lose(engine, error)

    def _fill(self, bucket: Bucket, slot: int, buckets: list[Bucket]) -> torch.Tensor | None:
        """Gathers the bucket's tensors. A sending rank casts them into its buffer."""
        dtype: torch.dtype = getattr(torch, self.update.dtype)
        flat: torch.Tensor | None = None
        if self.live:
            while len(self.buffers) <= slot:
                size = max(bucket.num_elements for bucket in buckets)
                self.buffers.append(torch.zeros(size, dtype=dtype, device=self.device, pin_memory=self.pinned))
            flat = self.buffers[slot][: bucket.num_elements]
        for meta, offset in bucket.entries:
            try:
                name, tensor = next(self.named_weights)
            except StopIteration:
                raise ValueError("the trainer yielded fewer tensors than the plan of the sync has") from None
            if name != meta.name or tuple(tensor.shape) != meta.shape:
                raise ValueError(
                    f"the trainer yielded {name} {tuple(tensor.shape)} instead of {meta.name} {meta.shape}"
                )
            if flat is None and not self.only_fingerprints:
                continue
            cast = tensor.detach().to(getattr(torch, meta.dtype))
            if self.want_fingerprints:
                self.report.fingerprints[name] = to_hex(fingerprint(cast))
            if flat is None:
                continue
            if name == self.corrupt:
                cast = flip_one_bit(cast)
            tensor_in(flat, meta, offset).copy_(cast, non_blocking=self.pinned)
        if flat is not None and self.staged_from_gpu:
            torch.cuda.current_stream(self.weights_device).synchronize()  # may differ from the current device
        return flat

    def _broadcast(self, slot: int, filled: torch.Tensor, engine: int, communicator: Communicator) -> None:
        self.in_flight[slot][engine] = communicator.broadcast(filled)

    def _wait(self, slot: int) -> None:
        if not (sent := self.in_flight[slot]):
            return
        limit, num_live = self._limit(), len(self.live)
        self._on_each(lambda engine, _: sent[engine].wait(limit))
        if len(self.live) < num_live:
            # A broken communicator may still read its buffer: replace the buffer.
            self.buffers[slot] = torch.zeros_like(self.buffers[slot], pin_memory=self.pinned)
        self.in_flight[slot] = {}

    def _conclude(self, engine: int, communicator: Communicator) -> None:
        communicator.conclude(self.deadline)
        self.report.engine_seconds[engine] = time.monotonic() - self.start

    def _lose(self, engine: int, error: Exception) -> None:
        communicator = self.live.pop(engine)
        reason = str(error)
        if isinstance(error, DeadlineExceeded):
            reason += f" (weight_sync_timeout_seconds is {self.update.timeout_seconds:g})"
        communicator.abort(reason)
        self.report.errors[engine] = reason


def flip_one_bit(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the smallest possible fault: the last bit of its largest element is flipped."""
    corrupted = tensor.clone()
    bits = corrupted.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]).view(-1)
    bits[int(tensor.abs().argmax())] ^= 1
    return corrupted
