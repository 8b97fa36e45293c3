"""The tables of a run's record, as `tables.toml` defines them.

Owns which tables there are. Does not own how rows are written (`recorder`, `table_writer`) or read (`reader`).
"""

import tomllib
from pathlib import Path

from telescope.record.schema import ATTEMPT, TYPES, Column, Keep, Table

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
