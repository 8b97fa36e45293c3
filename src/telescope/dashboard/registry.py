"""The runs that the server shows, by id, and the folders that it could not read.

Owns ids and the cache of summaries. A run is found below the roots only: an id is looked up, never turned into a path.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from telescope.dashboard.store import RunStore
from telescope.errors import UserError
from telescope.record.reader import Run, RunSummary, find_runs, newest_first

SEARCH_SECONDS = 5.0
"""How long a list of the folders is used before the roots are searched again."""

SEPARATOR = "~"
"""Replaces the slash in ids, so that an id is one part of an address."""


class UnknownRunError(Exception):
    """No run has this id."""


class Registry:
    """Finds runs below `roots`, each of which is a run or a folder of runs."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [root.resolve() for root in roots]
        self._lock = threading.RLock()
        self._stores: dict[str, RunStore] = {}
        self._searched = -SEARCH_SECONDS
        self._problems: list[dict[str, str]] = []
        self._summaries: dict[str, tuple[object, RunSummary]] = {}

    def stores(self, *, search: bool = True) -> dict[str, RunStore]:
        """Returns the runs by id. Searches the roots again when the last search is some seconds old."""
        with self._lock:
            if search and time.monotonic() - self._searched >= SEARCH_SECONDS:
                self._search()
                self._searched = time.monotonic()
            return dict(self._stores)

    def store(self, run_id: str) -> RunStore:
        """Returns a run. Raises `UnknownRunError`."""
        found = self.stores(search=False).get(run_id) or self.stores().get(run_id)
        if found is None:
            raise UnknownRunError(run_id)
        return found

    @property
    def problems(self) -> list[dict[str, str]]:
        """Folders that could not be read, and why."""
        unreadable = [
            {
                "path": str(store.run.files.run_dir),
                "problem": f"{store.run.num_unreadable} files of tables cannot be read",
            }
            for store in self._stores.values()
            if store.run.num_unreadable
        ]
        return self._problems + unreadable

    def summaries(self) -> list[tuple[str, RunStore, RunSummary]]:
        """Returns the runs, newest first. The summary of an ended run is kept until its files change."""
        stores = self.stores()
        rows = []
        for run_id, store in stores.items():
            try:
                rows.append((run_id, store, self._summary(run_id, store.run)))
            except (OSError, UserError, ValueError) as error:
                self._problems.append({"path": str(store.run.files.run_dir), "problem": str(error)})
        order = {id(summary): place for place, summary in enumerate(newest_first(row[2] for row in rows))}
        return sorted(rows, key=lambda row: order[id(row[2])])

    def summary(self, run_id: str) -> RunSummary:
        """Returns the summary of one run. Raises `UnknownRunError`."""
        return self._summary(run_id, self.store(run_id).run)

    def _summary(self, run_id: str, run: Run) -> RunSummary:
        files = run.files
        steps = run.segments("steps")
        state = (*map(_modified, (files.run_json, files.summary)), steps[-1].end if steps else 0)
        known = self._summaries.get(run_id)
        if known and known[0] == state and known[1].status != "live":
            return known[1]
        summary = run.summary()
        self._summaries[run_id] = (state, summary)
        return summary

    def _search(self) -> None:
        self._problems = []
        known = {store.run.files.run_dir.resolve(): store for store in self._stores.values()}
        found: dict[str, RunStore] = {}
        for root in self.roots:
            try:
                runs = find_runs(root)
            except UserError as error:
                self._problems.append({"path": str(root), "problem": str(error)})
                continue
            for run in runs:
                path = run.files.run_dir.resolve()
                if any(store.run.files.run_dir.resolve() == path for store in found.values()):
                    continue
                name = base = run.label.replace("/", SEPARATOR)
                number = 2
                while name in found:
                    name, number = f"{base}{SEPARATOR}{number}", number + 1
                found[name] = known.get(path) or RunStore(run)
        self._stores = found


def read_config(run: Run) -> dict[str, Any]:
    """Returns the resolved config of a run, empty if it cannot be read."""
    try:
        value = yaml.safe_load(run.files.config.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
