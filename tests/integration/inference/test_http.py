"""The driver's HTTP client against a server that sends exactly the bytes of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from telescope.inference.http import MAX_HEAD_BYTES, HttpClient


class Server:
    """Answers with the `pieces` of a test. `requests` are (connection, bytes), `num_open` counts connections."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, bytes]] = []
        self.pieces: Callable[[int, bytes], list[bytes] | None] = lambda connection, request: [plain(b"hello")]
        self.pause = 0.0
        self.num_connections = 0
        self.num_open = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.num_connections = self.num_connections, self.num_connections + 1
        self.num_open += 1
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
                body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
                self.requests.append((number, head + body))
                pieces = self.pieces(number, head + body)
                for piece in pieces or ():
                    writer.write(piece)
                    await asyncio.sleep(self.pause)
                if pieces is None:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self.num_open -= 1
            writer.close()


def plain(body: bytes, *, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    await server.start()
    yield server
    server.server.close()
    for writer in server.writers:
        writer.close()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[HttpClient]:
    client = HttpClient(server.url, {"Authorization": "Bearer x"})
    yield client
    client.close()


async def test_a_request_is_what_the_caller_gave(server: Server, client: HttpClient) -> None:
    assert await client.request("POST", "/a?b=c", b"{}") == (200, {"content-length": "5"}, b"hello")
    [(_, request)] = server.requests
    head, body = request.split(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"POST /a?b=c HTTP/1.1",
        b"Host: " + server.url.removeprefix("http://").encode(),
        b"Authorization: Bearer x",
        b"Content-Length: 2",
    ]
    assert body == b"{}"


@pytest.mark.parametrize("size", [0, 1, MAX_HEAD_BYTES - 60, MAX_HEAD_BYTES, 5 * MAX_HEAD_BYTES + 1])
@pytest.mark.parametrize("piece", [7, 4099, 10**9])
async def test_an_answer_of_any_size_and_chunking_is_complete(
    server: Server, client: HttpClient, size: int, piece: int
) -> None:
    body = bytes(i % 251 for i in range(size))
    whole = plain(body)
    num_small = 300  # small pieces at the start, where the head is; then the rest at once
    cuts = [whole[i : i + piece] for i in range(0, min(len(whole), num_small * piece), piece)]
    server.pieces = lambda *_: [*cuts, whole[num_small * piece :]]
    for _ in range(2):
        assert (await client.request("GET", "/", None)).body == body


async def test_chunks_are_joined(server: Server, client: HttpClient) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    server.pause = 0.002
    server.pieces = lambda *_: [head, b"5\r\nhel", b"lo\r\n6;x=y\r\n world\r\n0\r\n", b"\r\n"]
    assert (await client.request("GET", "/", None)).body == b"hello world"
    assert (await client.request("GET", "/", None)).body == b"hello world"
    assert server.num_connections == 1


async def test_an_answer_without_a_length_ends_with_its_connection(server: Server, client: HttpClient) -> None:
    def pieces(connection: int, request: bytes) -> list[bytes] | None:
        server.writers[connection].write(b"HTTP/1.1 200 OK\r\n\r\nall ")
        server.writers[connection].write(b"of it")
        return None

    server.pieces = pieces
    assert (await client.request("GET", "/", None)).body == b"all of it"


async def test_connections_are_reused_one_request_at_a_time(server: Server, client: HttpClient) -> None:
    server.pause = 0.02
    await asyncio.gather(*(client.request("GET", f"/{i}", None) for i in range(8)))
    assert server.num_connections == 8
    server.pause = 0.0
    for i in range(8):
        await client.request("GET", f"/again{i}", None)
    assert server.num_connections == 8


async def test_a_request_with_its_own_connection_leaves_none_open(server: Server, client: HttpClient) -> None:
    await client.request("GET", "/", None, keep=False)
    assert b"Connection: close\r\n" in server.requests[0][1]
    await until(lambda: server.num_open == 0)
    await client.request("GET", "/", None)
    assert server.num_connections == 2


async def test_a_connection_closed_by_the_server_is_not_reused(server: Server, client: HttpClient) -> None:
    server.pieces = lambda connection, _: [plain(b"bye", headers="Connection: close\r\n")]
    await client.request("GET", "/", None)
    server.pieces = lambda *_: [plain(b"hello")]
    await client.request("GET", "/", None)
    server.writers[1].close()  # in silence
    await until(lambda: server.num_open == 0)
    assert (await client.request("GET", "/", None)).body == b"hello"
    assert [connection for connection, _ in server.requests] == [0, 1, 2]


async def test_a_connection_that_idled_too_long_is_not_reused(server: Server) -> None:
    client = HttpClient(server.url, {}, keep_alive=0.02)
    await client.request("GET", "/", None)
    await asyncio.sleep(0.05)
    await client.request("GET", "/", None)
    assert server.num_connections == 2
    client.close()


async def test_cancelling_closes_the_connection(server: Server, client: HttpClient) -> None:
    server.pieces = lambda *_: []
    task = asyncio.create_task(client.request("GET", "/", None))
    await until(lambda: len(server.requests) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: server.num_open == 0)


async def test_an_error_answer_keeps_the_connection(server: Server, client: HttpClient) -> None:
    server.pieces = lambda *_: [plain(b"no", status="503 Service Unavailable")]
    for _ in range(2):
        answer = await client.request("GET", "/", None)
        assert (answer.status, answer.body) == (503, b"no")
    assert server.num_connections == 1


@pytest.mark.parametrize(
    ("pieces", "complaint"),
    [
        (None, "closed the connection before the answer was complete"),
        ([b"HTTP/1.0 200 OK\r\n\r\n"], "not an HTTP answer"),
        ([b"HTTP/1.1 abc\r\n\r\n"], "not an HTTP answer"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\n"], "not an HTTP answer"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"], "xyz"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabcd"], "chunk"),
        ([b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000], "not an HTTP answer"),
    ],
)
async def test_a_malformed_answer_is_a_lost_connection(
    server: Server, client: HttpClient, pieces: list[bytes] | None, complaint: str
) -> None:
    server.pieces = lambda *_: pieces
    with pytest.raises(ConnectionError, match=complaint):
        await client.request("GET", "/", None)
    await until(lambda: server.num_open == 0)


async def test_half_an_answer_is_a_lost_connection(server: Server, client: HttpClient) -> None:
    def pieces(connection: int, request: bytes) -> list[bytes] | None:
        server.writers[connection].write(plain(b"hello")[:-2])
        return None

    server.pieces = pieces
    with pytest.raises(ConnectionError, match="before the answer was complete"):
        await client.request("GET", "/", None)


async def test_closing_the_client_ends_running_requests(server: Server, client: HttpClient) -> None:
    server.pieces = lambda *_: []
    task = asyncio.create_task(client.request("GET", "/", None))
    await until(lambda: len(server.requests) == 1)
    client.close()
    with pytest.raises(ConnectionError):
        await task
    with pytest.raises(ConnectionError, match="client is closed"):
        await client.request("GET", "/", None)


async def test_an_absent_server_is_no_connection(server: Server, client: HttpClient) -> None:
    server.server.close()
    await server.server.wait_closed()
    with pytest.raises(ConnectionError, match="no connection"):
        await client.request("GET", "/", None)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not within 5 s")
