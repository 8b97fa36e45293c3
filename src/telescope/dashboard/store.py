"""Tables of one run in an in-memory database that grows with the run.

Owns which rows have been read and what the queries of the pages run on. Long texts and token arrays stay in the files:
`of_samples` reads them for some samples, from the files that have its rows, and `search` scans them. Does not own the
formats (`record.reader`) or what a page asks.

Invariants: a row is read once, so a request costs what is new since the last one. A run directory that was replaced by
another is read from the start. Nothing is written into a run.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import itemgetter
from typing import Any, TypeVar, cast

import duckdb
import pyarrow as pa

from telescope.dashboard.steps import StepColumns, StepMetrics
from telescope.errors import UserError
from telescope.record.earlier import prompt_messages, upgrade
from telescope.record.query import PROMPT_KEY, block_rows, exclude_damaged, sql_text
from telescope.record.reader import READ_ATTEMPTS, Run, superseded_sql
from telescope.record.tables import TABLES

OF_SAMPLE = ("attempt", "sample_id")
"""Columns that name the sample of a row."""

KEY = ", ".join(OF_SAMPLE)

LONG_COLUMNS = {
    "samples": {
        *("prompt_key", "prompt_text", "completion_text", "golden", "info_turns", "divergences", "failure_message")
    },
    "prompts": {"environment", "text", "messages"},
    **{name: set(TABLES[name].column_names) - set(OF_SAMPLE) for name in ("turns", "tool_calls", "info")},
    "tokens": set(TABLES["tokens"].column_names) - {*OF_SAMPLE, "step"},
    "spans": {"attributes"},
    "step_stats": {"bin_edges"},
    "steps": {"metrics", "unfinished_draws"},
}
"""Columns that stay in the files. Step metrics are in `StepColumns`."""

DERIVED = {
    "samples": ({"prompt_key", "prompt_text"}, f"{PROMPT_KEY} AS prompt_key"),
    "spans": ({"attributes"}, "try_cast(attributes['lane'] AS BIGINT) AS lane"),
    "step_stats": ({"bin_edges"}, "bin_edges[1] AS low, bin_edges[-1] AS high"),
}
"""Columns computed from some that stay in the files."""

COMPRESSED_ROWS = 50_000
COMPRESS_SECONDS = 5.0
"""A table of at least `COMPRESSED_ROWS` rows is compressed `COMPRESS_SECONDS` after it is read, when its page is drawn.
It then needs a tenth of the memory, and counts take half of the time."""

LATE_ROWS = 10_000
"""Largest page of samples."""

SEARCHED = {
    "turns": ("text",),
    "tool_calls": ("arguments", "result"),
    "info": ("value",),
    "samples": ("prompt_text", "completion_text"),
    "prompts": ("text",),
}
"""Texts that a search looks into. Those in `samples` are of earlier versions."""

NUM_SEARCHES = 16
"""Searches whose hits are kept, so that the pages of one result are scanned for once."""

BEFORE_MATCH, BEHIND_MATCH = 24, 160
"""Characters around a match of a search that a list shows."""

EXPORTED_AT_ONCE = 2000
"""Samples that an export reads at once, with their texts."""

MOST_TAG_VALUES = 50
"""Values of a tag that pages offer as a filter."""

NO_HITS = pa.table({"attempt": pa.array([], pa.int64()), "id": pa.array([], pa.string())})

UNREAD = object()
"""Differs from the id of every run, so the first `refresh` opens the database."""

Row = dict[str, Any]
Key = tuple[int, str]
Kept = TypeVar("Kept")
Parameters = Sequence[Any] | Mapping[str, Any]


class NotFoundError(UserError):
    """No run, sample or eval has this id."""


class View:
    """Queries over the tables of a run at one moment."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    def fetch(self, sql: str, parameters: Parameters = ()) -> list[tuple[Any, ...]]:
        """Returns the rows of a query as tuples."""
        return self._connection.execute(sql, parameters).fetchall()

    def rows(self, sql: str, parameters: Parameters = ()) -> list[Row]:
        """Returns the rows of a query. Maps are dictionaries."""
        result = self._connection.execute(sql, parameters)
        columns = [column[0] for column in result.description or ()]
        return [dict(zip(columns, row, strict=True)) for row in result.fetchall()]

    def columns(self, sql: str, parameters: Parameters = ()) -> pa.Table:
        """Returns the result of a query as an Arrow table."""
        return self._connection.sql(sql, params=parameters).to_arrow_table()


class RunStore:
    """Queries over one run. Safe to use from several threads. Call `refresh` first.

    A database has a pool of threads, so it is opened by the first `refresh`, not for every run of a folder.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.used_at = 0.0
        """When its tables were used last, in monotonic time."""
        self._identity: object = UNREAD
        # One for each table and each thing that is computed, so that a slow one delays only who asks for it.
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()

    def _reset(self) -> None:
        settings: dict[str, str | bool | int | float | list[str]] = {
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "python_enable_replacements": "false",
            # Rows that are sorted for a page of them have their key alone.
            "late_materialization_max_rows": LATE_ROWS,
            # Gives the memory of what was compressed back to the system.
            "allocator_background_threads": "true",
        }
        self._database = duckdb.connect(":memory:", config=settings)
        self._database.execute("ATTACH ':memory:' AS run (COMPRESS)")
        self._forget()

    def _forget(self) -> None:
        self._cursors: dict[str, int] = {}
        self._stamps: dict[str, object] = {}
        self._searches: dict[str, tuple[dict[str, int], pa.Table]] = {}
        self._steps = StepColumns()
        self._seen: dict[tuple[str, str], tuple[int, set[tuple[Any, ...]]]] = {}
        self._tags: tuple[int, dict[str, set[str]]] = (0, {})
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
        """Reads the new rows of tables. Returns the number of rows of each."""
        self.used_at = time.monotonic()
        with self._lock:
            info = self.run.info
            identity = info.run_id if info else None
            if identity != self._identity:
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

    def fetch(self, sql: str, parameters: Parameters = ()) -> list[tuple[Any, ...]]:
        """Returns the rows of a query over refreshed tables as tuples."""
        with self.view() as view:
            return view.fetch(sql, parameters)

    def rows(self, sql: str, parameters: Parameters = ()) -> list[Row]:
        """Returns the rows of a query over refreshed tables. Maps are dictionaries."""
        with self.view() as view:
            return view.rows(sql, parameters)

    def columns(self, sql: str, parameters: Parameters = ()) -> pa.Table:
        """Returns the result of a query as an Arrow table."""
        with self.view() as view:
            return view.columns(sql, parameters)

    @contextmanager
    def view(self, **tables: pa.Table) -> Iterator[View]:
        """Opens the refreshed tables as they are now. Queries also see further `tables`."""
        with self._connect() as connection:
            connection.begin()
            for name, table in tables.items():
                connection.register(name, table)
            yield View(connection)

    def _connect(self) -> duckdb.DuckDBPyConnection:
        with self._lock:
            return _cursor(self._database)

    def _compress(self) -> None:
        with suppress(duckdb.Error), self._connect() as connection:  # closed meanwhile, or written to
            connection.execute("CHECKPOINT run")

    def visible(self) -> str:
        """Returns an SQL condition for rows that are not superseded. It fits steps, samples and evals."""
        self.refresh("attempts", "steps")
        return f"NOT {superseded_sql(self._cutoffs())}"

    def steps(self, since: int = 0) -> tuple[int, dict[str, list[Any]], StepMetrics]:
        """Returns the steps from row `since` on, without superseded ones: next cursor, columns, metrics."""
        with self._locks["steps as columns"]:
            self.visible()
            self._steps.read(self)
            return (self._steps.num_rows, *self._steps.visible(since, self._cutoffs()))

    def seen(self, table: str, columns: str) -> set[tuple[Any, ...]]:
        """Returns the distinct values of some columns of a table. Looks at new rows only."""
        with self._locks[f"{columns} of {table}"]:
            self.refresh(table)
            ((end,),) = self.fetch(f"SELECT count(*) FROM {table}")
            first, found = self._seen.get((table, columns), (0, set()))
            if end < first:  # the table was read from the start again
                first, found = 0, set()
            found |= set(self.fetch(f"SELECT DISTINCT {columns} FROM {table} WHERE rowid >= ?", [first]))
            self._seen[table, columns] = (end, found)
            return set(found)

    def kept(self, name: str, state: object, make: Callable[[], Kept]) -> Kept:
        """Returns what `make` computes, cached until `state` changes, such as the number of rows of tables."""
        with self._locks[f"kept {name}"]:
            found = self._kept.get(name)
            if found is None or found[0] != state:
                found = self._kept[name] = (state, make())
            return cast("Kept", found[1])

    def tags(self) -> dict[str, list[str]]:
        """Returns the values of each tag of the samples. A tag with more than `MOST_TAG_VALUES` has none.

        Looks at new rows only.
        """
        fresh = (
            f"SELECT name, list(DISTINCT value)[:{MOST_TAG_VALUES + 1}] FROM (SELECT unnest(map_keys(tags)) AS name, "
            "unnest(map_values(tags)) AS value FROM samples WHERE rowid >= ?) GROUP BY name"
        )
        with self._locks["values of tags"]:
            self.refresh("samples")
            ((end,),) = self.fetch("SELECT count(*) FROM samples")
            first, known = self._tags if self._tags[0] <= end else (0, {})
            for name, values in self.fetch(fresh, [first]) if first < end else ():
                some = known.setdefault(name, set())
                if len(some) <= MOST_TAG_VALUES:
                    some.update(values)
            self._tags = end, known
            return {name: sorted(some) if len(some) <= MOST_TAG_VALUES else [] for name, some in known.items()}

    def distinct(self, column: str, where: str) -> list[Any]:
        """Returns the values of a column of `samples`, sorted, without null. Kept until there are new rows."""
        values = f"SELECT DISTINCT {column} FROM samples WHERE {where} AND {column} IS NOT NULL ORDER BY 1"
        state = (self._cursors["samples"], where)
        return self.kept(f"values of {column}", state, lambda: [value for (value,) in self.fetch(values)])

    def search(self, text: str) -> pa.Table:
        """Finds `text` in any case: attempts and ids of samples, and of prompts, which all of their samples have.

        Waits for other searches only, and scans what is new since the last search for this text.
        """
        with self._locks["search"]:
            self.refresh("samples")
            ends = {name: self.run.num_rows(name) for name in SEARCHED}
            done, hits = self._searches.pop(text, ({}, NO_HITS))
            for name, end in ends.items():
                if (cursor := done.get(name, 0)) < end:
                    id_column = "prompt_key" if name == "prompts" else "sample_id"
                    fresh = self._files(name, f"attempt, {id_column} AS id", _matches(name, text), cursor)
                    hits = pa.concat_tables([hits, fresh.cast(NO_HITS.schema)])
            self._searches[text] = (ends, hits)
            while len(self._searches) > NUM_SEARCHES:
                self._searches.pop(next(iter(self._searches)))
            return hits

    def whole_samples(self, chosen: pa.Table) -> Iterator[Row]:
        """Yields whole rows of samples with their texts. `chosen` has attempt, sample_id and step, in record order."""
        for first in range(0, chosen.num_rows, EXPORTED_AT_ONCE):
            piece = chosen.slice(first, EXPORTED_AT_ONCE).to_pylist()
            steps = [int(row["step"]) for row in piece]
            near, answer = f"step BETWEEN {min(steps)} AND {max(steps)}", "role = 'assistant'"
            keys = list(map(key_of, piece))
            samples, turns = (self.of_samples(*what) for what in (("samples", keys, near), ("turns", keys, answer)))
            prompts = self.prompts(among(keys))
            for key, rows in samples.items():
                answers = sorted(turns[key], key=itemgetter("turn"))
                for row in rows:
                    said = row["completion_text"] or "\n".join(turn["text"] or "" for turn in answers)
                    yield {**row, **prompts[key], "completion_text": said}

    def conversations(self, keys: Collection[Key], where: str = "true") -> dict[Key, Row]:
        """Returns whole samples with `messages` of their prompts, `turns`, `tool_calls` and `info`, in order.

        `where` is about columns of `samples`. A run of an earlier version reads as one of this version.
        """
        samples = self.of_samples("samples", keys, where)
        prompts = self.prompts(among(keys))
        orders = {"turns": ("turn",), "tool_calls": ("call",), "info": ("number", "key")}
        whole = {name: self.of_samples(name, keys) for name in orders}
        found = {key: {**rows[0], **prompts[key]} for key, rows in samples.items() if rows}
        for key, sample in found.items():
            sample |= {name: sorted(whole[name][key], key=itemgetter(*order)) for name, order in orders.items()}
            upgrade(sample)
        return found

    def of_samples(
        self, table: str, keys: Iterable[Key], where: str = "true", columns: str = "*"
    ) -> dict[Key, list[Row]]:
        """Returns whole rows by sample, from one pass over the files that have them."""
        found: dict[Key, list[Row]] = {key: [] for key in keys}
        own = among(found)
        # All spans are too many to be read for their samples; their times say which parts of the files to read.
        places = (0, None) if table == "spans" else self._places(table, own)
        for row in self._files(table, columns, f"{own} AND {where}", *places).to_pylist(maps_as_pydicts="lossy"):
            found[key_of(row)].append(row)
        return found

    def prompts(self, where: str, columns: str = "") -> dict[Key, Row]:
        """Returns `prompt_key`, `prompt_text` and `messages` of samples, by attempt and sample.

        `where` is about columns that are in memory. `columns` are further ones of `samples`.
        """
        shown = f"{KEY}, {PROMPT_KEY} AS prompt_key, prompt_text{columns}"
        found = _by_key(self._files("samples", shown, where, *self._places("samples", where)))
        own = among({(row["attempt"], row["prompt_key"]) for row in found.values()}, "prompt_key")
        rows = self._files("prompts", "attempt, prompt_key, text, messages", own, *self._places("prompts", own))
        texts = {(row["attempt"], row["prompt_key"]): (row["text"], row["messages"]) for row in rows.to_pylist()}
        parsed: dict[tuple[str | None, str | None], list[Row]] = {}
        for row in found.values():
            prompt = texts.get((row["attempt"], row["prompt_key"]), (row["prompt_text"], None))
            if prompt not in parsed:
                parsed[prompt] = json.loads(prompt[1]) if prompt[1] else prompt_messages(prompt[0] or "")
            row.update(prompt_text=prompt[0], messages=parsed[prompt])
        return found

    def beginnings(self, where: str, length: int, columns: str = "") -> dict[Key, Row]:
        """Returns the first characters of `prompt` and `answer`, by attempt and sample.

        Of a prompt it is the last user message: what is before it, such as a system prompt, is often the same. `where`
        is about columns that are in memory.
        """
        found = self.prompts(where, f", left(completion_text, {length}) AS answer{columns}")
        own = among(key for key, row in found.items() if row["answer"] is None)
        first = f"{KEY}, arg_min(left(text, {length}), turn) AS answer"
        grouped = f"{own} AND role = 'assistant' GROUP BY {KEY}"
        for key, row in _by_key(self._files("turns", first, grouped, *self._places("turns", own))).items():
            found[key]["answer"] = row["answer"]
        for row in found.values():
            messages = row["messages"]
            last = next((one for one in reversed(messages) if one["role"] == "user"), messages[-1] if messages else {})
            row["prompt"] = (last.get("content") or "")[:length]
        return found

    def aggregate(self, name: str, columns: str, group: str, where: str = "true") -> list[Row]:
        """Returns aggregates of a table by `group`, computed from its files without loading the rows into memory."""
        return self._files(name, columns, f"{where} GROUP BY {group}").to_pylist()

    def _read(self, name: str, database: duckdb.DuckDBPyConnection, cursors: dict[str, int]) -> None:
        cursor = cursors.get(name)
        if cursor and self.run.num_rows(name) < cursor:
            database.execute(f"DROP TABLE {name}")
            self._searches.clear()
            del cursors[name]
            cursor = None
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
        """Creates a table from the blocks on disk. Returns the cursor behind them, or None if they cannot be read.

        DuckDB reads the many rows of a first time in a third of the time of Arrow. Without blocks, and when one is
        damaged or was compacted meanwhile, nothing is created.
        """
        blocks = [file for file in self.run.table_files(name) if file.rows is None]
        if not blocks:
            return None
        try:
            database.execute(f"CREATE TABLE {name} AS SELECT {shown} FROM ({block_rows(name, blocks)})")
        except duckdb.Error:
            return None  # `rows_since` finds what is wrong
        if blocks[-1].end - blocks[0].first >= COMPRESSED_ROWS:
            timer = threading.Timer(COMPRESS_SECONDS, self._compress)
            timer.daemon = True
            timer.start()
        return blocks[-1].end

    def _cutoffs(self) -> dict[int, int]:
        state = (self._cursors["attempts"], self._cursors["steps"])
        return self.kept("cutoffs", state, self.run.cutoffs)

    def snippets(self, text: str, keys: Collection[Key]) -> dict[Key, str]:
        """Returns the text around the first match of a search, by attempt and sample. Prompts are searched last."""
        found: dict[Key, str] = {}
        match = re.compile(f".{{0,{BEFORE_MATCH}}}{re.escape(text)}.{{0,{BEHIND_MATCH}}}", re.DOTALL | re.IGNORECASE)
        around = f"'(?is).{{0,{BEFORE_MATCH}}}' || regexp_escape({sql_text(text)}) || '.{{0,{BEHIND_MATCH}}}'"
        for name, columns in SEARCHED.items():
            if not (left := [key for key in keys if key not in found]):
                break
            own = among(left)
            if name == "prompts":
                hits = {key: match.search(row["prompt_text"] or "") for key, row in self.prompts(own).items()}
                return found | {key: hit[0] for key, hit in hits.items() if hit}
            shown = ", ".join(f"nullif(regexp_extract({column}, {around}), '')" for column in reversed(columns))
            where = f"{own} AND {_matches(name, text)}"
            rows = self._files(name, f"{KEY}, coalesce({shown}) AS x", where, *self._places(name, own))
            found |= {key_of(row): row["x"] for row in reversed(rows.to_pylist())}
        return found

    def token_sums(self, step: int) -> dict[Key, Row]:
        """Returns, for each sample of a step, the engine's summed logprobs and the trainer/engine probability ratio."""
        gaps = "list_transform(list_zip(trainer_logprobs, engine_logprobs), lambda x: x[1]::DOUBLE - x[2])"
        sums = (
            "list_sum(engine_logprobs::DOUBLE[]) AS logprob_sum, "
            f"exp(list_sum(list_filter({gaps}, lambda gap: isfinite(gap)))) AS ratio"
        )
        where = f"step = {int(step)}"
        return _by_key(self._files("tokens", f"{KEY}, {sums}", where, *self._places("tokens", where)))

    def _places(self, name: str, where: str) -> tuple[int, int | None]:
        """Returns the first and the last row of the record that match `where`, a condition on columns in memory.

        (0, None): all rows; (0, -1): none. A read of a few rows then opens one file of hundreds.
        """
        (end,) = self.refresh(name).values()
        ((first, last, num_rows),) = self.fetch(
            f"SELECT min(rowid), max(rowid), (SELECT count(*) FROM {name}) FROM {name} WHERE {where}"
        )
        if num_rows != end:
            return 0, None  # with lost files, rows in memory have other numbers than in the record
        return (0, -1) if last is None else (first, last)

    def _files(self, name: str, columns: str, where: str, cursor: int = 0, last: int | None = None) -> pa.Table:
        """Returns rows from the files with rows from `cursor` to `last`, superseded ones too.

        Starts again when a file was compacted.
        """
        for attempt in range(READ_ATTEMPTS):
            found = self.run.table_files(name, cursor)
            if last is not None:
                found = [file for file in found if file.first <= last]
            blocks = [file for file in found if file.rows is None]
            tails = [file.rows for file in found if file.rows is not None]
            try:
                with self._connect() as connection:
                    source = block_rows(name, blocks)
                    if tails:
                        # Not copied: of the newest rows, only those of `where` are converted.
                        connection.register("tails", pa.concat_tables(tails, promote_options="default"))
                        source = f"{source} UNION ALL BY NAME FROM tails"
                    return connection.sql(f"SELECT {columns} FROM ({source}) WHERE {where}").to_arrow_table()
            except duckdb.Error:
                damaged = exclude_damaged([(self.run, block.path) for block in blocks])
                replaced = not all(block.path.exists() for block in blocks)
                if attempt == READ_ATTEMPTS - 1 or not (damaged or replaced):
                    raise
        raise AssertionError("the last attempt returns or raises")


def key_of(row: Row) -> Key:
    """Returns what names the sample of a row."""
    return row["attempt"], row["sample_id"]


def among(keys: Iterable[Key], column: str = "sample_id") -> str:
    """Returns an SQL condition for the rows of some samples, or of what else `column` names."""
    ids: dict[int, list[str]] = defaultdict(list)
    for attempt, name in keys:
        ids[attempt].append(sql_text(name))
    each = (f"attempt = {int(attempt)} AND {column} IN ({', '.join(some)})" for attempt, some in ids.items())
    return f"({' OR '.join(each) or 'false'})"


def _by_key(rows: pa.Table) -> dict[Key, Row]:
    return {key_of(row): row for row in rows.to_pylist(maps_as_pydicts="lossy")}


def _matches(name: str, text: str) -> str:
    """Returns an SQL condition for the rows of a table that contain `text`, ignoring case."""
    # A regular expression takes half the time of ILIKE.
    pattern = f"regexp_escape({sql_text(text)})"
    matches = (f"regexp_matches({column}, {pattern}, 'i')" for column in SEARCHED[name])
    return f"({' OR '.join(matches)})"


def _cursor(database: duckdb.DuckDBPyConnection) -> duckdb.DuckDBPyConnection:
    connection = database.cursor()
    connection.execute("USE run")
    return connection
