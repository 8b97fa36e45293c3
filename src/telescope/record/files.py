"""The layout of a run directory, and atomic replacement of small files.

Owns the paths (`config.yaml`, `run.json`, `heartbeat.json`, `summary.json`, `logs/`, `checkpoints/`, `tables/`). Does
not own the contents.

Invariant: a file that another process may read is written under a hidden name in the same directory and then renamed.
A reader therefore sees the old content or the new content.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic_core

TEMPORARY_PREFIX = ".writing-"
"""Name prefix of incomplete files. Readers ignore them, and the next writer removes them."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Paths in a run directory. Creates nothing."""

    run_dir: Path

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "run_dir", Path(run_dir))

    @property
    def config(self) -> Path:
        """The resolved config of the newest attempt."""
        return self.run_dir / "config.yaml"

    @property
    def run_json(self) -> Path:
        """Identity and status of the run."""
        return self.run_dir / "run.json"

    @property
    def heartbeat(self) -> Path:
        """Heartbeat of the recording process."""
        return self.run_dir / "heartbeat.json"

    @property
    def summary(self) -> Path:
        """Result of a run that has ended."""
        return self.run_dir / "summary.json"

    @property
    def logs(self) -> Path:
        """Log files, one per component."""
        return self.run_dir / "logs"

    @property
    def model(self) -> Path:
        """The trained model, in Hugging Face format."""
        return self.run_dir / "model"

    @property
    def tables(self) -> Path:
        """One folder of segments per table."""
        return self.run_dir / "tables"

    @property
    def in_flight(self) -> Path:
        """The samples that are being generated now."""
        return self.tables / "in_flight.json"

    @property
    def writer_lock(self) -> Path:
        """Lock file of the process that writes the tables."""
        return self.tables / ".writer.lock"

    @property
    def wandb(self) -> Path:
        """Folder of W&B's files."""
        return self.run_dir / "wandb"

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
    """Writes `content` to `path`; readers see the old bytes or the new ones. Raises `OSError`."""
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
