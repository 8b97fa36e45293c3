"""Frames on the socket between the pool and a worker: a JSON header and a blob of raw bytes.

    4 bytes header length, 4 bytes blob length (little endian), header (JSON, ASCII), blob

The blob carries token ids as int32, because a thousand numbers in JSON cost more than all else in a message. Both sides
are processes of one machine that trust each other's framing; what a header holds is still read as data only.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

_LENGTHS = struct.Struct("<II")

MAX_FRAME_BYTES = 256 * 2**20
"""Beyond this a frame is taken for garbage."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


class BrokenFrameError(RuntimeError):
    """The bytes on the socket are not frames."""


def pack_frame(header: dict[str, Any], blob: bytes = b"") -> bytes:
    """One frame as bytes."""
    text = _encode(header).encode("ascii")
    return b"".join((_LENGTHS.pack(len(text), len(blob)), text, blob))


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """Frames that `data` completes. Raises `BrokenFrameError`."""
        self._buffer += data
        buffer, start, frames = self._buffer, 0, []
        while len(buffer) - start >= _LENGTHS.size:
            header_bytes, blob_bytes = _LENGTHS.unpack_from(buffer, start)
            if header_bytes + blob_bytes > MAX_FRAME_BYTES:
                raise BrokenFrameError(f"a frame of {header_bytes + blob_bytes} bytes")
            body = start + _LENGTHS.size
            end = body + header_bytes + blob_bytes
            if len(buffer) < end:
                break
            header = json.loads(buffer[body : body + header_bytes])
            frames.append((header, bytes(buffer[body + header_bytes : end])))
            start = end
        if start:
            del buffer[:start]
        return frames


def pack_ids(token_ids: Iterable[int]) -> bytes:
    """Token ids [L] as int32."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.astype(np.int32, copy=False).tobytes()
    return array("i", token_ids).tobytes()


def unpack_ids(blob: bytes) -> list[int]:
    """The inverse of `pack_ids`."""
    ids = array("i")
    ids.frombytes(blob)
    return ids.tolist()


def pack_floats(values: Iterable[float]) -> bytes:
    """Logprobs [L] as float32."""
    if isinstance(values, np.ndarray):
        return values.astype(np.float32, copy=False).tobytes()
    return array("f", values).tobytes()


def unpack_floats(blob: bytes) -> list[float]:
    """The inverse of `pack_floats`."""
    values = array("f")
    values.frombytes(blob)
    return values.tolist()
