"""Tables of one run in an in-memory database that grows with the run.

Owns which rows have been read and what the queries of the pages run on. Long texts and token arrays stay in the files:
`texts` reads them for a few samples, `search` scans them. Does not own the formats (`record.reader`) or what a page
asks.

Invariants: a row is read once, so a request costs what is new since the last one. A run directory that was replaced by
another is read from the start. Nothing is written into a run.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from telescope.record.query import Database
from telescope.record.reader import Run
from telescope.record.segments import superseded_sql
from telescope.record.tables import TABLES

LONG_COLUMNS = {
    "samples": {"prompt_text", "completion_text", "golden", "info_turns", "divergences", "failure_message"},
    "spans": {"attributes"},
}
"""Columns that stay in the files."""

DERIVED = {"spans": "try_cast(attributes['lane'] AS BIGINT) AS lane"}
"""Columns computed from those that stay in the files."""

NUM_SEARCHES = 16
"""Searches whose hits are kept, so that the pages of one result are scanned for once."""

Row = dict[str, Any]


class RunStore:
    """Queries over one run. Safe to use from several threads."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._lock = threading.RLock()
        self._identity: object = None
        self._reset()

    def _reset(self) -> None:
        settings: dict[str, str | bool | int | float | list[str]] = {
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "python_enable_replacements": "false",
        }
        self._database = duckdb.connect(":memory:", config=settings)
        self._cursors: dict[str, int] = {}
        self._searches: dict[str, tuple[int, pa.Table]] = {}

    def refresh(self, *names: str) -> dict[str, int]:
        """Reads the new rows of tables. Returns the number of rows of each."""
        with self._lock:
            info = self.run.info
            identity = info.run_id if info else None
            if identity != self._identity:
                self._reset()
                self._identity = identity
            for name in names:
                self._read(name)
            return {name: self._cursors[name] for name in names}

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Returns the rows of a query over refreshed tables. Maps are dictionaries."""
        relation = self._execute(sql, parameters)
        columns = [column[0] for column in relation.description or ()]
        return [dict(zip(columns, row, strict=True)) for row in relation.fetchall()]

    def columns(self, sql: str, parameters: Sequence[Any] = ()) -> pa.Table:
        """Returns the result of a query as an Arrow table."""
        return self._execute(sql, parameters).to_arrow_table()

    def visible(self, name: str = "samples") -> str:
        """Returns an SQL condition for rows that no later attempt superseded."""
        self.refresh("attempts", "steps")
        return f"NOT {superseded_sql(self._cutoffs())}" if TABLES[name].by_step else "true"

    def search(self, text: str) -> None:
        """Fills the table `hits` (attempt, sample_id) with samples whose prompt or answer contains `text`.

        Ignores case. Call it, and query `hits`, within one `with store.exclusive()`.
        """
        (end,) = self.refresh("samples").values()
        done, hits = self._searches.get(
            text, (0, pa.table({"attempt": pa.array([], pa.int64()), "sample_id": [""][:0]}))
        )
        if done < end:
            fresh = self._scan(text, done)
            hits = pa.concat_tables([hits, fresh], promote_options="permissive") if done else fresh
            self._searches.pop(text, None)
            self._searches[text] = (end, hits)
            while len(self._searches) > NUM_SEARCHES:
                self._searches.pop(next(iter(self._searches)))
        self._database.register("hits", hits)

    def exclusive(self) -> threading.RLock:
        """Returns the lock of the store."""
        return self._lock

    def texts(self, table: str, attempt: int, sample_id: str, step: int | None = None) -> list[Row]:
        """Returns whole rows of one sample from the files."""
        where = f"attempt = {int(attempt)} AND sample_id = {_text(sample_id)}"
        if step is not None:
            where += f" AND step = {int(step)}"
        return Database([self.run]).execute(f"SELECT * EXCLUDE (run) FROM {table} WHERE {where}").to_dicts()

    def beginnings(self, where: str, length: int) -> dict[tuple[int, str], tuple[str, str]]:
        """Returns the first characters of prompt and answer by attempt and sample, of the samples of `where`."""
        sql = (
            f"SELECT attempt, sample_id, left(prompt_text, {length}), left(completion_text, {length}) "
            f"FROM samples WHERE {where}"
        )
        found = Database([self.run]).execute(sql).rows
        return {(attempt, sample): (prompt or "", answer or "") for attempt, sample, prompt, answer in found}

    def _execute(self, sql: str, parameters: Sequence[Any]) -> duckdb.DuckDBPyConnection:
        with self._lock:
            return self._database.cursor().execute(sql, list(parameters))

    def _read(self, name: str) -> None:
        cursor = self._cursors.get(name, 0)
        if cursor and self._end(name) < cursor:
            self._database.execute(f"DROP TABLE IF EXISTS {name}")
            self._searches.clear()
            cursor = 0
        derived = DERIVED.get(name)
        long = LONG_COLUMNS.get(name, set())
        needed = [column for column in TABLES[name].column_names if derived or column not in long]
        rows, end = self.run.rows_since(name, cursor, needed)
        if name not in self._cursors or rows.num_rows:
            shown = ", ".join(
                [*(f'"{column}"' for column in needed if column not in long), *([derived] if derived else [])]
            )
            self._database.register("fresh", rows)
            exists = (name in self._cursors and cursor > 0) or self._has(name)
            insert = f"INSERT INTO {name}" if exists else f"CREATE TABLE {name} AS"
            self._database.execute(f"{insert} SELECT {shown} FROM fresh")
            self._database.unregister("fresh")
        self._cursors[name] = end

    def _has(self, name: str) -> bool:
        found = self._database.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = ?", [name]).fetchone()
        return found is not None

    def _end(self, name: str) -> int:
        segments = self.run.segments(name)
        return segments[-1].end if segments else 0

    def _cutoffs(self) -> dict[int, int]:
        (attempts,) = self._database.execute("SELECT count(DISTINCT attempt) FROM attempts").fetchone() or (0,)
        return self.run.cutoffs() if attempts > 1 else {}

    def _scan(self, text: str, cursor: int) -> pa.Table:
        """Reads the segments from row `cursor` on, for samples that contain `text`."""
        paths: list[Path] = [segment.path for segment in self.run.segments("samples") if segment.end > cursor]
        if not paths:
            return pa.table({"attempt": pa.array([], pa.int64()), "sample_id": pa.array([], pa.string())})
        files = ", ".join(_text(_escaped(path)) for path in paths)
        pattern = _text("%" + text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%")
        matches = " OR ".join(f"{column} ILIKE {pattern} ESCAPE '\\'" for column in ("prompt_text", "completion_text"))
        sql = f"SELECT attempt, sample_id FROM read_parquet([{files}], union_by_name = true) WHERE {matches}"
        with duckdb.connect(":memory:") as connection:
            return connection.execute(sql).to_arrow_table()


def _escaped(path: Path) -> str:
    """Returns a path that DuckDB does not read as a pattern."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in str(path))


def _text(value: str) -> str:
    """Returns a string as an SQL literal."""
    return "'" + value.replace("'", "''") + "'"
