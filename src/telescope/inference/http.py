"""Minimal HTTP/1.1 client for the run's own engine servers.

Owns connections, their reuse, and the framing of requests and answers. Does not own deadlines, retries, routes or the
meaning of an answer (`client`, `adapter`). No TLS, redirects, cookies, compression or proxies: this run has started the
server. A general client costs the driver's event loop several times as much per turn.

Invariants: a connection carries one request at a time; it is reused only after a complete answer that did not ask to
close it; a cancelled request closes its connection, which tells the server.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

MAX_HEAD_BYTES = 2**17
"""Longest head of an answer. Larger bodies are received in pieces of twice this size."""


class BrokenAnswerError(ConnectionError):
    """The answer is not HTTP, or incomplete."""


class Answer(NamedTuple):
    """Status, headers (names in lower case) and body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True, eq=False)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since: float = 0.0

    def close(self) -> None:
        """Closes it now; a request in flight fails."""
        self.writer.transport.abort()


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
        self._idle: deque[_Connection] = deque()
        self._busy: set[_Connection] = set()
        self._closed = False

    async def request(self, method: str, target: str, body: bytes | None, *, keep: bool = True) -> Answer:
        """Sends a request and returns its answer, whatever the status.

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
        answer = None
        try:
            connection.writer.write(head.encode("latin-1") + b"\r\n" + (body or b""))
            answer = await read_answer(connection.reader)
            return answer
        finally:
            self._busy.discard(connection)
            if answer is None or not keep or self._closed or answer.headers.get("connection", "").lower() == "close":
                connection.close()
            else:
                connection.idle_since = time.monotonic()
                self._idle.append(connection)

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
            if not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        if self._closed:
            raise ConnectionError("the client is closed")
        try:
            async with asyncio.timeout(self._connect_timeout):
                return _Connection(*await asyncio.open_connection(self._host, self._port, limit=MAX_HEAD_BYTES))
        except TimeoutError:
            raise ConnectionError(f"no connection within {self._connect_timeout:g} s") from None
        except OSError as error:
            raise ConnectionError(f"no connection: {error.strerror or error}") from error


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """Reads one answer. Raises `BrokenAnswerError` (RFC 9112, 4-7)."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head[:-4].split("\r\n")
        version, status = first[:9], first[9:12]
        if version != "HTTP/1.1 " or not status.isdecimal():
            raise BrokenAnswerError(f"not an HTTP answer: {first[:60]!r}")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("transfer-encoding") == "chunked":
            body = await _read_chunks(reader)
        elif (length := headers.get("content-length")) is not None:
            body = await reader.readexactly(int(length))
        else:
            body = await reader.read()  # the end of the connection ends the answer
        return Answer(int(status), headers, body)
    except asyncio.IncompleteReadError:
        raise BrokenAnswerError("the server closed the connection before the answer was complete") from None
    except (ValueError, asyncio.LimitOverrunError) as error:
        raise BrokenAnswerError(f"not an HTTP answer: {error}") from None


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    chunks = []
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        chunks.append(await reader.readexactly(size))
        if await reader.readexactly(2) != b"\r\n":
            raise BrokenAnswerError("a chunk is longer than its size")
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass  # a trailer
    return b"".join(chunks)
