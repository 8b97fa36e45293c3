"""Frames of bytes: a JSON header and raw bytes.

    4 bytes header length, 4 bytes blob length (little endian), header (JSON), blob

Used by the control channel of weight transfers and the engine's binary responses. A header is parsed as data;
nothing is unpickled.
"""

import json
import socket
import struct
from typing import Any

_LENGTHS = struct.Struct("<II")


def pack_frame(header: dict[str, Any] | bytes, blob: bytes = b"") -> bytes:
    """Returns one frame. A `bytes` header is JSON already."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode("ascii")
    return b"".join((_LENGTHS.pack(len(text), len(blob)), text, blob))


def split_frame(data: bytes | memoryview) -> tuple[memoryview, memoryview]:
    """Returns the unparsed header and the blob of exactly one frame. Raises `ValueError`."""
    if len(data) < _LENGTHS.size:
        raise ValueError(f"{len(data)} bytes are not a frame")
    num_header, num_blob = _LENGTHS.unpack_from(data)
    body = memoryview(data)[_LENGTHS.size :]
    if len(body) != num_header + num_blob:
        raise ValueError(f"{len(body)} bytes in a frame of {num_header + num_blob}")
    return body[:num_header], body[num_header:]


def receive_frame(connection: socket.socket, max_bytes: int) -> dict[str, Any] | None:
    """Reads one frame from a blocking socket. Returns its header, None at the end. Raises `ValueError` for no frame."""
    lengths = _receive(connection, _LENGTHS.size)
    if lengths is None:
        return None
    num_bytes = sum(_LENGTHS.unpack(lengths))
    if num_bytes > max_bytes:
        raise ValueError(f"a frame of {num_bytes} bytes; at most {max_bytes}")
    body = _receive(connection, num_bytes)
    if body is None:
        return None
    header = json.loads(bytes(split_frame(lengths + body)[0]))
    if not isinstance(header, dict):
        raise ValueError("the header of a frame is not an object")
    return header


def _receive(connection: socket.socket, num_bytes: int) -> bytes | None:
    """Reads exactly `num_bytes` bytes. None if the stream ends earlier."""
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            return None
        data += part
    return data
