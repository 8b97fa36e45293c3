"""Frames on a byte stream: a JSON header and raw bytes.

    4 bytes header length, 4 bytes blob length (little endian), header (JSON), blob

Used by environment workers, the control channel of weight transfers and the engine's binary responses. A header is
parsed as data; nothing is unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTHS = struct.Struct("<II")

MAX_FRAME_BYTES = 256 * 2**20  # a longer frame means a corrupt stream

_encode = json.JSONEncoder(separators=(",", ":")).encode


class BrokenFrameError(ValueError):
    """The bytes are not frames."""


def pack_frame(header: dict[str, Any] | bytes, blob: bytes = b"") -> bytes:
    """Returns one frame; a header of bytes is JSON already."""
    text = header if isinstance(header, bytes) else _encode(header).encode("ascii")
    return b"".join((_LENGTHS.pack(len(text), len(blob)), text, blob))


def split_frame(data: bytes | memoryview) -> tuple[memoryview, memoryview]:
    """Returns the header, unparsed, and the blob of exactly one frame. Raises `BrokenFrameError`."""
    if len(data) < _LENGTHS.size:
        raise BrokenFrameError(f"{len(data)} bytes are not a frame")
    num_header, num_blob = _LENGTHS.unpack_from(data)
    body = memoryview(data)[_LENGTHS.size :]
    if len(body) != num_header + num_blob:
        raise BrokenFrameError(f"{len(body)} bytes in a frame of {num_header + num_blob}")
    return body[:num_header], body[num_header:]


class FrameReader:
    """Splits a stream of bytes into frames."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def num_missing(self) -> int:
        """Known bytes up to the end of the current frame."""
        if len(self._buffer) < _LENGTHS.size:
            return _LENGTHS.size - len(self._buffer)
        return _LENGTHS.size + sum(_LENGTHS.unpack_from(self._buffer)) - len(self._buffer)

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """Returns the frames that `data` completes. Raises `BrokenFrameError`."""
        self._buffer += data
        buffer, start, frames = self._buffer, 0, []
        while len(buffer) - start >= _LENGTHS.size:
            header_bytes, blob_bytes = _LENGTHS.unpack_from(buffer, start)
            if header_bytes + blob_bytes > self._max_bytes:
                raise BrokenFrameError(f"a frame of {header_bytes + blob_bytes} bytes; at most {self._max_bytes}")
            body = start + _LENGTHS.size
            end = body + header_bytes + blob_bytes
            if len(buffer) < end:
                break
            header = json.loads(buffer[body : body + header_bytes])
            if not isinstance(header, dict):
                raise BrokenFrameError("the header of a frame is not an object")
            frames.append((header, bytes(buffer[body + header_bytes : end])))
            start = end
        if start:
            del buffer[:start]
        return frames


def receive_frame(connection: socket.socket, max_bytes: int) -> dict[str, Any] | None:
    """Reads one frame from a blocking socket. Returns its header, None at the end. Raises `ValueError` for no frame."""
    reader = FrameReader(max_bytes)
    while data := connection.recv(reader.num_missing):
        if frames := reader.feed(data):
            return frames[0][0]
    return None
