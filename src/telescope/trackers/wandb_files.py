"""Uploads the files of a record to a W&B run, and its code as an artifact.

The files lie below `telescope/` among the files of the W&B run, in the layout of a run directory; `files.json` there
names the current ones. Each is linked or copied into the folder of the W&B run, from where the client uploads it at
once, or `wandb sync` later.

Invariants: a file that has not changed is uploaded once, also over several attempts. What the record has replaced (the
tails of a table, by a block) is removed, on the server some minutes later, when no reader needs it anymore.
"""

import contextlib
import os
import shutil
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from telescope.record.code_snapshot import SECRETS
from telescope.record.files import FileState, record_files, replace_json

FOLDER = "telescope"
"""Folder of the record among the files of a W&B run. W&B itself writes a `config.yaml` beside it."""

MANIFEST = f"{FOLDER}/files.json"
"""Names and sizes of the record's current files: a W&B run keeps files that the record has replaced."""

PATTERNS = {
    "code": ("code/*",),
    "logs": ("tables/logs/*",),
    "logs_detailed": ("logs/driver.log", "logs/rollout-*.log"),
    "logs_stdout": ("logs/trainer-*.log", "logs/inference-*.log"),
}
"""Files of each kind that a config can leave out. Other log files are never copied; everything else is `record`."""

BYTES_PER_SECOND = 2**18
"""Rate at which a growing file is sent again: one of 10 MB every 40 seconds."""

NEVER_CHANGED = (".parquet", ".tar.gz")
"""Endings of files that are never written again under their name."""

API_SECONDS = 30
"""Deadline of a question to the server."""

REPLACED_SECONDS = 600.0
"""How long a replaced file stays on the server: longer than its upload, and than a copy that is being made of it."""

NUM_DELETIONS = 8
"""Requests at once; W&B deletes one file per request."""

NAMES_PER_QUESTION = 100
"""Files that are asked for by name at once."""


def kind_of(name: str) -> str | None:
    """Returns the kind of upload that a file belongs to, or None if it is never copied."""
    if any(fnmatch(part, pattern) for part in Path(name).parts for pattern in SECRETS):
        return None
    found = next((kind for kind, names in PATTERNS.items() if any(fnmatch(name, each) for each in names)), None)
    return found or (None if name.startswith("logs/") else "record")


class ChangedFiles:
    """Chooses which files of a run are copied: new ones at once, growing ones at `BYTES_PER_SECOND` at most."""

    def __init__(self, run_dir: str | Path, kinds: Collection[str], interval: float) -> None:
        self._run_dir = run_dir
        self._kinds = kinds
        self._interval = interval
        self._sent: dict[str, tuple[FileState, float]] = {}

    def due(self, now: float, *, last: bool = False) -> tuple[list[str], dict[str, int]]:
        """Returns changed files in order (`last`: also before their time), and the sizes of all wanted files."""
        found = {name: state for name, state in record_files(self._run_dir).items() if kind_of(name) in self._kinds}
        names = []
        for name, state in sorted(found.items()):
            before, time_sent = self._sent.get(name, (None, now))
            wait = max(self._interval, state.size / BYTES_PER_SECOND)
            if before is None or (state != before and (last or now - time_sent >= wait)):
                self._sent[name] = state, now
                names.append(name)
        return names, {name: state.size for name, state in found.items()}


class RecordUpload:
    """Copies the record in `run_dir` to `run`, a run of W&B's client.

    Files of other kinds than `kinds`, which an earlier attempt has uploaded, stay.
    """

    def __init__(self, run: Any, run_dir: str, kinds: Collection[str], interval: float) -> None:
        self._run = run
        self._kinds = kinds
        self._run_dir = Path(run_dir)
        self._folder = Path(run.dir)
        self._changed = ChangedFiles(run_dir, kinds, interval)
        self._there: dict[str, int] | None = None
        """Sizes of uploaded files by name."""
        self._replaced: dict[str, float] = {}
        """Uploaded files that the record no longer has, and when that was noticed (`time.monotonic()`)."""

    def upload(self, last: bool) -> None:
        """Uploads changed files of the record, and the list of all."""
        now = time.monotonic()
        names, sizes = self._changed.due(now, last=last)
        if not names:
            return
        there = self._there = self._uploaded() if self._there is None else self._there
        sizes |= {name: size for name, size in there.items() if kind_of(name) not in self._kinds}
        saved: dict[str, Path] = {}
        for name in names:
            if name.endswith(NEVER_CHANGED) and there.get(name) == sizes[name]:
                continue
            target = self._folder / FOLDER / name
            with contextlib.suppress(FileNotFoundError):  # replaced by the recorder; its successor comes next
                place(self._run_dir / name, target)
                saved[name] = target
                there[name] = sizes[name]
        replace_json(self._folder / MANIFEST, {"format": 1, "files": sizes}, indent=None)
        for target in (*saved.values(), self._folder / MANIFEST):
            self._run.save(str(target), base_path=str(self._folder), policy="now")
        for name in saved:
            if name.startswith("code/"):
                self._log_code(self._run_dir / name)
        self._replaced |= dict.fromkeys(there.keys() - sizes.keys() - self._replaced.keys(), now)
        stays = 0.0 if self._run.offline else REPLACED_SECONDS
        self._remove([name for name, since in self._replaced.items() if now - since >= stays])

    def finish(self) -> None:
        """Removes what is replaced. Call it when all uploads are done."""
        self._remove(list(self._replaced))

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self._folder / FOLDER / name).unlink(missing_ok=True)
            self._replaced.pop(name)
            if self._there is not None:
                self._there.pop(name, None)
        try:
            for first in range(0, 0 if self._run.offline else len(names), NAMES_PER_QUESTION):
                some = [f"{FOLDER}/{name}" for name in names[first : first + NAMES_PER_QUESTION]]
                with ThreadPoolExecutor(NUM_DELETIONS) as pool:
                    files = list(self._on_server().files(names=some, per_page=NAMES_PER_QUESTION))
                    list(pool.map(lambda file: file.delete(), files))
        except Exception:  # stale files only cost space
            traceback.print_exc(file=sys.stderr)

    def _uploaded(self) -> dict[str, int]:
        """Returns the sizes of files that earlier attempts have uploaded. Empty without any, or offline."""
        files = self._on_server().files(per_page=1000) if self._run.resumed else ()
        found = {file.name: file.size for file in files if file.name.startswith(f"{FOLDER}/") and file.name != MANIFEST}
        return {name.removeprefix(f"{FOLDER}/"): size for name, size in found.items()}

    def _on_server(self) -> Any:
        import wandb

        return wandb.Api(timeout=API_SECONDS).run(self._run.path)

    def _log_code(self, archive: Path) -> None:
        """Logs a code snapshot as W&B's artifact of sources. The page Code of W&B shows it."""
        with tempfile.TemporaryDirectory(prefix="telescope-code-") as folder:
            with tarfile.open(archive) as opened:
                opened.extractall(folder, filter="data")
            self._run.log_code(folder, name=f"source-{self._run.id}", include_fn=lambda path: True)


def place(source: Path, target: Path) -> None:
    """Links or copies a file to another name. Raises `FileNotFoundError`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}")
    temporary.unlink(missing_ok=True)
    try:
        if not source.name.endswith(NEVER_CHANGED):  # it may grow in place
            raise OSError
        os.link(source, temporary)
    except FileNotFoundError:
        raise
    except OSError:  # also a file system without links
        shutil.copyfile(source, temporary)
    os.replace(temporary, target)
