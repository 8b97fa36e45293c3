"""One communicator per engine: the sender is rank 0, the engine's workers are the other ranks.

Owns a torch process group (gloo or NCCL, built directly over its own TCPStore; the default process group is never
touched) and the lifeline beside it. Does not know buckets, models or vLLM.

Invariants: every wait has a deadline; when it passes, when a peer dies, or when `abort` is called from any thread,
the blocked caller gets an error within milliseconds, and this communicator is finished for good. Other communicators
of the process go on. A broken communicator is replaced by connecting anew, never mended: gloo ends the process when a
message of an old transfer meets a buffer of a new one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from telescope.errors import DeadlineExceeded
from telescope.weights.control_channel import ControlChannel, Rendezvous, TransferError, join, listen

Backend = Literal["gloo", "nccl"]

_POLL_FIRST_SECONDS = 1e-4
_POLL_LAST_SECONDS = 5e-4
_NCCL_WATCHDOG = timedelta(days=1)
"""NCCL's own time limit ends the whole process; it must never be the first to act."""
_LIFELINE_SECONDS = 0.5
"""How long a transport error waits for the lifeline's explanation of it."""
_NCCL_ABORT_SECONDS = 20.0
"""How long a process that leaves waits for NCCL's abort to end; it takes a fraction of a second."""
_GLOO_LIMIT = timedelta(hours=1)
"""Gloo's own time limit. Longer than any deadline of ours; it bounds how long an aborted operation keeps its buffer."""


def backend_for(device: torch.device, *, cpu_staging: bool) -> Backend:
    """NCCL between GPUs; gloo from host memory on CPU, with staging, and when sender and engine share one GPU."""
    return "nccl" if device.type == "cuda" and not cpu_staging else "gloo"


class Broadcast:
    """A broadcast in flight. Its tensor is kept alive, and must not be written on the sending side, until `wait`
    returns.
    """

    def __init__(self, communicator: Communicator, tensor: torch.Tensor, work: Any) -> None:
        self.communicator = communicator
        self.tensor = tensor
        self.work = work

    def wait(self, deadline: float) -> None:
        """Return when the tensor has left (sender) or is complete (receiver).

        Raises `TransferError` or `DeadlineExceeded`; the communicator is aborted then.
        """
        self.communicator._finish(self, deadline)


class Communicator:
    """Use `connect`. Broadcasts are issued in one order on all ranks by one thread; `abort` may come from any other."""

    def __init__(
        self, *, rank: int, world_size: int, backend: Backend, lifeline: ControlChannel, group: Any, store: Any
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self._lifeline = lifeline
        self._group = group
        self._store = store
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._in_flight: list[Broadcast] = []
        self._burial: threading.Thread | None = None
        lifeline.on_loss(self.abort)

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        *,
        backend: Backend,
        timeout: float,
        token: str,
        device: torch.device | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> Communicator:
        """Meet the other ranks at `host:port` and build the group; all ranks call this, within `timeout` seconds.

        Rank 0 passes the `Rendezvous` that listens there. `device` is the CUDA device for NCCL. A first broadcast
        proves the connection. Raises `DeadlineExceeded` or `TransferError`.
        """
        deadline = time.monotonic() + timeout
        if rank == 0:
            assert rendezvous is not None, "rank 0 connects through its own rendezvous"
            door = listen(host)
            store_port = door.getsockname()[1]
            # The store takes the socket over, so it listens on this address alone instead of on every interface.
            store = dist.TCPStore(
                host, store_port, world_size, True, timedelta(seconds=timeout), False, False, door.detach()
            )
            lifeline = rendezvous.accept(world_size, {"kind": "welcome", "store_port": store_port}, timeout)
        else:
            lifeline, greeting = join(host, port, rank, token, timeout)
            store = dist.TCPStore(
                host, int(greeting["store_port"]), world_size, False, timedelta(seconds=timeout), False
            )
        local = host if rank == 0 else lifeline.local_address
        try:
            group = _within(
                lambda: _build_group(backend, store, rank, world_size, local, device),
                deadline,
                lifeline,
                f"connecting the {backend} group of {world_size} ranks",
                rendezvous,
            )
        except BaseException as error:
            lifeline.close(f"rank {rank} could not connect: {error}")
            raise
        return cls(rank=rank, world_size=world_size, backend=backend, lifeline=lifeline, group=group, store=store)

    @property
    def failure(self) -> str | None:
        """Why this communicator is finished; None while it can be used."""
        return self._failure

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Broadcast:
        """Start sending `tensor` (contiguous) from rank `src` to all ranks, and return at once."""
        with self._lock:
            self._check()
            work = self._group.broadcast([tensor], _broadcast_options(src))
            broadcast = Broadcast(self, tensor, work)
            self._in_flight.append(broadcast)
        return broadcast

    def agree(self, digest: str, deadline: float) -> None:
        """Make sure that all ranks are about to run the same transfer: rank 0 announces it, the others compare.

        Raises `TransferError` on every rank when one disagrees, before any tensor moves.
        """
        if self.rank == 0:
            self._lifeline.send({"kind": "begin", "digest": digest})
            self._collect("ready", deadline, "engine ranks to be ready to receive")
            return
        _, message = self._receive(deadline, "the sender to begin")
        if message.get("kind") != "begin" or message.get("digest") != digest:
            reason = f"rank {self.rank} expects transfer {digest}, the sender announced {message.get('digest')}"
            self.abort(reason)
            raise TransferError(f"weight transfer: {reason}")
        self._lifeline.send({"kind": "ready"})

    def conclude(self, deadline: float, report: dict[str, Any] | None = None) -> dict[int, dict[str, Any]]:
        """End a transfer: receivers say that they hold everything (with a small report), rank 0 waits for all of
        them.
        """
        if self.rank == 0:
            return self._collect("done", deadline, "engine ranks to take the weights over")
        self._lifeline.send({"kind": "done", "report": report or {}})
        return {}

    def abort(self, reason: str) -> None:
        """Break off whatever is in flight and finish this communicator. Thread-safe, idempotent, returns at once."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = reason
            group, in_flight = self._group, self._in_flight
            self._group, self._in_flight = None, []
        self._lifeline.close(reason)
        # NCCL kernels are freed by the group's abort. Gloo has none that frees a blocked operation: its callers are
        # freed by their own polling, and the group is kept until the operation's time limit, since its destructor
        # would wait.
        self._burial = threading.Thread(
            target=_bury, args=(group, in_flight, self.backend), name="telescope-abort", daemon=True
        )
        self._burial.start()

    def close(self) -> None:
        """Leave in good order; nothing may be in flight. Idempotent. After an abort, lets NCCL's own abort end."""
        if self._burial is not None and self.backend == "nccl":
            # A process that exits in the middle of it dies of a signal.
            self._burial.join(_NCCL_ABORT_SECONDS)
        with self._lock:
            if self._failure is not None:
                return
            assert not self._in_flight, "closing a communicator with a broadcast in flight"
            self._failure = "closed"
            group, self._group = self._group, None
        self._lifeline.close()
        if self.backend == "nccl":
            group.abort()

    def _finish(self, broadcast: Broadcast, deadline: float) -> None:
        poll = _POLL_FIRST_SECONDS
        while not broadcast.work.is_completed():
            self._check()
            if time.monotonic() >= deadline:
                self.abort("the transfer's deadline passed")
                raise DeadlineExceeded("weight transfer: a broadcast did not end before the deadline")
            time.sleep(poll)
            poll = min(poll * 1.5, _POLL_LAST_SECONDS)
        try:
            broadcast.work.wait()
        except RuntimeError as error:
            reason = self._explain(error)
            self.abort(reason)
            raise TransferError(f"weight transfer: {reason}") from error
        with self._lock:
            if broadcast in self._in_flight:
                self._in_flight.remove(broadcast)

    def _explain(self, error: RuntimeError) -> str:
        """Why the transport failed. The lifeline says it better, and may be a moment behind."""
        patience = time.monotonic() + _LIFELINE_SECONDS
        while (reason := self._failure or self._lifeline.loss) is None and time.monotonic() < patience:
            time.sleep(_POLL_LAST_SECONDS)
        return reason or f"the {self.backend} connection broke: {error}"

    def _collect(self, kind: str, deadline: float, what: str) -> dict[int, dict[str, Any]]:
        reports: dict[int, dict[str, Any]] = {}
        while len(reports) < self.world_size - 1:
            rank, message = self._receive(deadline, f"waiting for {what}")
            if message.get("kind") != kind:
                reason = f"rank {rank} said {message.get('kind')!r} where {kind!r} was due"
                self.abort(reason)
                raise TransferError(f"weight transfer: {reason}")
            reports[rank] = message.get("report") or {}
        return reports

    def _receive(self, deadline: float, what: str) -> tuple[int, dict[str, Any]]:
        try:
            return self._lifeline.receive(deadline, what)
        except (DeadlineExceeded, TransferError) as error:
            self.abort(str(error))
            raise

    def _check(self) -> None:
        if self._failure is not None:
            raise TransferError(f"weight transfer: {self._failure}")


def _broadcast_options(src: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = src
    options.rootTensor = 0
    return options


def _build_group(
    backend: Backend,
    store: Any,
    rank: int,
    world_size: int,
    local_address: str,
    device: torch.device | None,
) -> Any:
    """A process group of its own, proven by one broadcast. Blocks; the caller bounds it."""
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _GLOO_LIMIT
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_address)]
        options._threads = 2
        group: Any = dist.ProcessGroupGloo(store, rank, world_size, options)
        token = torch.full((1,), float(rank == 0))
    else:
        if device is None or device.type != "cuda":
            raise ValueError(f"the NCCL backend needs a CUDA device, got {device}")
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _NCCL_WATCHDOG
        group = _nccl_group(store, rank, world_size, options)
        token = torch.full((1,), float(rank == 0), device=device)
    group.broadcast([token], _broadcast_options(0)).wait()
    if token.item() != 1.0:
        raise TransferError(f"weight transfer: the first {backend} broadcast arrived wrong")
    return group


def _nccl_group(store: Any, rank: int, world_size: int, options: Any) -> Any:
    """A `ProcessGroupNCCL` whose errors stay errors: by default its watchdog ends the process at an aborted
    collective.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
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
    build: Callable[[], Any], deadline: float, lifeline: ControlChannel, what: str, rendezvous: Rendezvous | None
) -> Any:
    """Run a blocking call in a thread that can be given up on; raises `DeadlineExceeded` or `TransferError`."""
    outcome: dict[str, Any] = {}
    done = threading.Event()

    def work() -> None:
        try:
            outcome["value"] = build()
        except Exception as error:  # handed to the waiting thread below
            outcome["error"] = error
        done.set()

    threading.Thread(target=work, name="telescope-connect", daemon=True).start()
    while not done.wait(0.02):
        if lifeline.loss is not None and not done.wait(0.5):
            raise TransferError(f"weight transfer: {what}: {lifeline.loss}")
        if rendezvous is not None and rendezvous.aborted is not None:
            raise TransferError(f"weight transfer: {what}: {rendezvous.aborted}")
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(f"weight transfer: {what} did not end before the deadline")
    if "error" in outcome:
        raise TransferError(f"weight transfer: {what}: {outcome['error']}") from outcome["error"]
    return outcome["value"]


def _bury(group: Any, in_flight: list[Broadcast], backend: Backend) -> None:
    """Hold an aborted group until its operations have ended, so that nobody blocks in its destructor."""
    if group is None:
        return
    if backend == "nccl":
        group.abort()
    while not all(broadcast.work.is_completed() for broadcast in in_flight):
        time.sleep(0.1)
