"""Reads the run directories of live and ended runs, also damaged ones. Needs only pyarrow and duckdb.

Owns the view of one run's tables and the list of runs in a folder. Does not write, lock or keep files open, so a reader
never affects a run. `query` runs SQL over several runs.

Invariants: a read shows a prefix of what was written, each row once, also while the run writes. A later read shows the
same prefix or a longer one. Steps that a later attempt superseded are hidden by default.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from telescope.errors import UserError
from telescope.health.rules import ends_of
from telescope.record.convert import conform, rows_to_table
from telescope.record.files import RunFiles, read_heartbeat, read_json
from telescope.record.run_info import RunInfo, read_run_json, status_now
from telescope.record.table_files import AFTER_ALL_ROWS, BLOCK_NAME, TableFile, list_files
from telescope.record.tables import TABLES, Table
from telescope.utils.text import single_line

if TYPE_CHECKING:
    from telescope.record.query import Result

logger = logging.getLogger(__name__)

READ_ATTEMPTS = 10
"""How often a read starts again because a listed file is damaged, or was compacted before it was opened."""

SEARCH_DEPTH = 3
"""Folder levels below a root that are searched for runs."""

_DAMAGE = (OSError, pa.ArrowException)
"""Errors that pyarrow raises for a damaged file, among others."""

Cutoffs = Mapping[int, int]
"""First superseded step per attempt. Attempts without superseded steps are missing.

Attempt 1 trained steps 1 to 57 and was killed; attempt 2 continued from the checkpoint after step 50, so its first step
is 51. Rows of attempt 1 at step 51 or later are then superseded. They stay on disk, and readers hide them.
"""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One line of `telescope runs`."""

    path: Path
    label: str
    """The path below the root, unique in one listing."""
    run_id: str
    name: str
    status: str
    """`live`, `dead`, `finished`, `stopped`, `failed`, or `unknown` without a readable `run.json`."""
    started_at: float | None
    duration: float | None
    """Seconds from the first start to the end, or to the last heartbeat, without the time between attempts."""
    attempt: int
    steps: int
    num_steps: int | None
    """Configured number of steps, None if unknown."""
    reward_first: float | None
    """Mean reward of all scored samples over the first 10 steps, or over the first half if there are fewer than 20."""
    reward_last: float | None
    """The same over the last steps."""
    heldout_before: float | None
    heldout_after: float | None
    error: str | None
    project: str
    tags: tuple[str, ...]


class Run:
    """One run directory. Opening it is cheap; every call reads the current files.

    Raises `UserError` if the directory contains no run, or if its path is not valid UTF-8.
    """

    def __init__(self, run_dir: str | os.PathLike[str], label: str | None = None) -> None:
        self.files = RunFiles(run_dir)
        self.label = label or self.files.run_dir.resolve().name
        self._unreadable: dict[Path, tuple[int, int] | None] = {}
        try:
            str(self.files.run_dir).encode()
        except UnicodeEncodeError:
            raise UserError(f"The path {str(self.files.run_dir)!r} is not valid UTF-8. Rename the folder.") from None
        if not is_run(self.files.run_dir):
            raise UserError(
                f"{str(self.files.run_dir)!r} is not a run directory: it has neither run.json nor tables/. "
                "`telescope runs --root DIR` lists the runs in DIR."
            )

    @property
    def info(self) -> RunInfo | None:
        """Content of `run.json`, or None if it cannot be read."""
        return read_run_json(self.files.run_dir)

    @property
    def status(self) -> str:
        """Current status, see `RunSummary.status`."""
        return status_now(self.files.run_dir, self.info)

    def table(self, name: str, *, columns: Sequence[str] | None = None, all_attempts: bool = False) -> pa.Table:
        """Returns all rows of a table in the order in which they were written.

        Hides superseded rows unless `all_attempts` is true. For `runs` and `attempts`, returns the newest row per key.
        """
        definition = _definition(name)
        cut = {} if all_attempts else self.cutoffs()
        needed = set(columns or definition.column_names)
        if cut and definition.by_step:
            needed |= {"attempt", "step"}
        if cut and definition.of_sample:
            needed |= {"attempt", "sample_id"}
        if definition.latest_wins:
            needed |= set(definition.key)
        data, _ = self._read(name, 0, [column for column in definition.column_names if column in needed])
        if definition.latest_wins:
            keys = [tuple(row.values()) for row in data.select(list(definition.key)).to_pylist()]
            newest = {key: place for place, key in enumerate(keys)}
            data = data.take(pa.array(sorted(newest.values()), pa.int64()))
        if cut and definition.by_step:
            data = data.filter(pc.invert(superseded(data, cut)))
        elif cut and definition.of_sample:
            samples, _ = self._read("samples", 0, ["attempt", "sample_id", "step"])
            hidden = _sample_key(samples.filter(superseded(samples, cut)))
            data = data.filter(pc.invert(pc.is_in(_sample_key(data), value_set=hidden)))
        return data.select(list(columns)) if columns is not None else data

    def values(self, table: str, column: str, **where: Any) -> frozenset[Any]:
        """Returns the values of a column in rows that match `where`. Empty without a record."""
        rows = self.table(table, columns=[column, *where]).to_pylist()
        return frozenset(row[column] for row in rows if where.items() <= row.items())

    def rows_since(self, name: str, cursor: int, columns: Sequence[str] | None = None) -> tuple[pa.Table, int]:
        """Returns the rows from row `cursor` on, and the next cursor.

        Includes superseded rows. Start with cursor 0. Files before the cursor are not opened, so the cost depends only
        on new rows.
        """
        definition = _definition(name)
        return self._read(name, cursor, list(columns) if columns is not None else list(definition.column_names))

    def in_flight(self) -> pa.Table:
        """Returns the samples that are being generated, with the columns of `samples`. Empty unless the run is live."""
        rows: list[dict[str, Any]] = []
        if self.files.in_flight.exists() and self.status in ("live", "unknown"):
            try:
                value = read_json(self.files.in_flight) or {}
                rows = [
                    {"attempt": value["attempt"], "status": "in_flight", **{str(key): row[key] for key in row}}
                    for row in value["rows"]
                ]
            except (OSError, ValueError, TypeError, KeyError) as error:
                logger.warning("record: %s cannot be read: %s", self.files.in_flight, error)
        return rows_to_table(TABLES["samples"], rows)[0]

    def now(self) -> dict[str, Any] | None:
        """Returns the current activity of a live run: `time`, `phase`, `components`, ... None if it is unknown."""
        return (_read_object(self.files.now) or None) if self.status == "live" else None

    def attempts(self) -> list[dict[str, Any]]:
        """Returns the attempts, oldest first. Maps are dictionaries."""
        rows = self.table("attempts", all_attempts=True).to_pylist(maps_as_pydicts="lossy")
        return sorted(rows, key=lambda row: row["attempt"] or 0)

    def cutoffs(self) -> dict[int, int]:
        """Returns the first superseded step per attempt, see `superseded`."""
        attempts = self.table("attempts", columns=["attempt", "first_step"], all_attempts=True).to_pylist()
        first_steps = {row["attempt"]: row["first_step"] for row in attempts if row["attempt"] is not None}
        if len(first_steps) < 2:
            return {}
        if None in first_steps.values():
            steps, _ = self._read("steps", 0, ["attempt", "step"])
            for attempt, first in first_steps.items():
                if first is None:
                    first_steps[attempt] = pc.min(steps.filter(pc.equal(steps["attempt"], attempt))["step"]).as_py()
        return cutoffs(first_steps)

    def sql(self, query: str) -> Result:
        """Runs a read-only DuckDB query over this run's tables, see `query.execute`."""
        from telescope.record.query import execute

        return execute([self], query)

    def summary(self, steps: pa.Table | None = None) -> RunSummary:
        """Summarizes the run. Reads `run.json`, `summary.json`, and two columns of `steps` unless they are given."""
        info = self.info
        steps = (self.table("steps", columns=["step", "reward_mean"]) if steps is None else steps).sort_by("step")
        first, last = ends_of(steps["reward_mean"].to_pylist())
        status = status_now(self.files.run_dir, info)
        result = self.result
        ended_at = info.ended_at if info else None
        if status == "live":
            ended_at = time.time()
        elif status == "dead":
            ended_at = (read_heartbeat(self.files.run_dir) or {}).get("time")
        return RunSummary(
            path=self.files.run_dir,
            label=self.label,
            run_id=info.run_id if info else "",
            name=info.name if info else self.label,
            status=status,
            started_at=info.started_at if info else None,
            duration=max(0.0, ended_at - info.started_at - info.paused_seconds)
            if info and ended_at is not None
            else None,
            attempt=info.attempt if info else 0,
            steps=len(pc.unique(steps["step"])),
            num_steps=info.num_steps if info else None,
            reward_first=first,
            reward_last=last,
            heldout_before=_number(result.get("heldout_before", info.heldout_before if info else None)),
            heldout_after=_number(result.get("heldout_after")),
            error=single_line(info.error) if info and info.error else None,  # old records have whole tracebacks
            project=info.project if info else "",
            tags=tuple(info.tags) if info else (),
        )

    @property
    def result(self) -> dict[str, Any]:
        """Content of `summary.json`, or an empty dictionary."""
        return _read_object(self.files.summary)

    @property
    def config_problem(self) -> str | None:
        """Returns why and on which line `config.yaml` cannot be read. None if it can, or if there is no such file."""
        import yaml

        path = self.files.config
        try:
            value = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            return f"{path} cannot be read: {single_line(str(error))}"
        except yaml.YAMLError as error:
            from telescope.config.yaml_file import yaml_problem

            return f"{path} is not valid YAML: {yaml_problem(error)}"
        return None if isinstance(value, dict) else f"{path} must hold `field: value` lines"

    def table_files(self, name: str, cursor: int = 0) -> list[TableFile]:
        """Returns the files with the rows from `cursor` on, in order and with each row once.

        Leaves out lost and damaged files, with a warning.
        """
        try:
            listing = list_files(self.files.table(name), cursor)
        except PermissionError as error:
            self._warn_once(self.files.table(name), f"table {name} cannot be read: {error}")
            return []
        for first, end in listing.gaps:
            self._warn_once(
                self.files.table(name) / str(first), f"rows {first} to {end} of table {name} are missing from disk"
            )
        for path in listing.damaged:
            self.exclude(path)
        return [file for file in listing.files if not self.is_excluded(file.path)]

    def stamp(self, name: str) -> frozenset[tuple[str, int, int]]:
        """Returns name, size and time of each file of a table. The result differs after each change of the table."""
        try:
            files = [(file.name, file.stat()) for file in os.scandir(self.files.table(name))]
        except OSError:  # no table yet, or a file was replaced meanwhile
            return frozenset()
        return frozenset((file, stat.st_size, stat.st_mtime_ns) for file, stat in files)

    def num_rows(self, name: str) -> int:
        """Returns the number of rows, including superseded and lost rows."""
        try:
            return list_files(self.files.table(name), AFTER_ALL_ROWS).end
        except PermissionError:
            return 0  # `table_files` warns

    def _read(self, name: str, cursor: int, columns: list[str]) -> tuple[pa.Table, int]:
        schema = pa.schema([field for field in _definition(name).schema if field.name in columns])
        for attempt in range(READ_ATTEMPTS):
            pieces = [schema.empty_table()]
            files = self.table_files(name, cursor)
            try:
                for file in files:
                    try:
                        pieces.append(_read_file(file, cursor, schema))
                    except _DAMAGE as error:
                        if not _is_damage(error):
                            raise
                        self.exclude(file.path)
            except FileNotFoundError:
                # A file was compacted since the listing; another file now has its rows.
                if attempt == READ_ATTEMPTS - 1:
                    raise
                continue
            break
        return pa.concat_tables(pieces), max([cursor, *(file.end for file in files)])

    @property
    def unreadable(self) -> list[Path]:
        """Lost, damaged or foreign files that reads have found, relative to the run directory."""
        return sorted(path.relative_to(self.files.run_dir) for path in self._unreadable)

    @property
    def has_repaired_files(self) -> bool:
        """Returns whether an unreadable file has changed since, as when a run is still being copied."""
        return any(_signature(path) != seen for path, seen in self._unreadable.items())

    def exclude(self, path: Path) -> None:
        """Excludes a file that cannot be read, with a warning."""
        match = BLOCK_NAME.match(path.name)
        rows = f"rows {int(match[1])} to {int(match[2])}" if match else "the rows"
        self._warn_once(path, f"{path} is damaged or may not be read: {rows} of its table are missing")

    def is_excluded(self, path: Path) -> bool:
        """Returns whether reads leave out a file."""
        return path in self._unreadable

    def _warn_once(self, what: Path, message: str) -> None:
        if what not in self._unreadable:
            self._unreadable[what] = _signature(what)
            logger.warning("record: %s", message)


def cutoffs(first_steps: Mapping[int, int | None]) -> dict[int, int]:
    """Returns the cutoffs, given the first step of each attempt, or None for an attempt that trained nothing."""
    result: dict[int, int] = {}
    lowest: int | None = None
    for attempt in sorted(first_steps, reverse=True):
        if lowest is not None:
            result[attempt] = lowest
        first = first_steps[attempt]
        if first is not None:
            lowest = first if lowest is None else min(lowest, first)
    return result


def superseded_sql(cut: Cutoffs) -> str:
    """Returns an SQL condition for superseded rows, which is never null."""
    if not cut:
        return "false"
    each = " OR ".join(f"(attempt = {attempt} AND step >= {first})" for attempt, first in sorted(cut.items()))
    return f"coalesce({each}, false)"


def superseded(data: pa.Table, cut: Cutoffs) -> pa.ChunkedArray | pa.Array:
    """Returns a boolean array over `data`: whether each row is superseded."""
    hidden = pa.chunked_array([pa.repeat(pa.scalar(False), data.num_rows)])
    for attempt, first in cut.items():
        beyond = pc.and_(pc.equal(data["attempt"], attempt), pc.greater_equal(data["step"], first))
        hidden = pc.or_(hidden, pc.fill_null(beyond, False))
    return hidden


def is_run(directory: Path) -> bool:
    """Returns whether a directory is a run directory. Raises `PermissionError`."""
    files = RunFiles(directory)
    return files.run_json.is_file() or files.tables.is_dir()


def find_runs(root: str | os.PathLike[str]) -> list[Run]:
    """Returns the runs in `root`, `SEARCH_DEPTH` levels deep, or `root` if it is one. Raises `UserError` without it.

    A run that links lead to is listed once, by its own name.
    """
    top = Path(root)
    if not top.is_dir():
        raise UserError(f"{str(root)!r} is not a folder. Set --root to the folder of the runs.")
    try:
        if is_run(top):
            return [Run(top)]
    except PermissionError as error:
        raise UserError(f"{str(root)!r} may not be read: {error}") from None
    found: list[Run] = []
    real_top = top.resolve()
    searched = {real_top}
    level = [top]
    for _ in range(SEARCH_DEPTH):
        below: list[Path] = []
        for parent in level:
            try:
                folders = sorted(Path(entry.path) for entry in os.scandir(parent) if entry.is_dir())
            except OSError as error:
                logger.warning("record: %s cannot be searched for runs: %s", parent, error)
                continue
            for folder in folders:
                real = folder.resolve()
                if real in searched:
                    continue
                searched.add(real)
                if real.is_relative_to(real_top):  # a link such as `latest` does not name a run
                    folder = top / real.relative_to(real_top)
                try:
                    if is_run(folder):
                        found.append(Run(folder, label=str(folder.relative_to(top))))
                    elif not folder.name.startswith("."):
                        below.append(folder)
                except (UserError, PermissionError) as error:
                    logger.warning("record: a run is left out. %s", error)
        level = below
    return found


def list_runs(root: str | os.PathLike[str]) -> list[RunSummary]:
    """Returns the runs in `root`, newest first. Raises `UserError` if the folder does not exist."""
    return newest_first(run.summary() for run in find_runs(root))


def newest_first(summaries: Iterable[RunSummary]) -> list[RunSummary]:
    """Sorts runs by start time, newest first. Runs without a start time come last."""
    return sorted(summaries, key=lambda run: -(run.started_at or 0.0))


def eval_names(
    config: Mapping[str, Any], rows: Iterable[Mapping[str, Any]] = ()
) -> Callable[[str | None, int | None], str]:
    """Returns a function that names an eval by its name and number: `a`, or `a#1` if there are several `a`.

    A name has several evals if the config lists several, or if several were measured together: a resumed run may have
    another number for the same eval. `rows` are those of the table `evals`.
    """
    entries = [entry for entry in config.get("evals") or () if isinstance(entry, dict)]
    measured = {tuple(row[name] for name in ("attempt", "version", "source", "name", "number")) for row in rows}
    several = Counter([(str(entry.get("name")),) for entry in entries]) | Counter(row[:-1] for row in measured)
    repeated = {group[-1] for group, count in several.items() if count > 1}
    return lambda name, number: f"{name}#{number}" if name in repeated and number is not None else name or ""


def _definition(name: str) -> Table:
    try:
        return TABLES[name]
    except KeyError:
        raise UserError(f"There is no table {name!r}. The tables are {', '.join(sorted(TABLES))}.") from None


def _read_file(file: TableFile, cursor: int, schema: pa.Schema) -> pa.Table:
    if file.rows is not None:
        data = file.rows
    else:
        with pq.ParquetFile(file.path) as block:
            present = [name for name in schema.names if name in block.schema_arrow.names]
            data = block.read(columns=present) if present else pa.table({"rows": pa.nulls(file.end - file.first)})
    return conform(data, schema).slice(max(0, cursor - file.first))


def is_readable(path: Path) -> bool:
    """Returns whether a block can be read completely. True if it was removed."""
    try:
        with pq.ParquetFile(path) as file:
            file.read()
    except FileNotFoundError:
        return True
    except _DAMAGE as error:
        if not _is_damage(error):
            raise
        return False
    return True


def _is_damage(error: Exception) -> bool:
    """Returns whether the file itself caused the error, by its content or permissions or because it is a folder."""
    return not isinstance(error, OSError) or error.errno in (None, errno.EACCES, errno.EPERM, errno.EISDIR)


def _signature(path: Path) -> tuple[int, int] | None:
    """Returns a file's time and size, which change when it is completed or its permissions change. None if missing.

    Missing rows are named by a path that ends in the first of them. Their signature changes when a file has that row.
    """
    try:
        if path.name.isdecimal():
            row = int(path.name)
            return (row, 0) if any(file.first <= row for file in list_files(path.parent, row).files) else None
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns + state.st_ctime_ns, state.st_size


def _sample_key(data: pa.Table) -> pa.ChunkedArray:
    """Returns attempt and sample as one text, which is empty for rows without a sample."""
    key = pc.binary_join_element_wise(data["attempt"].cast(pa.string()), data["sample_id"], ":")
    return pc.fill_null(key, "").combine_chunks()


def _read_object(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file. Empty if there is none, or with a warning if it cannot be read."""
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        logger.warning("record: %s cannot be read: %s", path, error)
        return {}
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
