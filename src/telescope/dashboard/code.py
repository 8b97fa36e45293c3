"""Reads the code that a run started with: files, uncommitted changes, and the difference to another run.

Reads `code/attempt-<n>.tar.gz` (`record.code_snapshot`). A file is looked up by its path inside the archive, and
nothing is unpacked to disk. The newest archives stay in memory.
"""

import json
import re
import tarfile
import zlib
from dataclasses import dataclass
from difflib import unified_diff
from functools import lru_cache
from pathlib import Path
from typing import Any

from telescope.dashboard.api import Integer
from telescope.dashboard.store import NotFoundError
from telescope.errors import UserError
from telescope.record.reader import Run

NUM_ARCHIVES = 4
"""Archives that stay in memory: two for compared runs, and two earlier ones."""

MAX_TOTAL_BYTES = 128 * 2**20
"""Twice the limit of a snapshot. No run writes a larger archive."""

MAX_FILE_BYTES = 2 * 2**20
"""Largest text in a response."""

MAX_DIFF_LINES = 10_000
"""Lines of both files up to which they are compared, because the search for equal lines is quadratic."""

MAX_ANSWER_BYTES = 4 * 2**20
"""Size of the diffs in one response. Later files are listed without a diff and can be requested one by one."""

GIT, CHANGES = "git.json", "changes.diff"

NOTHING: dict[str, Any] = {"attempts": [], "attempt": None, "git": {}, "left_out": [], "changes": "", "files": []}
"""The response for a run without code."""

_NAME = re.compile(r"attempt-(\d+)\.tar\.gz")


@dataclass(frozen=True)
class Snapshot:
    """The files of an archive by path, and its description."""

    attempt: int
    git: dict[str, Any]
    changes: str
    files: dict[str, bytes]


def snapshot_of(run: Run, attempt: int | None = None) -> Snapshot:
    """Returns the code of an attempt, by default of the newest attempt with code. Raises `NotFoundError`."""
    found = archives(run)
    chosen = max(found, default=0) if attempt is None else attempt
    if chosen not in found:
        which = f"attempt {attempt}" if attempt is not None else "this run"
        raise NotFoundError(f"The record has no code of {which}.")
    path = found[chosen]
    try:
        return _read(path, chosen, path.stat().st_mtime_ns)
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
        raise UserError(f"{path.name} cannot be read: {error}") from error


def archives(run: Run) -> dict[int, Path]:
    """Returns the archives by attempt."""
    folder = run.files.code
    named = [(match, path) for path in folder.glob("attempt-*.tar.gz") if (match := _NAME.fullmatch(path.name))]
    return {int(match[1]): path for match, path in named}


def overview(run: Run, attempt: Integer | None = None) -> dict[str, Any]:
    """Returns git state, uncommitted changes and the list of files. Without any code, `attempt` is null."""
    found = sorted(archives(run))
    if not found and attempt is None:
        return NOTHING
    snapshot = snapshot_of(run, attempt)
    git = {name: value for name, value in snapshot.git.items() if name != "left_out"}
    return {
        "attempts": found,
        "attempt": snapshot.attempt,
        "git": git,
        "left_out": list(snapshot.git.get("left_out") or []),
        "changes": snapshot.changes,
        "files": [{"path": path, "size": len(content)} for path, content in sorted(snapshot.files.items())],
    }


def file(run: Run, path: str, attempt: Integer | None = None) -> dict[str, Any]:
    """Returns the text of a file, or null for a binary or large file. Raises `NotFoundError`."""
    snapshot = snapshot_of(run, attempt)
    if path not in snapshot.files:
        raise NotFoundError(f"The code of attempt {snapshot.attempt} has no file {path!r}.")
    content = snapshot.files[path]
    return {"path": path, "size": len(content), "text": _text(content)}


def difference(old: Run, new: Run, path: str = "") -> dict[str, Any]:
    """Returns the files that differ between the newest code of two runs, with diffs. `path` selects one file."""
    before, after = snapshot_of(old).files, snapshot_of(new).files
    paths = sorted(before.keys() | after.keys())
    changed = [name for name in paths if before.get(name) != after.get(name)]
    room = MAX_ANSWER_BYTES
    rows = []
    for name in changed:
        if path in ("", name):
            rows.append(_compared(name, before.get(name), after.get(name), room))
            room -= len(rows[-1]["diff"] or "")
    return {"files": rows, "num_equal": len(paths) - len(changed)}


def _compared(path: str, before: bytes | None, after: bytes | None, room: int) -> dict[str, Any]:
    status = "added" if before is None else "removed" if after is None else "changed"
    old, new = _text(before or b""), _text(after or b"")
    row: dict[str, Any] = {"path": path, "status": status, "added": None, "removed": None, "diff": None}
    if old is None or new is None or room <= 0:
        return row
    lines = old.splitlines(), new.splitlines()
    if min(map(len, lines)) and sum(map(len, lines)) > MAX_DIFF_LINES:
        return row
    diff = list(unified_diff(*lines, path, path, lineterm=""))[2:]
    added = sum(line.startswith("+") for line in diff)
    removed = sum(line.startswith("-") for line in diff)
    return {**row, "added": added, "removed": removed, "diff": "\n".join(diff)}


def _text(content: bytes) -> str | None:
    """Returns a text, or None for a binary or large file."""
    if len(content) > MAX_FILE_BYTES or b"\0" in content:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


@lru_cache(NUM_ARCHIVES)
def _read(path: Path, attempt: int, _modified: int) -> Snapshot:
    """Reads an archive. Raises `ValueError` if it is too large."""
    files: dict[str, bytes] = {}
    total = 0
    with tarfile.open(path, "r|gz") as archive:
        for member in archive:
            if not member.isreg():
                continue
            total += member.size
            if total > MAX_TOTAL_BYTES:
                raise ValueError(f"it holds more than {MAX_TOTAL_BYTES // 2**20} MiB")
            content = archive.extractfile(member)
            assert content is not None, "a regular file has content"
            files[member.name] = content.read()
    git = json.loads(files.pop(GIT, b"{}"))
    changes = files.pop(CHANGES, b"").decode("utf-8", "replace")
    return Snapshot(attempt, git if isinstance(git, dict) else {}, changes, files)
