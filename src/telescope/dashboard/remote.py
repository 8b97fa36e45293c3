"""Copies the runs of a W&B project to the user's cache folder, in the layout of run directories.

    WandbRuns (a thread)  every few seconds: the list of runs --> a folder per run with run.json, config.yaml
    RunCopy (a thread per opened run)  files that differ from W&B's --> that folder; again while the run is live

Owns the cache, the times of requests to W&B, and the progress of each copy. Pages read the copies like any other run.
Does not own the requests to W&B (`wandb_runs`).

Invariants: a file of a copy is replaced as a whole. The files of a table are downloaded in the order of their rows, and
replaced files are removed after their successors have arrived, so that a copy looks like the run to a reader. Without
W&B the copies stay unchanged.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import yaml
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from telescope.dashboard.wandb_runs import RemoteFile, RemoteRun, UnreachableError, WandbError, WandbProject
from telescope.errors import UserError
from telescope.record.files import RunFiles, read_json, replace_file, replace_json
from telescope.record.run_info import RunInfo, read_run_json, status_now, write_run_json
from telescope.trackers.wandb_files import FOLDER, MANIFEST
from telescope.utils.text import home_folder, listed

LIST_SECONDS = 15.0
"""Time between two requests for the list of runs."""

LIVE_SECONDS = 5.0
"""Time between two requests for the files of a live run."""

IDLE_SECONDS = 600.0
"""A run that no page has requested for this long is no longer updated."""

SHOWN_BYTES = 4_000_000
"""For a complete copy, the progress of larger updates is shown. A live run adds a few bytes every few seconds."""

MOST_NAMED = 5
"""Number of runs with another layout that the list of problems names."""

NUM_DOWNLOADS = 4
"""Files of different tables of one run that are downloaded at once."""

STATE_NAME = "wandb_copy.json"
"""File in a copy's folder with the copy's state and the version of each file."""

Phase = Literal["listed", "syncing", "synced", "failed"]


@dataclass(frozen=True, config=ConfigDict(json_schema_serialization_defaults_required=True))
class RemoteCopy:
    """How far the copy of a run on W&B is. `listed`: no page has asked for it, and it has no tables."""

    phase: Phase
    source: str
    """Origin of the copy: `W&B entity/project`."""
    done_bytes: int = 0
    total_bytes: int = 0
    message: str | None = None
    """Why the copy failed, or why it may be old."""


def cache_folder() -> Path:
    """Returns the folder of all copies. Creates nothing."""
    return home_folder("XDG_CACHE_HOME", ".cache") / "wandb"


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turns an `OSError` into a `UserError` that names the folder."""
    try:
        yield
    except OSError as error:
        raise UserError(f"The copy in {folder} cannot be written: {error.strerror or error}") from error


class WandbRuns:
    """The runs of one project. `root` is a folder of run directories. Must be closed."""

    def __init__(self, project: WandbProject, cache: Path | None = None) -> None:
        self.project = project
        self.root = (cache or cache_folder()).resolve() / project.host / project.path
        self.problem: str | None = None
        """Why the list may be old, or None."""
        self._copies: dict[str, RunCopy] = {}
        self._others: dict[str, str] = {}
        """Names of runs without a record of Telescope, by id."""
        self._newest = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_listing, name="telescope-wandb-list", daemon=True)

    @property
    def num_runs(self) -> int:
        """The number of Telescope runs."""
        return len(self._copies)

    def start(self, *, must_answer: bool = True) -> None:
        """Lists the runs, and updates the list until it is closed.

        With `must_answer`, raises `UserError` if W&B cannot be reached or the cache cannot be written, unless there are
        copies to show.
        """
        for folder in self.root.iterdir() if self.root.is_dir() else ():
            if RunFiles(folder).run_json.is_file():
                self._copies[folder.name] = RunCopy(self.project, folder, None)
        self._look(must_answer=must_answer and not self._copies)
        self._thread.start()

    def close(self) -> None:
        """Ends the threads when they have finished their current step."""
        self._closing.set()
        for copy in list(self._copies.values()):
            copy.close()

    def copy_in(self, run_dir: Path) -> RunCopy | None:
        """Returns the copy in a folder, or None if the run is not from this project."""
        return self._copies.get(run_dir.name) if run_dir.parent == self.root else None

    def _keep_listing(self) -> None:
        while not self._closing.wait(LIST_SECONDS):
            self._look()

    def _look(self, *, must_answer: bool = False) -> None:
        try:
            with _writing(self.root):
                self._list()
        except UserError as error:
            if must_answer:
                raise
            is_old = isinstance(error, UnreachableError) and self._copies
            what = "The runs shown are earlier copies." if is_old else ""
            self.problem = f"{error} {what}".strip()

    def _list(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        running = [name for name, copy in self._copies.items() if copy.is_running]
        runs, others = self.project.runs(self._newest, running)
        self._others |= others
        for run in runs:
            self._newest = max(self._newest, run.created_at)
            known = self._copies.get(run.name)
            if known is None:
                self._copies[run.name] = RunCopy(self.project, self.root / run.name, run)
            else:
                known.take_over(run)
        names = listed(self._others.values(), MOST_NAMED)
        problem = f"Runs of another layout, without a record of Telescope: {names}."
        self.problem = problem if names else None
        if not self._copies:
            none = "The project has no runs of Telescope. Runs appear here when they start."
            self.problem = f"{none} {problem if names else ''}".strip()


class RunCopy:
    """One run of the project and its copy."""

    def __init__(self, project: WandbProject, folder: Path, run: RemoteRun | None) -> None:
        self._project = project
        self._files = RunFiles(folder)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._asked_at = 0.0
        self._manifest: tuple[str, dict[str, int]] | None = None
        try:
            found = read_json(self._files.run_dir / STATE_NAME)
        except (OSError, ValueError):
            found = None
        kept: dict[str, Any] = {"versions": {}, "remote": {}, "is_complete": False}
        kept |= found if isinstance(found, dict) else {}
        self._versions: dict[str, str] = kept["versions"]
        self._remote: dict[str, Any] = kept["remote"]
        self._is_complete: bool = kept["is_complete"]
        self.state = RemoteCopy("synced" if self._is_complete else "listed", f"W&B {project.path}")
        if run is not None:
            self.take_over(run)

    @property
    def is_running(self) -> bool:
        """Returns whether the run is still running according to W&B."""
        return self._remote.get("state") == "running"

    def numbers(self) -> dict[str, Any]:
        """Returns W&B's numbers of the run, which the list of runs shows until the tables are here."""
        summary = {} if self._is_complete else self._remote.get("summary") or {}
        step = summary.get("step")
        last = step.get("max") if isinstance(step, dict) else step
        known = {
            "steps": None if last is None else int(last) + 1,
            "reward_last": summary.get("reward/all_groups/mean"),
            "heldout_before": summary.get("heldout_before"),
            "heldout_after": summary.get("heldout_after"),
        }
        return {name: value for name, value in known.items() if isinstance(value, int | float)}

    def take_over(self, run: RemoteRun) -> None:
        """Takes over a run from the list of runs. If there is no record here, writes one."""
        before, self._remote = self._remote, {"state": run.state, "summary": run.summary}
        if self._versions:
            return
        self._files.run_dir.mkdir(parents=True, exist_ok=True)
        info = RunInfo(
            run_id=run.name,
            name=run.display_name,
            status=run.state if run.state in ("running", "finished", "failed") else "stopped",
            started_at=run.created_at,
            attempt=1,
            ended_at=None if run.state == "running" else run.heartbeat_at,
            project=run.project,
            tags=run.tags,
            num_steps=run.config.get("number_of_steps"),
        )
        if not self._files.config.exists():
            replace_file(self._files.config, yaml.safe_dump(run.config, sort_keys=False).encode())
        if read_run_json(self._files.run_dir) != info:
            write_run_json(self._files.run_dir, info)
        if run.state == "running":
            replace_json(self._files.heartbeat, {"time": time.time()})
        if self._remote != before:
            self._write_kept()

    def open(self) -> None:
        """Completes the copy in a thread and keeps it up to date. Returns at once."""
        with self._lock:
            self._asked_at = time.monotonic()
            if self._thread is not None and self._thread.is_alive():
                return
            if self._is_complete and not self._may_change():
                return
            self._thread = threading.Thread(target=self._follow, name="telescope-wandb-copy", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread after its current downloads."""
        self._closing.set()

    def _may_change(self) -> bool:
        return self.is_running or status_now(self._files.run_dir, read_run_json(self._files.run_dir)) == "live"

    # The methods below run in the copy's own thread.

    def _follow(self) -> None:
        while True:
            try:
                with _writing(self._files.run_dir):
                    self._sync()
            except UserError as error:
                # A copy that was complete once can still be read.
                phase: Phase = "synced" if self._is_complete else "failed"
                self.state = RemoteCopy(phase, self.state.source, message=str(error))
            is_idle = time.monotonic() - self._asked_at > IDLE_SECONDS
            is_done = self._is_complete and not self._may_change()
            if is_idle or is_done or self.state.phase == "failed" or self._closing.wait(LIVE_SECONDS):
                return

    def _sync(self) -> None:
        files = self._project.files(self._files.run_dir.name)
        if (files is None or MANIFEST not in files) and self.is_running:
            return  # the run has just started
        if files is None or MANIFEST not in files:
            raise WandbError(
                "This run has no record on W&B: wandb_upload_record was false, or it was offline and is not uploaded "
                "(`wandb sync`)."
            )
        staging = self._files.run_dir / f".download-{os.getpid()}"
        try:
            if self._manifest is None or self._manifest[0] != files[MANIFEST].version:
                self._manifest = (files[MANIFEST].version, self._project.read_manifest(files, staging))
            sizes = self._manifest[1]
            there = {name: file for name in sizes if (file := files.get(f"{FOLDER}/{name}")) is not None}
            wanted = {
                name: file
                for name, file in there.items()
                if self._versions.get(name) != file.version or not (self._files.run_dir / name).is_file()
            }
            if wanted:
                self._download_all(wanted, staging)
            if self._closing.is_set():
                return
            num_missing = len(sizes) - len(there)
            if num_missing == 0:
                for name in self._versions.keys() - sizes.keys():  # the run's record no longer has it
                    (self._files.run_dir / name).unlink(missing_ok=True)
                    del self._versions[name]
                self._is_complete = True
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            self._write_kept()
        message = f"{num_missing} of its {len(sizes)} files are not on W&B yet." if num_missing else None
        self.state = RemoteCopy("synced", self.state.source, message=message)

    def _download_all(self, wanted: dict[str, RemoteFile], staging: Path) -> None:
        """Downloads files, small tables first, and the files of one table in the order of their rows."""
        total = sum(file.size for file in wanted.values())
        if not self._is_complete or total > SHOWN_BYTES:
            self.state = RemoteCopy("syncing", self.state.source, 0, total)
        tables: dict[PurePosixPath, list[str]] = defaultdict(list)
        for name in sorted(wanted):
            tables[PurePosixPath(name).parent].append(name)
        ordered = sorted(tables.values(), key=lambda names: sum(wanted[name].size for name in names))
        with ThreadPoolExecutor(NUM_DOWNLOADS, thread_name_prefix="telescope-wandb-download") as pool:
            waiting = [pool.submit(self._download, names, wanted, staging) for names in ordered]
            for each in waiting:
                each.result()

    def _download(self, names: Iterable[str], wanted: dict[str, RemoteFile], staging: Path) -> None:
        for name in names:
            if self._closing.is_set():
                return
            path = self._project.download(wanted[name], staging)
            target = self._files.run_dir / name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
            with self._lock:
                self._versions[name] = wanted[name].version
                if self.state.phase == "syncing":
                    self.state = replace(self.state, done_bytes=self.state.done_bytes + wanted[name].size)

    def _write_kept(self) -> None:
        kept = {"is_complete": self._is_complete, "remote": self._remote, "versions": self._versions}
        replace_json(self._files.run_dir / STATE_NAME, kept)
