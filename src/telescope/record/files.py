"""The layout of a run directory, and atomic replacement of small files.

Owns the paths (`config.yaml`, `run.json`, `heartbeat.json`, `summary.json`, `logs/`, `checkpoints/`, `tables/`). Does
not own the contents.

Invariant: a file that another process may read is written under a hidden name in the same directory and then renamed.
A reader therefore sees the old content or the new content.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pydantic_core

TEMPORARY_PREFIX = ".writing-"
"""Name prefix of incomplete files. Readers ignore them, and the next writer removes them."""


class RunFiles:
    """Paths in a run directory. Creates nothing."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.run_dir = root = Path(run_dir)
        self.config = root / "config.yaml"
        """The resolved config of the newest attempt."""
        self.run_json = root / "run.json"
        """Identity and status of the run."""
        self.heartbeat = root / "heartbeat.json"
        """Heartbeat of the recording process."""
        self.summary = root / "summary.json"
        """Result of a run that has ended."""
        self.logs = root / "logs"
        """Log files, one per component."""
        self.model = root / "model"
        """The trained model, in Hugging Face format."""
        self.wandb = root / "wandb"
        """Folder of W&B's files."""
        self.tables = root / "tables"
        """One folder of segments per table."""
        self.in_flight = self.tables / "in_flight.json"
        """The samples that are being generated now."""
        self.writer_lock = self.tables / ".writer.lock"
        """Lock file of the process that writes the tables."""

    def table(self, name: str) -> Path:
        """The folder of a table's segments."""
        return self.tables / name

    def log(self, component: str) -> Path:
        """The log file of a component."""
        return self.logs / f"{component}.log"


def temporary_name(path: Path) -> Path:
    """Returns a name beside `path` for an incomplete file of this process."""
    return path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")


def replace_file(path: Path, content: bytes) -> None:
    """Writes `content` to `path`. Readers see the old bytes or the new ones. Raises `OSError`."""
    temporary = temporary_name(path)
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def replace_json(path: Path, value: Any, *, indent: int | None = 1) -> int:
    """Replaces `path` with `value` as JSON. Returns the number of bytes. Raises `OSError`.

    Without `indent` it takes a tenth of the time, which matters for long lists.
    """
    content = _json_bytes(value, indent)
    replace_file(path, content)
    return len(content)


def overwrite_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON over an existing file, in place: a full disk has no space for another file.

    Raises `OSError`, with the old content kept, if the new one does not fit the file's blocks. A reader may see a
    part of it: only for the end of a run whose disk stays full.
    """
    content = _json_bytes(value, indent=1)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, len(content))
        file.write(content)
        file.truncate()


def _json_bytes(value: Any, indent: int | None) -> bytes:
    """Returns a line of JSON, or lines with `indent`."""
    content = _compact(value) if indent is None else None
    if content is None:
        content = json.dumps(value, indent=indent, default=_to_json_value).encode("utf-8", errors="replace")
    return content + b"\n"


def _compact(value: Any) -> bytes | None:
    """Returns compact JSON, or None for invalid UTF-8. Five times as fast as Python's `json`."""
    try:
        return pydantic_core.to_json(value, inf_nan_mode="constants", fallback=_to_json_value)
    except ValueError:
        return None


def _to_json_value(value: Any) -> Any:
    """Converts numpy numbers and arrays to Python's, and anything else to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file, or None without a file. Raises `ValueError` for invalid JSON."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
