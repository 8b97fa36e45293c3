"""Log file for the output of a child process.

Invariant: a failing disk or a removed folder prevents neither the start of the process nor the report of its exit.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)


def open_log(path: Path) -> BinaryIO:
    """Opens the file for appending and makes its folder; on an error, warns and returns a sink."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        logger.warning("%s cannot be written (%s): its output is lost", path, error.strerror or error)
        return open(os.devnull, "ab")


def log_size(path: Path) -> int:
    """Bytes in the file, 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def rotate_log(path: Path, max_bytes: int) -> None:
    """Replaces `<path>.1` by the last `max_bytes` of a longer log and empties the log.

    Processes that have the file open for appending continue at its start. Output written meanwhile may be lost.
    """
    if log_size(path) <= max_bytes:
        return
    rotated = path.with_name(f"{path.name}.1")
    try:
        with path.open("rb") as log:
            log.seek(-max_bytes, os.SEEK_END)
            rotated.write_bytes(log.read(max_bytes))
    except OSError as error:
        logger.warning("%s cannot be written (%s): its output is lost", rotated, error.strerror or error)
    os.truncate(path, 0)


def log_tail(path: Path, num_bytes: int, *, start: int = 0) -> str:
    """The last `num_bytes` of what was written after byte `start`, as text; empty when it cannot be read."""
    try:
        with path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(start, end - num_bytes) if start <= end else max(0, end - num_bytes))
            return log.read().decode("utf-8", "replace").strip()
    except OSError:
        return ""
