"""Minimal HTTP/1.1 client for the run's own engine servers.

Owns connections, their reuse, and the framing of requests and answers. Does not own deadlines, retries, routes or the
meaning of an answer (`client`, `adapter`). No TLS, redirects, cookies, compression or proxies: this run has started the
server.

A thousand sampled tokens are 140 kB of JSON, thousands of times a minute, and the driver has one event loop. So an
answer is received into a reused buffer and read in place while it is in the processor's cache: the connection calls
`read` with the body as a memoryview, and nothing is copied before.

Invariants: a connection carries one request at a time; it is reused only after a complete answer that did not ask to
close it; a cancelled request closes its connection, which tells the server.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

SCRATCH_BYTES = 2**16
"""Bytes of one read while the answer's length is unknown."""

MAX_HEAD_BYTES = 2**16
USUAL_HEAD_BYTES = 2**11
KEPT_BUFFERS = 16
"""Buffers kept for answers that arrive in pieces; more are rarely in use at once."""

Answer = TypeVar("Answer")
Read = Callable[[int, Mapping[str, str], memoryview], Answer]
"""Parses an answer: status, headers (names in lower case), body. The body is invalid after it returns."""


class BrokenAnswerError(ConnectionError):
    """The answer is not HTTP, or incomplete."""


class HttpClient:
    """Connections to one server. Use it from one event loop.

    `headers` are sent with every request. A connection that was idle for `keep_alive` seconds is not reused.
    """

    def __init__(
        self, base_url: str, headers: Mapping[str, str], *, keep_alive: float = 60.0, connect_timeout: float = 30.0
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"{base_url!r} is not a server address; use http://host:port")
        self._host, self._port = parts.hostname, parts.port or 80
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._common = f" HTTP/1.1\r\nHost: {parts.netloc}\r\n{lines}"
        self._keep_alive = keep_alive
        self._connect_timeout = connect_timeout
        self._buffers = _Buffers()
        self._idle: deque[_Connection] = deque()
        self._busy: set[_Connection] = set()
        self._closed = False

    async def request(
        self, method: str, target: str, body: bytes | None, read: Read[Answer], *, keep: bool = True
    ) -> Answer:
        """Sends a request and returns `read(status, headers, body)`; its exceptions propagate.

        Without `keep` the request gets its own connection. Raises `ConnectionError` or another `OSError` when there is
        no connection, or it ends before the answer is complete.
        """
        head = f"{method} {target}{self._common}"
        if body is not None:
            head += f"Content-Length: {len(body)}\r\n"
        if not keep:
            head += "Connection: close\r\n"
        connection = (self._take_idle() if keep else None) or await self._connect()
        self._busy.add(connection)
        try:
            return await connection.exchange(head.encode("latin-1") + b"\r\n" + (body or b""), read)
        finally:
            self._busy.discard(connection)
            if connection.is_reusable and keep and not self._closed:
                connection.idle_since = time.monotonic()
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Closes every connection. Requests in flight fail with `ConnectionError`."""
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()

    def _take_idle(self) -> _Connection | None:
        """Returns the most recently used connection, so that surplus ones expire."""
        oldest = time.monotonic() - self._keep_alive
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        if self._closed:
            raise ConnectionError("the client is closed")
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self._buffers), self._host, self._port
                )
        except TimeoutError:
            raise ConnectionError(f"no connection within {self._connect_timeout:g} s") from None
        except OSError as error:
            raise ConnectionError(f"no connection: {error.strerror or error}") from error
        return connection


class _Buffers:
    """Reusable memory for answers, shared by the connections of a client.

    `scratch` is filled and read within one callback of the event loop, so all connections can share it.
    """

    def __init__(self) -> None:
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._kept: list[bytearray] = []

    def take(self, size: int) -> bytearray:
        """Returns a buffer of at least `size` bytes with arbitrary content."""
        if self._kept and len(self._kept[-1]) >= size:
            return self._kept.pop()
        return bytearray(1 << (size - 1).bit_length())

    def give_back(self, buffer: bytearray) -> None:
        if len(self._kept) < KEPT_BUFFERS:
            self._kept.append(buffer)
            self._kept.sort(key=len)


class _Connection(asyncio.BufferedProtocol):
    """One connection. Reads the head of an answer into the scratch buffer, and the body wherever it fits."""

    def __init__(self, buffers: _Buffers) -> None:
        self.idle_since = 0.0
        self._buffers = buffers
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Any] | None = None
        self._read: Read[Any] | None = None
        self._reset()

    def _reset(self) -> None:
        self._collected: bytearray | None = None
        """Bytes received of an answer in pieces; None while it may still arrive at once."""
        self._num_bytes = 0
        self._head: _Head | None = None

    @property
    def is_reusable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and self._waiter is None

    async def exchange(self, request: bytes, read: Read[Answer]) -> Answer:
        """Sends one request and returns its answer. Raises `ConnectionError` when the connection ends first."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionError("the connection was closed")
        self._waiter, self._read = asyncio.get_running_loop().create_future(), read
        self._transport.write(request)
        result: Answer = await self._waiter
        return result

    def close(self) -> None:
        """Closes the connection now; a request in flight fails."""
        if self._transport is not None:
            self._transport.abort()

    # --- what the event loop calls ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._collected is None:
            return self._buffers.scratch
        if self._num_bytes == len(self._collected):
            self._collected = self._grown(2 * self._num_bytes)
        return memoryview(self._collected)[self._num_bytes :]

    def buffer_updated(self, num_new: int) -> None:
        if self._waiter is None:
            self.close()  # unsolicited data belongs to no request
            return
        self._num_bytes += num_new
        try:
            self._look()
        except BrokenAnswerError as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        transport, self._transport = self._transport, None
        if self._waiter is None:
            return
        head = self._head
        if error is None and transport is not None and head is not None and head.ends_with_connection:
            self._answer(head, self._arrived()[head.size :])
            return
        what = f"{type(error).__name__}: {error}" if error is not None else "the server closed the connection"
        self._fail(ConnectionError(f"{what} before the answer was complete"))

    # --- answers ----------------------------------------------------------------------------------------------------

    def _arrived(self) -> memoryview:
        whole = self._buffers.scratch if self._collected is None else memoryview(self._collected)
        return whole[: self._num_bytes]

    def _look(self) -> None:
        """Completes the answer if all of it has arrived. Otherwise prepares a buffer for the rest."""
        arrived = self._arrived()
        if self._head is None:
            self._head = parse_head(arrived)
            while self._head is not None and self._head.is_interim:
                arrived[: self._num_bytes - self._head.size] = bytes(arrived[self._head.size :])
                self._num_bytes -= self._head.size
                arrived = arrived[: self._num_bytes]
                self._head = parse_head(arrived)
        head = self._head
        if head is not None and head.length is not None:
            total = head.size + head.length
            if self._num_bytes > total:
                raise BrokenAnswerError("the server sent more than it announced")
            if self._num_bytes == total:
                self._answer(head, arrived[head.size :])
            elif self._collected is None or len(self._collected) < total:
                self._collected = self._grown(total)
            return
        if head is not None and head.is_chunked and (body := join_chunks(arrived[head.size :])) is not None:
            self._answer(head, memoryview(body))
        elif self._collected is None:
            self._collected = self._grown(SCRATCH_BYTES)

    def _grown(self, size: int) -> bytearray:
        """Returns a buffer of at least `size` bytes that begins with the received bytes."""
        larger = self._buffers.take(size)
        larger[: self._num_bytes] = self._arrived()
        if self._collected is not None:
            self._buffers.give_back(self._collected)
        return larger

    def _answer(self, head: _Head, body: memoryview) -> None:
        """Parses a complete answer for the caller and makes the connection ready for another request."""
        assert self._waiter is not None and self._read is not None
        result, error = None, None
        if not self._waiter.done():  # otherwise the caller was cancelled
            try:
                result = self._read(head.status, head.headers, body)
            except Exception as problem:
                error = problem
        self._finish(result, error)
        if head.closes:
            self.close()

    def _finish(self, result: Any, error: Exception | None) -> None:
        waiter, self._waiter, self._read = self._waiter, None, None
        if self._collected is not None:
            self._buffers.give_back(self._collected)
        self._reset()
        if waiter is None or waiter.done():
            return
        if error is not None:
            waiter.set_exception(error)
        else:
            waiter.set_result(result)

    def _fail(self, error: Exception) -> None:
        self._finish(None, error)
        self.close()


class _Head:
    """Status line and headers of an answer, `size` bytes long with the empty line."""

    __slots__ = ("closes", "ends_with_connection", "headers", "is_chunked", "is_interim", "length", "size", "status")

    def __init__(self, status: int, headers: dict[str, str], size: int, *, is_old: bool) -> None:
        self.status = status
        self.headers = headers
        self.size = size
        self.is_interim = 100 <= status < 200
        self.is_chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length")
        self.length: int | None = None
        if not self.is_chunked:
            if status in (204, 304):
                self.length = 0
            elif length is not None:
                if not length.isascii() or not length.isdigit():
                    raise BrokenAnswerError(f"Content-Length {length!r} is not a number")
                self.length = int(length)
        self.ends_with_connection = not self.is_chunked and self.length is None
        self.closes = is_old or self.ends_with_connection or headers.get("connection", "").lower() == "close"


def parse_head(data: memoryview) -> _Head | None:
    """Parses the head of an answer; None while incomplete. Raises `BrokenAnswerError` (RFC 9112, 4-6)."""
    text = bytes(data[:USUAL_HEAD_BYTES])
    end = text.find(b"\r\n\r\n")
    if end < 0 and len(data) > USUAL_HEAD_BYTES:
        text = bytes(data[:MAX_HEAD_BYTES])
        end = text.find(b"\r\n\r\n")
    if end < 0:
        if len(text) >= MAX_HEAD_BYTES or not b"HTTP/1."[: len(text)] == text[:7]:
            raise BrokenAnswerError(f"not an HTTP answer: {text[:60]!r}")
        return None
    first, *lines = text[:end].decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or not (status.isascii() and status.isdigit()):
        raise BrokenAnswerError(f"not an HTTP answer: {first[:60]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return _Head(int(status), headers, end + 4, is_old=version == "HTTP/1.0")


def join_chunks(data: memoryview) -> bytes | None:
    """Joins the body of a chunked answer; None while incomplete. Raises `BrokenAnswerError` (RFC 9112, 7.1)."""
    text, start = bytes(data), 0
    body: list[bytes] = []
    while True:
        end = text.find(b"\r\n", start)
        if end < 0:
            return None
        try:
            size = int(text[start:end].partition(b";")[0], 16)
        except ValueError:
            raise BrokenAnswerError(f"chunk size {text[start:end][:20]!r} is not a number") from None
        start = end + 2
        if size == 0:  # trailers may follow, up to an empty line
            return b"".join(body) if text[start:].startswith(b"\r\n") or b"\r\n\r\n" in text[start:] else None
        if len(text) < start + size + 2:
            return None
        if text[start + size : start + size + 2] != b"\r\n":
            raise BrokenAnswerError("a chunk is longer than its size")
        body.append(text[start : start + size])
        start += size + 2
