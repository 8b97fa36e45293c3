"""What a run says about itself in `run.json`, and whether it still lives.

Owns the identity and the status of a run. Does not own its progress (table `steps`), its result (`summary.json`) or
when the file is written (`attempt`).

Invariant: `run.json` is replaced whole at the start and the end of every attempt (and once between, when the accuracy
before training is known), so that a status of `running` with
no process behind it means that the attempt was killed.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from telescope.record.files import RunFiles, read_json, replace_json
from telescope.record.process import ProcessIdentity

HEARTBEAT_SECONDS = 5.0
"""Time between the signs of life of a process that records."""

STALE_SECONDS = 6 * HEARTBEAT_SECONDS
"""A heartbeat older than this belongs to a dead process, where the process itself cannot be seen."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The content of `run.json`."""

    run_id: str
    name: str
    status: str
    """`running`, or how the last attempt ended: `finished`, `stopped` (asked to), `failed`."""
    started_at: float
    attempt: int
    ended_at: float | None = None
    error: str | None = None
    project: str = ""
    tags: list[str] = field(default_factory=list)
    config_hash: str = ""
    process: dict[str, Any] = field(default_factory=dict)
    num_steps: int | None = None
    """Training steps that were asked for."""
    heldout_before: float | None = None
    """Held-out accuracy before training, from when it is known; at the end `summary.json` says it too."""


def write_run_json(run_dir: Path | str, info: RunInfo) -> None:
    """Replace `run.json`. Raises `OSError`."""
    replace_json(RunFiles(run_dir).run_json, asdict(info))


def read_run_json(run_dir: Path | str) -> RunInfo | None:
    """The run's `run.json`, or None if there is none that can be read. Keys of newer versions are passed over."""
    try:
        value = read_json(RunFiles(run_dir).run_json)
        return RunInfo(**{f.name: value[f.name] for f in fields(RunInfo) if f.name in value})
    except (OSError, ValueError, TypeError):
        return None


def next_attempt(run_dir: Path | str) -> int:
    """Number of the attempt that starts now in this directory: 1 in a new one."""
    info = read_run_json(run_dir)
    return 1 if info is None else info.attempt + 1


def status_now(run_dir: Path | str, info: RunInfo | None) -> str:
    """`live`, `dead`, or how the run ended; `unknown` for a directory without a readable `run.json`."""
    if info is None:
        return "unknown"
    if info.status != "running":
        return info.status
    heartbeat = read_heartbeat(run_dir)
    process = ProcessIdentity.from_json(info.process)
    alive = process.is_alive() if process else None
    if alive is None:
        alive = heartbeat is not None and time.time() - heartbeat["time"] < STALE_SECONDS
    return "live" if alive else "dead"


def read_heartbeat(run_dir: Path | str) -> dict[str, Any] | None:
    """The last sign of life, with at least `time` (Unix seconds), or None."""
    try:
        value = read_json(RunFiles(run_dir).heartbeat)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("time"), float | int) else None
