"""One communicator per engine: rank 0 is the sender, the other ranks are the engine's workers.

Owns a torch process group (gloo or NCCL, built over its own TCPStore, independent of the default process group) and the
control channel. Does not know buckets, models or vLLM.

Invariants: every wait has a deadline. When it passes, when a peer exits, or when `abort` is called from any thread, the
blocked caller gets an error within milliseconds, and this communicator cannot be used again. Other communicators of the
process continue. A broken communicator is replaced, never repaired: gloo ends the process when a message of an old
transfer meets a buffer of a new one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from telescope.errors import DeadlineExceeded
from telescope.utils.process import start_daemon_thread
from telescope.weights.control_channel import ControlChannel, Rendezvous, TransferError, join, listen
from telescope.weights.plan import InitInfo

Backend = Literal["gloo", "nccl"]

_POLL_FIRST_SECONDS = 1e-4
_POLL_LAST_SECONDS = 5e-4
_NCCL_WATCHDOG = timedelta(days=1)
"""NCCL's own time limit ends the whole process, so it must never be reached."""
_ENVIRONMENT = threading.Lock()
"""Held while the environment is changed for a new group, since several threads connect engines."""
_EXPLANATION_SECONDS = 0.5
"""Time for the control channel to report the reason of a transport error."""
_NCCL_ABORT_SECONDS = 20.0
"""Limit for the end of NCCL's abort on close; it takes a fraction of a second."""
_GLOO_LIMIT = timedelta(hours=1)
"""Gloo's own time limit, longer than any deadline. It bounds how long an aborted operation keeps its buffer."""


def backend_for(device: torch.device, *, cpu_staging: bool) -> Backend:
    """Returns NCCL between GPUs, gloo elsewhere and with staging in host memory."""
    return "nccl" if device.type == "cuda" and not cpu_staging else "gloo"


@dataclass(eq=False, slots=True)
class Broadcast:
    """A broadcast in flight. The sender must not write its tensor until `wait` returns."""

    communicator: Communicator
    tensor: torch.Tensor
    work: Any

    def wait(self, deadline: float) -> None:
        """Waits until the tensor is sent (sender) or complete (receiver).

        Raises `TransferError` or `DeadlineExceeded` after aborting the communicator.
        """
        poll, communicator = _POLL_FIRST_SECONDS, self.communicator
        while not self.work.is_completed():
            communicator._check()
            if time.monotonic() >= deadline:
                communicator.abort("the transfer's deadline passed")
                raise DeadlineExceeded("weight transfer: a broadcast did not end before the deadline")
            time.sleep(poll)
            poll = min(poll * 1.5, _POLL_LAST_SECONDS)
        try:
            self.work.wait()
        except RuntimeError as error:
            raise communicator._failed(communicator._explain(error)) from error
        with communicator._lock:
            if self in communicator._in_flight:
                communicator._in_flight.remove(self)


@dataclass(eq=False)
class Communicator:
    """A connection made by `connect`. One thread issues broadcasts, in the same order on all ranks.

    Any thread may `abort`.
    """

    _: KW_ONLY
    rank: int
    world_size: int
    backend: Backend
    channel: ControlChannel
    group: Any
    store: Any
    failure: str | None = None
    """Why this communicator cannot be used any more; None while it can."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight: list[Broadcast] = []
        self._cleanup: threading.Thread | None = None
        self.channel.on_loss(self.abort)

    @classmethod
    def connect(
        cls, info: InitInfo, rank: int, device: torch.device, rendezvous: Rendezvous | None = None
    ) -> Communicator:
        """Connects to the other ranks and builds the group. All ranks call it within `info.timeout_seconds`.

        Rank 0 passes the `Rendezvous` that listens there. `device` is for NCCL. A first broadcast tests the connection.
        Raises `DeadlineExceeded` or `TransferError`.
        """
        host, world_size, backend, timeout = info.host, info.world_size, info.backend, info.timeout_seconds
        deadline = time.monotonic() + timeout
        if rank == 0:
            assert rendezvous is not None, "rank 0 connects through its own rendezvous"
            listener = listen(host)
            store_port = listener.getsockname()[1]
            # The store takes over the socket, so that it listens on this address only, not on every interface.
            store = dist.TCPStore(
                host, store_port, world_size, True, timedelta(seconds=timeout), False, False, listener.detach()
            )
            channel = rendezvous.accept(world_size, {"kind": "welcome", "store_port": store_port}, timeout)
        else:
            channel, greeting = join(host, info.port, rank, info.token, timeout)
            store = dist.TCPStore(
                host, int(greeting["store_port"]), world_size, False, timedelta(seconds=timeout), False
            )
        local = host if rank == 0 else channel.local_address
        try:
            group = _within(
                lambda: _build_group(backend, store, rank, world_size, local, device),
                deadline,
                channel,
                f"connecting the {backend} group of {world_size} ranks",
                rendezvous,
            )
        except BaseException as error:
            channel.close(f"rank {rank} could not connect: {error}")
            raise
        return cls(rank=rank, world_size=world_size, backend=backend, channel=channel, group=group, store=store)

    def broadcast(self, tensor: torch.Tensor) -> Broadcast:
        """Starts sending `tensor` from rank 0 to all ranks. Returns at once; the tensor is contiguous."""
        with self._lock:
            self._check()
            broadcast = Broadcast(self, tensor, self.group.broadcast([tensor], dist.BroadcastOptions()))
            self._in_flight.append(broadcast)
        return broadcast

    def announce(self, digest: str) -> None:
        """Announces a transfer to the other ranks. Returns at once; `agree` must follow."""
        self.channel.send({"kind": "begin", "digest": digest})

    def agree(self, digest: str, deadline: float) -> None:
        """Waits until a transfer is announced and all ranks agree on it. Rank 0 has called `announce`.

        Raises `TransferError` on every rank if one disagrees.
        """
        if self.rank == 0:
            self._collect("ready", deadline, "engine ranks to be ready to receive")
            return
        _, message = self._receive(deadline, "the sender to begin")
        if message.get("kind") != "begin" or message.get("digest") != digest:
            announced = message.get("digest")
            raise self._failed(f"rank {self.rank} expects transfer {digest}, the sender announced {announced}")
        self.channel.send({"kind": "ready"})

    def conclude(self, deadline: float) -> None:
        """Ends a transfer: receivers confirm it, and rank 0 waits for all of them."""
        if self.rank == 0:
            self._collect("done", deadline, "engine ranks to load the weights")
        else:
            self.channel.send({"kind": "done"})

    def abort(self, reason: str) -> None:
        """Aborts everything in flight and ends this communicator. Thread-safe, idempotent, returns at once."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = reason
            group, in_flight = self.group, self._in_flight
            self.group, self._in_flight = None, []
        self.channel.close(reason)
        # The group's abort ends NCCL kernels. Gloo cannot abort a blocked operation: its callers return by polling, and
        # the group is kept until the time limit of the operation, since its destructor would wait.
        self._cleanup = threading.Thread(
            target=_release, args=(group, in_flight, self.backend), name="telescope-abort", daemon=True
        )
        self._cleanup.start()

    def close(self) -> None:
        """Closes the connection; nothing may be in flight. Idempotent. After an abort, waits for NCCL's abort."""
        if self._cleanup is not None and self.backend == "nccl":
            # A process that exits during NCCL's abort is killed by a signal.
            self._cleanup.join(_NCCL_ABORT_SECONDS)
        with self._lock:
            if self.failure is not None:
                return
            assert not self._in_flight, "closing a communicator with a broadcast in flight"
            self.failure = "closed"
            group, self.group = self.group, None
        self.channel.close()
        if self.backend == "nccl":
            group.abort()

    def _failed(self, reason: str) -> TransferError:
        """Aborts, and returns the error to raise."""
        self.abort(reason)
        return TransferError(f"weight transfer: {reason}")

    def _explain(self, error: RuntimeError) -> str:
        """Returns why the transport failed, as the control channel reports it if it knows."""
        patience = time.monotonic() + _EXPLANATION_SECONDS
        while (reason := self.failure or self.channel.loss) is None and time.monotonic() < patience:
            time.sleep(_POLL_LAST_SECONDS)
        return reason or f"the {self.backend} connection broke: {error}"

    def _collect(self, kind: str, deadline: float, what: str) -> None:
        ranks: set[int] = set()
        while len(ranks) < self.world_size - 1:
            rank, message = self._receive(deadline, f"waiting for {what}")
            if message.get("kind") != kind:
                raise self._failed(f"rank {rank} sent {message.get('kind')!r} instead of {kind!r}")
            ranks.add(rank)

    def _receive(self, deadline: float, what: str) -> tuple[int, dict[str, Any]]:
        try:
            return self.channel.receive(deadline, what)
        except (DeadlineExceeded, TransferError) as error:
            self.abort(str(error))
            raise

    def _check(self) -> None:
        if self.failure is not None:
            raise TransferError(f"weight transfer: {self.failure}")


def _build_group(
    backend: Backend, store: Any, rank: int, world_size: int, local_address: str, device: torch.device
) -> Any:
    """Builds a separate process group and tests it with one broadcast. Blocks; the caller limits the time."""
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _GLOO_LIMIT
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_address)]
        options._threads = 2
        group: Any = dist.ProcessGroupGloo(store, rank, world_size, options)
        token = torch.full((1,), float(rank == 0))
    else:
        if device.type != "cuda":
            raise ValueError(f"the NCCL backend needs a CUDA device, got {device}")
        torch.cuda.set_device(device)
        group = _nccl_group(store, rank, world_size)
        token = torch.full((1,), float(rank == 0), device=device)
    group.broadcast([token], dist.BroadcastOptions()).wait()
    if token.item() != 1.0:
        raise TransferError(f"weight transfer: the first {backend} broadcast arrived wrong")
    return group


def _nccl_group(store: Any, rank: int, world_size: int) -> Any:
    """Returns an NCCL group that raises errors. By default an aborted collective ends the process."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NCCL_WATCHDOG
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    with _ENVIRONMENT:
        before = os.environ.get(name)
        os.environ[name] = "0"
        try:
            return dist.ProcessGroupNCCL(store, rank, world_size, options)
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def _within(
    build: Callable[[], Any], deadline: float, channel: ControlChannel, what: str, rendezvous: Rendezvous | None
) -> Any:
    """Runs a blocking call in a thread that can be abandoned. Raises `DeadlineExceeded` or `TransferError`."""
    outcome = start_daemon_thread(build, "telescope-connect")
    while not wait([outcome], 0.02).done:
        if channel.loss is not None and not wait([outcome], 0.5).done:
            raise TransferError(f"weight transfer: {what}: {channel.loss}")
        if rendezvous is not None and rendezvous.aborted is not None:
            raise TransferError(f"weight transfer: {what}: {rendezvous.aborted}")
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(f"weight transfer: {what} did not end before the deadline")
    try:
        return outcome.result()
    except Exception as error:
        raise TransferError(f"weight transfer: {what}: {error}") from error


def _release(group: Any, in_flight: list[Broadcast], backend: Backend) -> None:
    """Keeps an aborted group until its operations end, because its destructor blocks."""
    if group is None:
        return
    if backend == "nccl":
        group.abort()
    while not all(broadcast.work.is_completed() for broadcast in in_flight):
        time.sleep(0.1)
