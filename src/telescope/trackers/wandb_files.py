"""Uploads the files of a record to a W&B run, and its code as an artifact.

Among the files of the W&B run, they are below `telescope/` in the layout of a run directory; `files.json` there names
the current files. Each file is linked or copied into the folder of the W&B run. From there the client uploads it at
once, or `wandb sync` does later.

Invariants: an unchanged file is uploaded once, also over several attempts. Files that the record has replaced (tails
that became a block) are removed, on the server some minutes later, when no reader needs them anymore.
"""

import contextlib
import os
import shutil
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from telescope.record.code_snapshot import SECRETS
from telescope.record.files import FileState, record_files, replace_json

FOLDER = "telescope"
"""Folder of the record among the files of a W&B run. W&B itself writes a `config.yaml` beside it."""

MANIFEST = f"{FOLDER}/files.json"
"""Names and sizes of the record's current files. A W&B run also keeps files that the record has replaced."""

PATTERNS = {
    "code": ("code/*",),
    "logs": ("tables/logs/*",),
    "logs_detailed": ("logs/driver.log", "logs/rollout-*.log"),
    "logs_stdout": ("logs/trainer-*.log", "logs/inference-*.log"),
}
"""Files of each kind that a config can leave out. Other log files are never copied; all other files are `record`."""

BYTES_PER_SECOND = 2**18
"""Rate at which a growing file is sent again: a file of 10 MB every 40 seconds."""

NEVER_CHANGED = (".parquet", ".tar.gz")
"""Suffixes of files that are never written again under the same name."""

API_SECONDS = 30
"""Deadline of a request to the server, in seconds."""

REPLACED_SECONDS = 600.0
"""How long a replaced file stays on the server: longer than its upload, or a copy of it, takes."""

NUM_DELETIONS = 8
"""Number of concurrent requests. W&B deletes one file per request."""

NAMES_PER_QUESTION = 100
"""Number of files per request by name."""


def kind_of(name: str) -> str | None:
    """Returns the upload kind of a file, or None if it is never copied."""
    if any(fnmatch(part, pattern) for part in Path(name).parts for pattern in SECRETS):
        return None
    found = next((kind for kind, names in PATTERNS.items() if any(fnmatch(name, each) for each in names)), None)
    return found or (None if name.startswith("logs/") else "record")


class ChangedFiles:
    """Selects the files to copy: new files at once, growing files at `BYTES_PER_SECOND` at most."""

    def __init__(self, run_dir: str | Path, kinds: Collection[str], interval: float) -> None:
        self._run_dir = run_dir
        self._kinds = kinds
        self._interval = interval
        self._sent: dict[str, tuple[FileState, float]] = {}

    def due(self, now: float, *, last: bool = False) -> tuple[list[str], dict[str, int]]:
        """Returns the changed files to copy in order (all with `last`), and the sizes of all wanted files."""
        found = {name: state for name, state in record_files(self._run_dir).items() if kind_of(name) in self._kinds}
        names = []
        for name, state in sorted(found.items()):
            before, time_sent = self._sent.get(name, (None, now))
            wait = max(self._interval, state.size / BYTES_PER_SECOND)
            if before is None or (state != before and (last or now - time_sent >= wait)):
                self._sent[name] = state, now
                names.append(name)
        return names, {name: state.size for name, state in found.items()}

    def not_sent(self, names: Iterable[str]) -> None:
        """Makes files due again whose upload failed."""
        for name in names:
            del self._sent[name]


class RecordUpload:
    """Copies the record in `run_dir` to `run`, a run of W&B's client.

    Keeps files that an earlier attempt has uploaded, also if their kind is not in `kinds`.
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
        """Uploads changed files of the record, and the list of all files."""
        now = time.monotonic()
        names, sizes = self._changed.due(now, last=last)
        if not names:
            return
        try:
            there = self._there = self._uploaded() if self._there is None else self._there
            sizes |= {name: size for name, size in there.items() if kind_of(name) not in self._kinds}
            self._save(names, sizes, there)
        except Exception:
            self._changed.not_sent(names)
            raise
        self._replaced |= dict.fromkeys(there.keys() - sizes.keys() - self._replaced.keys(), now)
        stays = 0.0 if self._run.offline else REPLACED_SECONDS
        self._remove([name for name, since in self._replaced.items() if now - since >= stays])

    def _save(self, names: Sequence[str], sizes: dict[str, int], there: dict[str, int]) -> None:
        """Uploads `names` and the list of all files, and adds `names` to the uploaded files `there`."""
        saved: dict[str, Path] = {}
        for name in names:
            if name.endswith(NEVER_CHANGED) and there.get(name) == sizes[name]:
                continue
            target = self._folder / FOLDER / name
            with contextlib.suppress(FileNotFoundError):  # replaced by the recorder; the new file comes next
                place(self._run_dir / name, target)
                saved[name] = target
        replace_json(self._folder / MANIFEST, {"format": 1, "files": sizes})
        for target in (*saved.values(), self._folder / MANIFEST):
            self._run.save(str(target), base_path=str(self._folder), policy="now")
        there |= {name: sizes[name] for name in saved}
        for name in saved:
            if name.startswith("code/"):  # as W&B's artifact of sources, which W&B shows on its page Code
                with tempfile.TemporaryDirectory(prefix="telescope-code-") as folder:
                    with tarfile.open(self._run_dir / name) as archive:
                        archive.extractall(folder, filter="data")
                    self._run.log_code(folder, name=f"source-{self._run.id}", include_fn=lambda path: True)

    def finish(self) -> None:
        """Removes replaced files. Call it when all uploads are done."""
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
        except Exception:  # stale files only need space
            traceback.print_exc(file=sys.stderr)

    def _uploaded(self) -> dict[str, int]:
        """Returns the sizes of files that earlier attempts have uploaded. Empty if there are none, or offline."""
        files = self._on_server().files(per_page=1000) if self._run.resumed else ()
        found = {file.name: file.size for file in files if file.name.startswith(f"{FOLDER}/") and file.name != MANIFEST}
        return {name.removeprefix(f"{FOLDER}/"): size for name, size in found.items()}

    def _on_server(self) -> Any:
        import wandb

        return wandb.Api(timeout=API_SECONDS).run(self._run.path)


def place(source: Path, target: Path) -> None:
    """Links or copies a file to another path. Raises `FileNotFoundError`."""
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
