"""Which files of a record trackers copy, and when."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from telescope.record.code_snapshot import SECRETS
from telescope.record.files import FileState, record_files

BYTES_PER_SECOND = 2**18
"""Rate at which a growing file is sent again: one of 10 MB every 40 seconds."""

PATTERNS = {
    "code": ("code/*",),
    "logs": ("tables/logs/*",),
    "logs_detailed": ("logs/driver.log", "logs/environment*.log"),
    "logs_stdout": ("logs/trainer-*.log", "logs/inference-*.log"),
}
"""Files of each kind that a config can leave out. Other log files are never copied; everything else is `record`."""


def kind_of(name: str) -> str | None:
    """Returns the kind of upload that a file belongs to. None: it is never copied."""
    if any(fnmatch(part, pattern) for part in Path(name).parts for pattern in SECRETS):
        return None
    found = next((kind for kind, names in PATTERNS.items() if any(fnmatch(name, each) for each in names)), None)
    return found or (None if name.startswith("logs/") else "record")


@dataclass
class _Sent:
    state: FileState
    time: float


class ChangedFiles:
    """Chooses which files of a run are copied, and when.

    unchanged         never again: most files of a record never change
    new               at once
    changed, large    at most `BYTES_PER_SECOND` of one file, so that a growing one is not sent over and over
    """

    def __init__(self, run_dir: str | Path, kinds: Collection[str], interval: float) -> None:
        self._run_dir = run_dir
        self._kinds = kinds
        self._interval = interval
        self._sent: dict[str, _Sent] = {}

    def due(self, now: float, *, last: bool = False) -> tuple[list[str], dict[str, int]]:
        """Returns changed files in order (`last`: also before their time), and the sizes of all wanted files."""
        names = []
        found = {name: state for name, state in record_files(self._run_dir).items() if kind_of(name) in self._kinds}
        for name, state in sorted(found.items()):
            sent = self._sent.get(name)
            if sent is not None:
                wait = max(self._interval, state.size / BYTES_PER_SECOND)
                if state == sent.state or (now - sent.time < wait and not last):
                    continue
            self._sent[name] = _Sent(state, now)
            names.append(name)
        return names, {name: state.size for name, state in found.items()}
