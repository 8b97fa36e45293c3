"""Where the parts of a run directory lie, and how a small file is replaced.

Owns the layout (`config.yaml`, `run.json`, `heartbeat.json`, `summary.json`, `logs/`, `checkpoints/`, `tables/`) and
atomic replacement. Does not own what is in the files.

Invariant: a file that another process may read is written under a hidden name in the same directory and renamed, so
that a reader sees the old content or the new and nothing between.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic_core

TEMPORARY_PREFIX = ".writing-"
"""Start of the names of files that are not complete. Readers pass over them; the next writer removes them."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Paths of a run directory. Nothing is created by asking for one."""

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
        """Sign of life of the process that records."""
        return self.run_dir / "heartbeat.json"

    @property
    def summary(self) -> Path:
        """Results of a run that ended."""
        return self.run_dir / "summary.json"

    @property
    def logs(self) -> Path:
        """Plain log files, one per component."""
        return self.run_dir / "logs"

    @property
    def model(self) -> Path:
        """The trained model, in Hugging Face form."""
        return self.run_dir / "model"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint."""
        return self.run_dir / "checkpoints"

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
        """Held by the one process that writes the tables."""
        return self.tables / ".writer.lock"

    @property
    def wandb(self) -> Path:
        """Parent of what W&B writes."""
        return self.run_dir / "wandb"

    def table(self, name: str) -> Path:
        """The folder of a table's segments."""
        return self.tables / name

    def log(self, component: str) -> Path:
        """The log file of a component."""
        return self.logs / f"{component}.log"


def temporary_name(path: Path) -> Path:
    """A name beside `path` that only this process uses, for a file that is not complete yet."""
    return path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that readers see the old bytes or the new ones. Raises `OSError`."""
    temporary = temporary_name(path)
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def replace_json(path: Path, value: Any, *, indent: int | None = 1) -> int:
    """Replace `path` by `value` as JSON and return the number of bytes. Raises `OSError`.

    Without `indent` it takes a tenth of the time, which matters for long lists: nothing else runs meanwhile.
    """
    content = _compact(value) if indent is None else None
    if content is None:
        content = json.dumps(value, indent=indent, default=_plain).encode("utf-8", errors="replace")
    replace_file(path, content + b"\n")
    return len(content) + 1


def _compact(value: Any) -> bytes | None:
    """JSON by a writer that is five times as fast as Python's own; None for text that is no UTF-8, which that one does
    not write."""
    try:
        return pydantic_core.to_json(value, inf_nan_mode="constants", fallback=_plain)
    except ValueError:
        return None


def _plain(value: Any) -> Any:
    """Numpy's numbers and arrays as Python's, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None where there is none. Raises `ValueError` where it is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
