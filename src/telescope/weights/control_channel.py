"""The control channel of a communicator: detects a peer's exit at once.

It has a TCP connection per peer. Collectives do not suffice: NCCL waits for an exited peer until something aborts it,
and gloo for a peer that runs but does not respond. The kernel closes the sockets of a process that exits, so the end of
the stream is the signal, within milliseconds on one host. The same sockets transport the messages of a transfer
(`begin`, `ready`, `done`, `bye`).

Owns the sockets and a reading thread for each. Does not know tensors, deadlines of transfers, or torch. A frame
(`utils.frames`) has at most `MAX_FRAME_BYTES`. A peer must send the token of the rendezvous, which it got over the
engine's authenticated HTTP route.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from telescope.errors import DeadlineExceeded, InfrastructureError
from telescope.utils.frames import pack_frame, receive_frame

MAX_FRAME_BYTES = 1 << 16
_HELLO_SECONDS = 5.0
"""Limit for the first message of a peer."""
_POLL_SECONDS = 0.1
"""Interval at which a wait checks for an abort."""

Message = dict[str, Any]


class TransferError(InfrastructureError):
    """A weight transfer failed: the other side exited, refused or failed, or this side aborted."""


class Rendezvous:
    """The listening end of a communicator. The sender creates it before an engine connects."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.token = secrets.token_hex(16)
        self.aborted: str | None = None
        """Why `accept` stops waiting; None while it may wait."""
        self._server = listen(host)
        self.port: int = self._server.getsockname()[1]

    def accept(self, world_size: int, greeting: Message, timeout: float) -> ControlChannel:
        """Waits for ranks 1 .. world_size - 1, then closes the listener. Sends each rank the `greeting`.

        Connections without the token or with an unexpected rank are closed. Raises `DeadlineExceeded` with the missing
        ranks, or `TransferError` after an `abort`.
        """
        deadline = time.monotonic() + timeout
        peers: dict[int, socket.socket] = {}
        try:
            while len(peers) < world_size - 1:
                missing = sorted(set(range(1, world_size)) - set(peers))
                if self.aborted is not None:
                    raise TransferError(f"weight transfer: {self.aborted}")
                try:
                    self._server.settimeout(min(_left(deadline), _POLL_SECONDS))
                    connection, _ = self._server.accept()
                except TimeoutError as error:
                    if time.monotonic() < deadline:
                        continue
                    raise DeadlineExceeded(
                        f"weight transfer: engine ranks {missing} did not connect to {self.host}:{self.port} within "
                        f"{timeout:.0f} s (ray_broadcast_init_timeout_s)"
                    ) from error
                except OSError as error:  # the listener was closed
                    raise TransferError(f"weight transfer: {self.aborted or error}") from error
                rank = self._admit(connection, missing, greeting, deadline)
                if rank is None:
                    connection.close()
                else:
                    peers[rank] = connection
        except BaseException:
            for connection in peers.values():
                connection.close()
            raise
        finally:
            self.close()
        return ControlChannel(peers)

    def _admit(self, connection: socket.socket, missing: list[int], greeting: Message, deadline: float) -> int | None:
        """Returns the rank of a peer with the right token. None for any other connection."""
        connection.settimeout(min(_left(deadline), _HELLO_SECONDS))
        try:
            hello = receive_frame(connection, MAX_FRAME_BYTES)
            rank = hello.get("rank") if hello else None
            token = str(hello.get("token", "")) if hello else ""
            if not hmac.compare_digest(token.encode(), self.token.encode()) or rank not in missing:
                return None
            connection.sendall(pack_frame(greeting))
        except (OSError, ValueError):
            return None  # an unknown process, or a peer that exited; the caller waits for the expected one
        return int(rank)

    def abort(self, reason: str) -> None:
        """Stops waiting and connecting. Any thread may call it."""
        self.aborted = self.aborted or reason

    def close(self) -> None:
        self._server.close()


def join(host: str, port: int, rank: int, token: str, timeout: float) -> tuple[ControlChannel, Message]:
    """Connects to a `Rendezvous` as `rank`. Returns the channel and the sender's greeting.

    Raises `TransferError` if the sender is not reachable or refuses this rank.
    """
    connection: socket.socket | None = None
    greeting: Message | None = None
    try:
        connection = socket.create_connection((host, port), timeout=timeout)
        connection.sendall(pack_frame({"rank": rank, "token": token}))
        greeting = receive_frame(connection, MAX_FRAME_BYTES)
    except (OSError, ValueError) as error:
        raise TransferError(f"weight transfer: cannot join the sender at {host}:{port}: {error}") from error
    finally:
        if greeting is None and connection is not None:
            connection.close()
    if greeting is None:
        raise TransferError(f"weight transfer: the sender at {host}:{port} refused rank {rank}")
    return ControlChannel({0: connection}), greeting


class ControlChannel:
    """Connected control sockets by peer, and the threads that read them.

    `loss` is None while all peers are connected, then the reason why one is not. A peer that sends `bye` before it
    closes is a loss too, because no transfer is possible any more.
    """

    loss: str | None = None

    def __init__(self, peers: dict[int, socket.socket]) -> None:
        self._peers = peers
        self._messages: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._closed_because: str | None = None
        self._on_loss: Callable[[str], None] | None = None
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        for rank, connection in peers.items():
            connection.settimeout(None)  # a send never waits, since control messages fit any socket buffer
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            thread = threading.Thread(target=self._read, args=(rank, connection), name="telescope-control", daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def local_address(self) -> str:
        """Returns this host's address in the connection to the peer."""
        connection = next(iter(self._peers.values()))
        return str(connection.getsockname()[0])

    def on_loss(self, callback: Callable[[str], None]) -> None:
        """Sets `callback(reason)`. It is called once after a loss by the reading thread, or at once if already lost."""
        with self._lock:
            self._on_loss, lost = callback, self.loss
        if lost is not None:
            callback(lost)

    def send(self, message: Message) -> None:
        """Sends to every peer. An unreachable peer sets `loss`; nothing is raised."""
        frame = pack_frame(message)
        for rank, connection in self._peers.items():
            try:
                with self._lock:
                    connection.sendall(frame)
            except OSError as error:
                self._lose(f"rank {rank} cannot be reached: {error}")

    def receive(self, deadline: float, what: str) -> tuple[int, Message]:
        """Waits until `deadline` (`time.monotonic()`) for the next message. Returns its rank and the message.

        If no message is left, raises `TransferError` when a peer is lost or this side has closed, or `DeadlineExceeded`
        with `what`.
        """
        while True:
            try:
                return self._messages.get(timeout=min(0.05, _left(deadline)))
            except queue.Empty:
                ended = self.loss or self._closed_because
                if ended is not None and self._messages.empty():
                    raise TransferError(f"weight transfer: {what}: {ended}") from None
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"weight transfer: {what}: no answer before the deadline") from None

    def close(self, reason: str | None = None) -> None:
        """Sends `bye` and closes the sockets. Idempotent. `reason` is given if this side failed."""
        if self._closed_because is not None:
            return
        self._closed_because = reason or "closed by this side"
        self.send({"kind": "bye", "reason": reason})
        for connection in self._peers.values():
            with contextlib.suppress(OSError):  # the peer has closed it
                connection.shutdown(socket.SHUT_RDWR)  # ends the wait of its thread
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        for connection in self._peers.values():
            connection.close()

    def _read(self, rank: int, connection: socket.socket) -> None:
        try:
            while (message := receive_frame(connection, MAX_FRAME_BYTES)) is not None:
                if message.get("kind") == "bye":
                    self._lose(f"rank {rank} left" + (f": {message['reason']}" if message.get("reason") else ""))
                    return
                self._messages.put((rank, message))
        except (OSError, ValueError) as error:
            self._lose(f"the connection to rank {rank} broke: {error}")
        else:
            self._lose(f"the process of rank {rank} exited")

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self.loss is not None or self._closed_because is not None:
                return
            self.loss, callback = reason, self._on_loss
        if callback is not None:
            callback(reason)


def listen(host: str) -> socket.socket:
    """Returns a socket that listens on a free port of this address only."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, 0), family=family)


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
