"""Keeps tables of one run in an in-memory database that grows with the run.

Owns the read rows and the database for the queries of the pages. Long texts and token arrays stay in the files
(`dashboard.store`). Does not own the formats (`record.reader`) or the queries.

Invariants: each row is read once, so the cost of a request depends on the rows since the last request. A replaced run
directory is read from the start. Nothing is written into a run.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar, cast

import duckdb
import pyarrow as pa

from telescope.dashboard.steps import StepColumns, StepMetrics
from telescope.record.query import OFFLINE, block_rows
from telescope.record.reader import Run, superseded_sql
from telescope.record.tables import TABLES

OF_SAMPLE = ("attempt", "sample_id")
"""Columns that identify the sample of a row."""

LONG_COLUMNS = {
    "samples": {*("prompt_text", "completion_text", "golden", "info_turns", "divergences", "failure_message")},
    "prompts": {"environment", "text", "messages"},
    **{name: set(TABLES[name].column_names) - set(OF_SAMPLE) for name in ("turns", "tool_calls", "info")},
    "tokens": set(TABLES["tokens"].column_names) - {*OF_SAMPLE, "step"},
    "spans": {"attributes"},
    "step_stats": {"bin_edges"},
    "steps": {"metrics", "unfinished_draws"},
}
"""Columns that stay in the files. Step metrics are in `StepColumns`."""

DERIVED = {
    "spans": ({"attributes"}, "try_cast(attributes['lane'] AS BIGINT) AS lane"),
    "step_stats": ({"bin_edges"}, "bin_edges[1] AS low, bin_edges[-1] AS high"),
}
"""Columns that are computed from columns in the files."""

COMPRESSED_ROWS = 50_000
COMPRESS_SECONDS = 5.0
"""A table of at least `COMPRESSED_ROWS` rows is compressed `COMPRESS_SECONDS` after it is read, once its page is drawn.
It then needs a tenth of the memory, and counts take half of the time."""

LATE_ROWS = 10_000
"""Largest page of samples."""

MOST_TAG_VALUES = 50
"""Most values of a tag that pages offer as a filter."""

UNREAD = object()
"""Differs from every run's id, so that the first `refresh` opens the database."""

Row = dict[str, Any]
Kept = TypeVar("Kept")
Parameters = Sequence[Any] | Mapping[str, Any]


class View:
    """Queries the refreshed tables of a run, with a connection for each query or for all."""

    def __init__(self, connect: Callable[[], AbstractContextManager[duckdb.DuckDBPyConnection]]) -> None:
        self._connect = connect

    def fetch(self, sql: str, parameters: Parameters = ()) -> list[tuple[Any, ...]]:
        """Returns the rows of a query as tuples."""
        with self._connect() as connection:
            return connection.execute(sql, parameters).fetchall()

    def rows(self, sql: str, parameters: Parameters = ()) -> list[Row]:
        """Returns the rows of a query. Maps are dictionaries."""
        with self._connect() as connection:
            result = connection.execute(sql, parameters)
            columns = [column[0] for column in result.description or ()]
            return [dict(zip(columns, row, strict=True)) for row in result.fetchall()]

    def columns(self, sql: str, parameters: Parameters = ()) -> pa.Table:
        """Returns the result of a query as an Arrow table."""
        with self._connect() as connection:
            return connection.sql(sql, params=parameters).to_arrow_table()


class RunTables(View):
    """Queries the tables of one run. Safe to use from several threads. Call `refresh` first.

    The first `refresh` opens the database, which has a pool of threads, so that a folder of many runs does not open as
    many databases.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(self._open_cursor)
        self.run = run
        self.used_at = 0.0
        """When the tables were last used, in monotonic time."""
        self._identity: object = UNREAD
        # One lock per table and per cached value, so that a slow one delays only its own users.
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()

    def _reset(self) -> None:
        settings: dict[str, str | bool | int | float | list[str]] = {
            **OFFLINE,
            # Sorting for a page of rows only copies their keys.
            "late_materialization_max_rows": LATE_ROWS,
            # Returns the memory of compressed data to the system.
            "allocator_background_threads": "true",
        }
        self._database = duckdb.connect(":memory:", config=settings)
        self._database.execute("ATTACH ':memory:' AS run (COMPRESS)")
        self._forget()

    def _forget(self) -> None:
        self._cursors: dict[str, int] = {}
        self._stamps: dict[str, object] = {}
        self._steps = StepColumns()
        self._seen: dict[tuple[str, str], tuple[int, set[tuple[Any, ...]]]] = {}
        self._kept: dict[str, tuple[object, Any]] = {}

    @property
    def is_open(self) -> bool:
        """Returns whether tables are in memory."""
        return self._identity is not UNREAD

    def close(self) -> None:
        """Frees the memory of the tables. The next `refresh` reads them again."""
        with self._lock:
            if self.is_open:
                self._identity = UNREAD
                self._database.close()
                self._forget()

    def refresh(self, *names: str) -> dict[str, int]:
        """Reads new rows of tables. Returns the number of rows of each table."""
        self.used_at = time.monotonic()
        with self._lock:
            info = self.run.info
            identity = info.run_id if info else None
            # `run.json` cannot be read while a full disk makes the run overwrite it in place.
            if not self.is_open or (identity != self._identity and info is not None):
                self._reset()
                self._identity = identity
            database, cursors = self._database, self._cursors
        for name in names:
            stamp = self.run.stamp(name)
            with self._locks[name]:
                if stamp and name in cursors and self._stamps.get(name) == stamp:
                    continue
                with _cursor(database) as connection:
                    self._read(name, connection, cursors)
                self._stamps[name] = stamp
        return {name: cursors[name] for name in names}

    @contextmanager
    def view(self, **tables: pa.Table) -> Iterator[View]:
        """Opens a view of the refreshed tables at this moment. Queries also see the tables in `tables`."""
        with self._open_cursor() as connection:
            connection.begin()
            for name, table in tables.items():
                connection.register(name, table)
            yield View(lambda: nullcontext(connection))

    def _open_cursor(self) -> duckdb.DuckDBPyConnection:
        with self._lock:
            return _cursor(self._database)

    def _compress(self) -> None:
        with suppress(duckdb.Error), self._open_cursor() as connection:  # closed or written to in the meantime
            connection.execute("CHECKPOINT run")

    def visible(self) -> str:
        """Returns an SQL condition for rows that are not superseded, for steps, samples and evals."""
        self.refresh("attempts", "steps")
        return f"NOT {superseded_sql(self._cutoffs())}"

    def steps(self, since: int = 0) -> tuple[int, dict[str, list[Any]], StepMetrics]:
        """Returns the steps from row `since` on without superseded steps, as next cursor, columns and metrics."""
        with self._locks["steps as columns"]:
            self.visible()
            self.refresh("step_stats")
            self._steps.read(self)
            return (self._steps.num_rows, *self._steps.visible(since, self._cutoffs()))

    def seen(self, table: str, columns: str) -> set[tuple[Any, ...]]:
        """Returns the distinct values of some columns of a table. Reads new rows only."""
        with self._locks[f"{columns} of {table}"]:
            self.refresh(table)
            ((end,),) = self.fetch(f"SELECT count(*) FROM {table}")
            first, found = self._seen.get((table, columns), (0, set()))
            if end < first:  # the table was read from the start again
                first, found = 0, set()
            if end > first:
                found |= set(self.fetch(f"SELECT DISTINCT {columns} FROM {table} WHERE rowid >= ?", [first]))
            self._seen[table, columns] = (end, found)
            return set(found)

    def kept(self, name: str, state: object, make: Callable[[], Kept]) -> Kept:
        """Returns the result of `make`, cached until `state` changes, such as the number of rows."""
        with self._locks[f"kept {name}"]:
            found = self._kept.get(name)
            if found is None or found[0] != state:
                found = self._kept[name] = (state, make())
            return cast("Kept", found[1])

    def tags(self) -> dict[str, list[str]]:
        """Returns the values of each tag of the samples, but none for a tag with more than `MOST_TAG_VALUES`."""

        def read() -> dict[str, list[str]]:
            values: dict[str, list[str]] = defaultdict(list)
            for name, value in sorted(self.seen("samples", "unnest(map_keys(tags)), unnest(map_values(tags))")):
                values[name].append(value)
            return {name: some if len(some) <= MOST_TAG_VALUES else [] for name, some in values.items()}

        return self.kept("tags", self.refresh("samples"), read)

    def distinct(self, column: str, where: str) -> list[Any]:
        """Returns the sorted values of a column of `samples` without null, cached until there are new rows."""
        values = f"SELECT DISTINCT {column} FROM samples WHERE {where} AND {column} IS NOT NULL ORDER BY 1"
        state = (self._cursors["samples"], where)
        return self.kept(f"values of {column}", state, lambda: [value for (value,) in self.fetch(values)])

    def _read(self, name: str, database: duckdb.DuckDBPyConnection, cursors: dict[str, int]) -> None:
        cursor = cursors.get(name)
        if cursor and self.run.num_rows(name) < cursor:
            database.execute(f"DROP TABLE {name}")
            del cursors[name]
            cursor = None
            if name in ("steps", "step_stats"):
                self._steps = StepColumns()
        sources, *derived = DERIVED.get(name, (set(),))
        long = LONG_COLUMNS.get(name, set())
        needed = [column for column in TABLES[name].column_names if column in sources or column not in long]
        shown = ", ".join([*(f'"{column}"' for column in needed if column not in long), *derived])
        if cursor is None:
            cursor = self._read_blocks(name, shown, database)
        rows, end = self.run.rows_since(name, cursor or 0, needed)
        if cursor is None or rows.num_rows:
            database.register("fresh", rows)
            insert = f"CREATE TABLE {name} AS" if cursor is None else f"INSERT INTO {name}"
            database.execute(f"{insert} SELECT {shown} FROM fresh")
        cursors[name] = end

    def _read_blocks(self, name: str, shown: str, database: duckdb.DuckDBPyConnection) -> int | None:
        """Creates a table from the blocks on disk. Returns the cursor after them, or None if they cannot be read.

        DuckDB reads many rows in a third of Arrow's time. Creates nothing if there are no blocks, or if one is damaged
        or was compacted meanwhile.
        """
        blocks = [file for file in self.run.table_files(name) if file.rows is None]
        if not blocks:
            return None
        try:
            database.execute(f"CREATE TABLE {name} AS SELECT {shown} FROM ({block_rows(name, blocks)})")
        except duckdb.Error:
            return None  # `rows_since` finds the problem
        if blocks[-1].end - blocks[0].first >= COMPRESSED_ROWS:
            timer = threading.Timer(COMPRESS_SECONDS, self._compress)
            timer.daemon = True
            timer.start()
        return blocks[-1].end

    def _cutoffs(self) -> dict[int, int]:
        state = (self._cursors["attempts"], self._cursors["steps"])
        return self.kept("cutoffs", state, self.run.cutoffs)


def _cursor(database: duckdb.DuckDBPyConnection) -> duckdb.DuckDBPyConnection:
    connection = database.cursor()
    connection.execute("USE run")
    return connection
