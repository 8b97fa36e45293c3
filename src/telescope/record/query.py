"""Runs SQL queries over the tables of runs with DuckDB.

Each table is a view with the rows of all runs and a column `run`.

Owns the views, the check that a statement only reads, and errors that suggest the right name. Does not own files
(`reader`, `table_files`) or printing (`cli.query`).

Invariants: nothing is written, attached or downloaded, and no file is read except the tables of the runs. A view has
each row once and hides superseded steps, like `reader.Run.table`. A query starts again when files were compacted
meanwhile or are damaged. Damaged files are left out, and `reader.Run.unreadable` lists them.
"""

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import pyarrow as pa

from telescope.errors import UserError
from telescope.record.reader import READ_ATTEMPTS, Run, is_readable, superseded_sql
from telescope.record.table_files import TableFile
from telescope.record.tables import IN_FLIGHT, TABLES, type_name
from telescope.utils.text import did_you_mean, plain

Connection = duckdb.DuckDBPyConnection
Files = list[tuple[Run, Path]]
R = TypeVar("R")

VIEWS = (*sorted(TABLES), IN_FLIGHT)
"""Views that a query can use."""

_TEXTS = re.compile(
    r"prompt_text|completion_text|(?<!count\()\*|(?:^|\()\s*(?:from|table)\b|describe|summarize|show", re.IGNORECASE
)
"""Matches queries that may need the texts of samples, which are joined from other tables."""

_GLOB = re.compile(r"[*?\[]")
"""Characters that make a path a pattern for DuckDB."""

_ABOUT_THE_QUERY = (
    duckdb.ParserException, duckdb.SyntaxException, duckdb.BinderException, duckdb.CatalogException,
    duckdb.PermissionException, duckdb.ConversionException, duckdb.OutOfRangeException,
)  # fmt: skip
"""Errors that a damaged file never causes. For other errors, every file is checked."""

OFFLINE = {
    **dict.fromkeys(("autoinstall_known_extensions", "autoload_known_extensions"), "false"),
    "python_enable_replacements": "false",
}
"""Settings without which DuckDB would download extensions and look names up among this process's variables."""

_READING_WORDS = frozenset(("select", "from", "with", "pivot", "unpivot", "values", "describe", "summarize", "("))
"""First words of statements that read."""

_WORD = re.compile(rb"\w+|.", re.DOTALL)

_WITH_TIME_ZONE = "TIMESTAMP WITH TIME ZONE"

_UNKNOWN_TABLE = re.compile(r'Table with name "?([\w.]+)"? does not exist')
_UNKNOWN_COLUMN = re.compile(r'(?:Referenced column|have a column named) "([^"]+)"')


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a query: column names and rows of Python values. Maps are dictionaries."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Returns the rows as dictionaries."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def execute(runs: Sequence[Run], sql: str) -> Result:
    """Runs one reading statement (`SELECT`, `FROM`, `WITH`, `PIVOT`, `DESCRIBE`, `SUMMARIZE`, `SHOW`, `EXPLAIN`).

    The query sees the files that exist when it starts. Raises `UserError` for other statements, for invalid SQL, and
    for unknown tables and columns.
    """
    try:
        sql.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"The query is not valid UTF-8 at character {error.start + 1}. Remove that byte.") from None
    with tempfile.TemporaryDirectory(prefix="telescope-query-") as folder, _connect(runs, Path(folder)) as connection:

        def read(files: Files) -> Result:
            _create_views(connection, runs, _mentioned(sql), files, with_texts=bool(_TEXTS.search(sql)))
            return _fetch(connection, sql)

        try:
            _check_reading(connection, sql)
            return read_again(read)
        except duckdb.Error as error:
            raise UserError(plain(_explain(str(error), sql))) from error


def _create_views(
    connection: Connection, runs: Sequence[Run], names: Sequence[str], files: Files, *, with_texts: bool
) -> None:
    """Creates the views `names`. Adds the files that they read to `files`."""
    for name in names:
        selects = [f"SELECT '' AS run, * FROM ({_empty(name)})"]
        for place, run in enumerate(runs):
            if name in TABLES and not TABLES[name].latest_wins:
                part = _visible_rows(connection, run, name, place, files)
                if name == "samples" and with_texts:
                    part = _with_texts(connection, run, part, place, files)
            else:
                data = run.in_flight() if name == IN_FLIGHT else run.table(name)
                if name == "runs":  # as it is now
                    status = pa.array([run.status] * data.num_rows, pa.string())
                    data = data.set_column(data.schema.get_field_index("status"), "status", status)
                part = load(connection, f"{name}_{place}", data)
            selects.append(f"SELECT {sql_text(run.label)} AS run, * FROM ({part})")
        connection.execute(f"CREATE OR REPLACE VIEW {name} AS " + " UNION ALL BY NAME ".join(selects))


def _fetch(connection: Connection, sql: str) -> Result:
    relation = connection.sql(sql)
    columns = tuple(relation.columns)
    zoned = [_WITH_TIME_ZONE in str(column_type) for column_type in relation.types]
    if any(zoned):
        # DuckDB needs another package to convert these to Python times, so they are returned as text.
        shown = [f"#{place + 1}{'::VARCHAR' if as_text else ''}" for place, as_text in enumerate(zoned)]
        relation = relation.project(", ".join(shown))
    return Result(columns, relation.fetchall())


def read_again(read: Callable[[Files], R]) -> R:
    """Returns the result of `read`, which appends the files that it reads to its argument.

    Calls it again if a file was compacted meanwhile, so that another file has its rows, and without damaged files.
    """
    for attempt in range(READ_ATTEMPTS):
        files: Files = []
        try:
            return read(files)
        except duckdb.Error as error:
            again = isinstance(error, duckdb.IOException) and not all(path.exists() for _, path in files)
            for run, path in () if again or isinstance(error, _ABOUT_THE_QUERY) else files.copy():
                if not is_readable(path):
                    run.exclude(path)
                    again = True
            if attempt == READ_ATTEMPTS - 1 or not again:
                raise
    raise AssertionError("the last attempt returns or raises")


def file_pattern(path: Path) -> str:
    """Returns a path that DuckDB does not read as a pattern."""
    return _GLOB.sub(r"[\g<0>]", str(path))


def _visible_rows(connection: Connection, run: Run, name: str, place: int, files: Files) -> str:
    """Returns a query for the rows of a table that are not superseded."""
    rows = all_rows(connection, run, name, place, files)
    superseded = superseded_sql(run.cutoffs())
    if TABLES[name].by_step:
        return f"SELECT * FROM ({rows}) WHERE NOT {superseded}"
    if TABLES[name].of_sample and superseded != "false":
        samples = all_rows(connection, run, "samples", place, files)
        hidden = f"SELECT attempt, sample_id FROM ({samples}) WHERE {superseded}"
        return f"SELECT * FROM ({rows}) ANTI JOIN ({hidden}) USING (attempt, sample_id)"
    return rows


def all_rows(connection: Connection, run: Run, name: str, place: int, files: Files) -> str:
    """Returns a query for all rows. Loads the rows in tails into the database.

    Adds the blocks that the query reads to `files`. `place` distinguishes the runs of one connection.
    """
    found = run.table_files(name)
    tails = [file.rows for file in found if file.rows is not None]
    blocks = [file for file in found if file.rows is None]
    files += [(run, block.path) for block in blocks]
    rows = block_rows(name, blocks)
    if tails:
        tail = load(connection, f"{name}_{place}", pa.concat_tables(tails, promote_options="default"))
        rows = f"{rows} UNION ALL BY NAME {tail}"
    return rows


def _with_texts(connection: Connection, run: Run, samples: str, place: int, files: Files) -> str:
    """Returns a query for rows of `samples` with the texts of prompts and completions."""
    prompts, turns = (all_rows(connection, run, name, place, files) for name in ("prompts", "turns"))
    answers = "SELECT attempt, sample_id, string_agg(text, chr(10) ORDER BY turn) AS answers"
    return (
        f"SELECT s.* REPLACE (p.text AS prompt_text, t.answers AS completion_text) FROM ({samples}) s "
        f"LEFT JOIN ({prompts}) p USING (attempt, prompt_key) LEFT JOIN ({answers} FROM ({turns}) "
        "WHERE role = 'assistant' AND restarts IS NULL GROUP BY attempt, sample_id) t USING (attempt, sample_id)"
    )


def block_rows(name: str, blocks: Sequence[TableFile]) -> str:
    """Returns a query for the rows of some blocks, with all columns of the table."""
    rows = f"({_empty(name)})"
    if blocks:
        listed = ", ".join(sql_text(file_pattern(block.path)) for block in blocks)
        rows = f"{rows} UNION ALL BY NAME FROM read_parquet([{listed}], union_by_name = true)"
    return rows


def load(connection: Connection, name: str, data: pa.Table) -> str:
    """Copies a table into a database. Returns a query for its rows."""
    # SHOW TABLES does not list tables of another schema.
    connection.execute("CREATE SCHEMA IF NOT EXISTS loaded")
    connection.register("copied", data)
    connection.execute(f"CREATE OR REPLACE TABLE loaded.{name} AS FROM copied")
    connection.unregister("copied")
    return f"FROM loaded.{name}"


def _empty(name: str) -> str:
    """Returns a query for no rows with the current columns, some of which older files may lack."""
    columns = TABLES.get(name, TABLES["samples"]).columns
    typed = ", ".join(f'NULL::{type_name(column.type)} AS "{column.name}"' for column in columns)
    return f"SELECT {typed} LIMIT 0"


def describe_tables() -> str:
    """Returns a description of every table and column, for a terminal."""
    lines = []
    for name in sorted(TABLES):
        table = TABLES[name]
        lines.append(f"{name}: {table.doc}")
        width = max(len(column.name) for column in table.columns)
        for column in table.columns:
            lines.append(f"  {column.name:<{width}}  {type_name(column.type):<21}  {column.doc}")
        lines.append("")
    lines.append(f"{IN_FLIGHT}: the samples that are being generated now, in the columns of samples.")
    lines.append("Every table also has the column run: the path of the run below the root.")
    return "\n".join(lines)


def _connect(runs: Sequence[Run], folder: Path) -> Connection:
    """Opens a database that can read only the tables of `runs`. Large queries spill into `folder`.

    DuckDB lets queries read its spill folder, which is `.tmp` in the working directory by default.
    """
    connection = duckdb.connect(":memory:", config={**OFFLINE, "temp_directory": str(folder)})
    folders = [run.files.tables for run in runs]
    # DuckDB compares paths as text, both as written and as expanded.
    allowed = dict.fromkeys(text for folder in folders for text in (str(folder), file_pattern(folder)))
    connection.execute(f"SET allowed_directories = [{', '.join(map(sql_text, allowed))}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def _check_reading(connection: Connection, sql: str) -> None:
    """Raises `UserError` unless `sql` is one statement that only reads."""
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise UserError(f"The query has {len(statements)} statements. Give one.")
    words, inner = _without_explain(sql)
    kind = connection.extract_statements(inner)[0].type.name
    # DuckDB expands a PIVOT without an IN list into several statements, whatever it is part of.
    if kind != "SELECT" and not (kind == "MULTI" and words[0] in _READING_WORDS):
        raise UserError(
            f"{words[0].upper()} is not possible: a record is read-only. Use a statement that reads, such as SELECT, "
            "DESCRIBE or SUMMARIZE; `--format csv` writes an answer to a file."
        )


def _without_explain(sql: str) -> tuple[list[str], str]:
    """Returns the lower-case words and the text of a statement without leading comments and EXPLAIN."""
    text = sql.encode()
    starts = [start for start, kind in duckdb.tokenize(sql) if kind != duckdb.token_type.comment]
    words = [_WORD.match(text, start)[0].decode(errors="replace").lower() for start in starts]  # type: ignore[index]
    first = 0
    if words[0] == "explain":
        first = 2 if words[1] == "analyze" else 1
        if words[first] == "(" and words[first + 1] not in _READING_WORDS:  # options
            first = words.index(")") + 1
    return words[first:], text[starts[first] :].decode()


def _mentioned(sql: str) -> list[str]:
    """Returns the views whose names occur in a query. The files of other views are not opened."""
    words = {word.lower() for word in re.findall(r"\w+", sql)}
    wanted = [name for name in VIEWS if name in words]
    # SHOW TABLES and the information schema list all views.
    return list(VIEWS) if words & {"show", "information_schema", "duckdb_tables", "duckdb_views"} else wanted


def _explain(message: str, sql: str) -> str:
    """Returns DuckDB's message, with the existing names if a name is wrong."""
    table = _UNKNOWN_TABLE.search(message)
    if table is not None:
        return f"There is no table {table[1]!r}.{did_you_mean(table[1], VIEWS)}\nThe tables are {', '.join(VIEWS)}."
    column = _UNKNOWN_COLUMN.search(message)
    if column is not None:
        return _unknown_column(sql, column[1])
    if "file system operations are disabled" in message:
        return f"A query reads the tables of runs and no other files ({', '.join(VIEWS)}).\n{message}"
    return message


def _unknown_column(sql: str, column: str) -> str:
    names = [name for name in _mentioned(sql) if name != "run"] or list(VIEWS)
    lines = [f"There is no column {column!r}."]
    known = {name: ("run", *TABLES.get(name, TABLES["samples"]).column_names) for name in names}
    lines[0] += did_you_mean(column, [each for columns in known.values() for each in columns])
    for name, columns in known.items():
        lines.append(f"Columns of {name}: {', '.join(columns)}.")
    maps = [f"{name}.metrics" for name in names if name in ("steps", "samples", "evals")]
    if maps:
        lines.append(f"Metrics are entries of a map: {maps[0].partition('.')[2]}['{column}'] in {' and '.join(maps)}.")
    return "\n".join(lines)


def sql_text(value: str) -> str:
    """Returns a string as an SQL literal."""
    return "'" + value.replace("'", "''") + "'"
