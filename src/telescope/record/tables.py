"""Defines the tables of a run's record from `tables.toml`: columns, types, and importance of rows.

Owns the list of tables. Does not own how rows are written (`recorder`, `table_writer`) or read (`reader`).
"""

import tomllib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import pyarrow as pa

NUMBERS = pa.map_(pa.string(), pa.float64())
TEXTS = pa.map_(pa.string(), pa.string())
TEXT_LIST = pa.list_(pa.string())
INT32_LIST = pa.list_(pa.int32())

TYPES: dict[str, pa.DataType] = {
    "text": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_(), "numbers": NUMBERS,
    "texts": TEXTS, "text_list": TEXT_LIST, "int32_list": INT32_LIST, "float32_list": pa.list_(pa.float32()),
    "number_list": pa.list_(pa.float64()), "boolean_list": pa.list_(pa.bool_()),
}  # fmt: skip
"""Arrow types, by their names in `tables.toml`."""


class Keep(IntEnum):
    """Importance of a row. When memory runs out, the lowest is dropped first."""

    TELEMETRY = 0
    """Spans, gauges and log lines: dropped first."""
    DETAIL = 1
    """Turns, tool calls, notes and tokens: long."""
    RESULT = 2
    """Samples, prompts, groups and statistics of steps: dropped only when no other rows are left."""
    ALWAYS = 3
    """Runs, attempts, steps, evals and alerts: never dropped. At most a few rows per second: memory stays bounded."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: name, Arrow type and description."""

    name: str
    type: pa.DataType
    doc: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the record. `key` identifies a row; `by_step`: a later attempt can supersede its rows."""

    name: str
    doc: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    keep: Keep
    by_step: bool = False
    of_sample: bool = False
    """Whether rows are hidden together with their sample."""
    latest_wins: bool = False
    """Whether rows with the same key are versions, of which readers show only the newest."""
    once: bool = False
    """Whether the recorder writes only the first row with a key."""

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of a new file."""
        return pa.schema([pa.field(column.name, column.type) for column in self.columns])

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names, in the order of the schema."""
        return tuple(column.name for column in self.columns)


ATTEMPT = Column(
    "attempt", TYPES["integer"], "Start of the run that wrote this row, counted from 1. Filled in by the recorder."
)


def type_name(arrow_type: pa.DataType) -> str:
    """Returns a type in DuckDB's notation: `bigint`, `double`, `map(varchar, double)`, `integer[]`."""
    if pa.types.is_map(arrow_type):
        return f"map({type_name(arrow_type.key_type)}, {type_name(arrow_type.item_type)})"
    if pa.types.is_list(arrow_type):
        return f"{type_name(arrow_type.value_type)}[]"
    names = {"string": "varchar", "int64": "bigint", "int32": "integer", "bool": "boolean"}
    return names.get(str(arrow_type), str(arrow_type))


DEFINITIONS = Path(__file__).with_suffix(".toml")


def _read_tables() -> dict[str, Table]:
    tables = {}
    for name, entry in tomllib.loads(DEFINITIONS.read_text(encoding="utf-8")).items():
        columns = [Column(column, TYPES[kind], doc) for column, (kind, doc) in entry.pop("columns").items()]
        key = entry.pop("key")
        if name != "runs":
            columns, key = [ATTEMPT, *columns], ["attempt", *key]
        keep = Keep[entry.pop("keep").upper()]
        tables[name] = Table(name, entry.pop("about"), tuple(columns), tuple(key), keep, **entry)
    return tables


TABLES = _read_tables()
"""All tables, in the order of writing."""

PROMPT_KEY_DIGITS = 12
"""Hex digits of `prompt_key`."""

ROLLOUT_TABLES = ("groups", "prompts", "samples", "eval_samples", "turns", "tool_calls", "info", "tokens")
"""Tables that grow with the samples."""

COLUMN_NAMES: dict[str, frozenset[str]] = {name: frozenset(table.column_names) for name, table in TABLES.items()}
"""Column names of each table."""

IN_FLIGHT = "in_flight"
"""Name of the view over the samples that are being generated, with the columns of `samples`."""
