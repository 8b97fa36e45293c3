"""Finds the runs that the server shows, and reports folders that cannot be read.

Owns ids, the cache of listed runs, the choice of runs that stay open, and the fields of runs that a list shows
(`config.learning_rate`, `last.entropy`, `eval.math500`). Runs are found only below the roots, because an id is looked
up and never becomes a path.

Invariant: listing reads only small files and two columns, reads them again only if they have changed, and opens no
database, so that a folder may contain hundreds of runs.
"""

import hashlib
import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml

from telescope.dashboard.remote import RunCopy, WandbRuns
from telescope.dashboard.store import NotFoundError, RunStore
from telescope.errors import UserError
from telescope.health.rules import WINDOW
from telescope.record.reader import Run, RunSummary, eval_names, find_runs, superseded
from telescope.utils.text import listed

SEARCH_SECONDS = 5.0
"""How long a list of the folders is used before the roots are searched again."""

SEPARATOR = "~"
"""Replaces the slash in ids, so that an id is one segment of an address."""

MAX_OPENED = 8
"""Number of runs whose tables stay in memory."""

IDLE_SECONDS = 60.0
"""A run used within this time stays open, because a request may still be reading it."""

MOST_NAMED = 5
"""Number of unreadable files that the list of runs names for each run. The run's own pages name all."""

LINE_POINTS = 40
"""Points of the small reward curve in the list of runs."""


CONFIG, LAST, EVAL = "config.", "last.", "eval."

BOOKKEEPING = frozenset(
    {
        *("run_dir", "wandb_project", "wandb_run_name", "wandb_tags", "resume_from_checkpoint", "resume_force"),
        *("inference_base_port", "otlp_receiver_port"),
    }
)
"""Settings that name or place a run but do not change its behavior."""

MOST_EXAMPLES = 4
"""Example values of a field in the choice of columns."""


@dataclass(frozen=True)
class Listing:
    """A run in the list of runs. `rewards` are mean rewards of at most `LINE_POINTS` ranges of steps.

    `heldout` and `metrics` are the result of `heldout_of`.
    """

    run: Run
    summary: RunSummary
    config: dict[str, Any]
    rewards: list[float | None]
    heldout: dict[int, float]
    metrics: dict[str, str]
    experiment: str
    config_problem: str | None

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Returns all fields of the run, see `values_of`."""
        return values_of(self.run, self.config)


class Registry:
    """Finds runs, and copies of runs on W&B. Each of `roots` is a run or a folder of runs, or becomes one later."""

    def __init__(self, roots: Sequence[Path], remotes: Sequence[WandbRuns] = ()) -> None:
        self.remotes = remotes
        self._folders = [root.resolve() for root in roots]
        self._expected = {folder for folder in self._folders if not folder.exists()}
        """Folders that the first run makes."""
        self._lock = threading.Lock()
        self._stores: dict[str, RunStore] = {}
        self._searched = -SEARCH_SECONDS
        self._problems: dict[Path, str] = {}
        self._listings: dict[str, tuple[object, Listing]] = {}

    @property
    def roots(self) -> list[Path]:
        """The folders of runs and of copies."""
        return [*self._folders, *(remote.root for remote in list(self.remotes))]

    def stores(self) -> dict[str, RunStore]:
        """Returns the runs by id. Searches the roots again if the last search is older than `SEARCH_SECONDS`."""
        with self._lock:
            if time.monotonic() - self._searched >= SEARCH_SECONDS:
                self._search()
                self._searched = time.monotonic()
            return self._stores

    def store(self, run_id: str) -> RunStore:
        """Returns a run that a page shows, and starts to complete it if it is a copy. Raises `NotFoundError`."""
        found = self.find(run_id)
        run_dir = found.run.files.run_dir
        if (copy := self.copy_in(run_dir)) is not None:
            copy.open()
        elif not run_dir.is_dir():
            raise NotFoundError(f"Run {run_id!r} was removed or moved: {str(run_dir)!r} is gone.")
        return found

    def copy_in(self, run_dir: Path) -> RunCopy | None:
        """Returns the copy in a folder, or None if the run is no copy."""
        copies = (remote.copy_in(run_dir) for remote in list(self.remotes))
        return next((copy for copy in copies if copy is not None), None)

    def find(self, run_id: str) -> RunStore:
        """Returns a run as far as it is on this machine. Raises `NotFoundError`."""
        # A search replaces the dictionary, so a request for a known run does not wait for a search.
        found = self._stores.get(run_id) or self.stores().get(run_id)
        if found is None:
            raise NotFoundError(f"There is no run {run_id!r} here. The page of runs lists them.")
        # Including this run, `MAX_OPENED` runs stay open. The least recently used ones are closed.
        opened = [store for store in list(self._stores.values()) if store.is_open and store is not found]
        opened.sort(key=lambda store: store.used_at, reverse=True)
        for store in opened[MAX_OPENED - 1 :]:
            if time.monotonic() - store.used_at > IDLE_SECONDS:
                store.close()
        return found

    @property
    def problems(self) -> list[dict[str, str]]:
        """Folders that could not be read, with the reasons."""
        with self._lock:
            found = dict(self._problems)
            runs = [store.run for store in self._stores.values()]
        for run in runs:
            if names := [path.as_posix() for path in run.unreadable]:
                found.setdefault(run.files.run_dir, f"These files cannot be read: {listed(names, MOST_NAMED)}")
        remote = {f"W&B {each.project.path}": each.problem for each in list(self.remotes) if each.problem}
        problems = remote | {str(path): problem for path, problem in found.items()}
        return [{"path": path, "problem": problem} for path, problem in problems.items()]

    def listings(self) -> list[tuple[str, Listing]]:
        """Returns the runs, newest first."""
        rows = []
        for run_id, store in self.stores().items():
            try:
                listing = self._listing(run_id, store.run)
                rows.append((run_id, listing))
                problem = listing.config_problem
                if store.run.info is None and store.run.files.run_json.exists():
                    problem = "run.json cannot be read, so the status is unknown"
                if problem is not None:
                    with self._lock:
                        self._problems[store.run.files.run_dir] = problem
            except (OSError, UserError, ValueError) as error:
                with self._lock:
                    self._problems[store.run.files.run_dir] = str(error)
        return sorted(rows, key=lambda row: row[1].summary.started_at or 0.0, reverse=True)

    def listing(self, run_id: str) -> Listing:
        """Returns one run. Raises `NotFoundError`."""
        return self._listing(run_id, self.find(run_id).run)

    def _listing(self, run_id: str, run: Run) -> Listing:
        """Reads a run unless its files are unchanged. The files of a live run change with each heartbeat."""
        files = run.files
        tables = (files.table("steps"), files.table("evals"))
        state = tuple(map(_modified, (files.config, files.run_json, files.summary, files.heartbeat, *tables)))
        known = self._listings.get(run_id)
        if known and known[0] == state and (known[1].summary.status != "live" or run.status == "live"):
            return known[1]
        config, _ = config_of(run)
        steps = run.table("steps", columns=["step", "reward_mean"]).sort_by("step")
        rest = (config, _line(steps["reward_mean"]), *heldout_of(run, config), experiment(config), run.config_problem)
        listing = Listing(run, run.summary(steps), *rest)
        self._listings[run_id] = (state, listing)
        return listing

    def _search(self) -> None:
        problems: dict[Path, str] = {}
        known = {store.run.files.run_dir.resolve(): store for store in self._stores.values()}
        found: dict[str, RunStore] = {}
        seen: set[Path] = set()
        here: set[str] = set()  # ids of runs in the folders, whose copies are not listed
        for root in self.roots:
            if root in self._expected and not root.exists():
                continue
            try:
                runs = find_runs(root)
            except UserError as error:
                problems[root] = str(error)
                continue
            for run in runs:
                path = run.files.run_dir.resolve()
                if path in seen:
                    continue
                seen.add(path)
                if root not in self._folders and path.name in here:
                    continue
                here.add((self.remotes and run.info and run.info.run_id) or "")
                name = base = run.label.replace("/", SEPARATOR)
                number = 2
                while name in found:
                    name, number = f"{base}{SEPARATOR}{number}", number + 1
                store = known.get(path)
                if store is not None and store.run.has_repaired_files:
                    store.close()
                    self._listings.pop(name, None)
                    store = None
                found[name] = store or RunStore(run)
        self._stores, self._problems = found, problems


def config_of(run: Run) -> tuple[dict[str, Any], list[str]]:
    """Returns the resolved config and the names of fields that the user set. Empty if it cannot be read."""
    rows, _ = run.rows_since("runs", 0, ["config_json"])
    recorded = json_object(next((text for text in reversed(rows["config_json"].to_pylist()) if text), None))
    if isinstance(recorded.get("values"), dict):
        return recorded["values"], list(recorded.get("user_set") or [])
    try:
        value = yaml.safe_load(run.files.config.read_bytes())
        # As the record has it: the file may be of another program, with dates, sets and names that are numbers.
        value = json.loads(json.dumps(value, skipkeys=True, default=str))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}, []
    return value if isinstance(value, dict) else {}, []


def json_object(text: str | None) -> dict[str, Any]:
    """Parses a JSON object. Returns an empty dictionary for any other text."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _line(values: pa.ChunkedArray) -> list[float | None]:
    """Returns the means of at most `LINE_POINTS` parts of a column, None for parts without finite values."""
    whole = values.to_numpy(zero_copy_only=False).astype(float)
    parts = np.array_split(whole, min(LINE_POINTS, len(whole))) if len(whole) else []
    means = [part[np.isfinite(part)].mean() if np.isfinite(part).any() else None for part in parts]
    return [None if value is None else float(value) for value in means]


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def values_of(run: Run, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all fields of a run: settings, means of the last 10 steps, and the newest accuracy of each eval."""
    fields = {CONFIG + name: value for name, value in config.items()}
    end, count = run.num_rows("steps"), 3 * WINDOW
    while True:
        steps, _ = run.rows_since("steps", max(0, end - count), ["attempt", "step", "metrics"])
        if steps.num_rows:
            steps = steps.filter(pc.invert(superseded(steps, run.cutoffs())))
        if steps.num_rows >= WINDOW or count >= end:
            break
        count *= 4  # a later attempt superseded many of the newest rows
    rows = [dict(row) for row in steps["metrics"].to_pylist()[-WINDOW:] if row]
    for name in sorted({name for row in rows for name in row}):
        values = [value for value in (row.get(name) for row in rows) if value is not None and math.isfinite(value)]
        if values:
            fields[LAST + name] = math.fsum(value / len(values) for value in values)  # a sum may be infinite
    newest: dict[str, int] = {}
    columns = ["attempt", "version", "source", "name", "number", "accuracy"]
    rows = run.table("evals", columns=columns).to_pylist()
    named = eval_names(config, rows)
    for row in rows:
        name, version = named(row["name"], row["number"]), row["version"] or 0
        if name and row["accuracy"] is not None and version >= newest.get(name, version):
            newest[name], fields[EVAL + name] = version, row["accuracy"]
    return fields


def heldout_of(run: Run, config: Mapping[str, Any]) -> tuple[dict[int, float], dict[str, str]]:
    """Returns results by the number of finished steps, for the run's first held-out eval or else its first eval.

    The second result has the metric of `heldout` and of each field `eval.NAME`, where it is not `correct`.
    """
    names = ["attempt", "step", "source", "number", "name", "held_out", "version", "accuracy", "metric"]
    rows, _ = run.rows_since("evals", 0, names)
    every = rows.to_pylist()
    named = eval_names(config, every)
    if rows.num_rows:
        rows = rows.filter(pc.invert(superseded(rows, run.cutoffs())))
    own = [row for row in rows.to_pylist() if row["accuracy"] is not None and row["source"] != "standalone"]
    own.sort(key=lambda row: (not row["held_out"], row["number"] or 0))  # stable, so it keeps the order of attempts
    first = [own[0][name] for name in ("number", "name")] if own else []
    metrics = {EVAL + named(row["name"], row["number"]): row["metric"] for row in every if row["metric"]}
    metrics["heldout"] = own[0]["metric"] if own else None
    curve = {row["version"] or 0: row["accuracy"] for row in own if [row["number"], row["name"]] == first}
    return curve, {name: metric for name, metric in metrics.items() if metric not in (None, "correct")}


def known_fields(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the fields of all runs, with the numbers of runs and of distinct values, and examples."""
    found: dict[str, dict[str, Any]] = {}
    numbers: dict[str, int] = {}
    for fields in runs:
        for name, value in fields.items():
            found.setdefault(name, {}).setdefault(json.dumps(value, sort_keys=True, default=str), value)
            numbers[name] = numbers.get(name, 0) + 1
    return [
        {"name": name, "runs": numbers[name], "values": len(values), "examples": list(values.values())[:MOST_EXAMPLES]}
        for name, values in sorted(found.items())
    ]


def experiment(config: Mapping[str, Any]) -> str:
    """Returns a text that is equal for runs whose settings differ only in the seed and bookkeeping."""
    kept = {name: value for name, value in config.items() if name not in ("seed", *BOOKKEEPING)}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
