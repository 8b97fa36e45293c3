"""Implements `telescope query`, which runs SQL over the tables of runs. Parses and prints; `record.query` queries."""

import argparse
import csv
import json
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from telescope.cli.main import EXIT_FAILED, CommandParser
from telescope.cli.runs import add_root, folders_of_runs, runs_in, warn_of_unreadable
from telescope.errors import UserError
from telescope.record.query import Result, describe_tables, execute
from telescope.record.reader import Run, is_run
from telescope.utils.data import to_json_value
from telescope.utils.text import did_you_mean, plain, pluralize, user_path

MAX_TERMINAL_ROWS = 500  # laid out in a second or two
LATEST = "latest"  # value of `--run` for the run that started last


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="telescope query",
        description="Run a DuckDB query over the tables of one run or of all runs in a folder, including live ones. "
        "Exits with 1 when files are damaged and the answer lacks their rows.",
        epilog="example: telescope query \"select step, reward_mean, metrics['entropy'] from steps\" --run latest",
    )
    parser.add_argument("sql", nargs="?", help="one reading statement: SELECT, FROM, WITH, PIVOT, DESCRIBE, SUMMARIZE")
    parser.add_argument("--tables", action="store_true", help="describe the tables and their columns")
    parser.add_argument(
        "--run", action="append", metavar="PATH|NAME", help="only this run: its folder, its name, or latest; repeatable"
    )
    add_root(parser)
    parser.add_argument("--format", choices=("table", "csv", "json"), default="table", help="(default: table)")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Runs the query and prints the result. Returns the exit code."""
    if arguments.tables:
        print(describe_tables())
        return 0
    if not arguments.sql:
        raise UserError('No query is given. Try: telescope query "select * from runs", or telescope query --tables')
    runs = choose_runs(arguments.run or [], arguments.root)
    result = execute(runs, arguments.sql)
    if not arguments.run:
        where = ", ".join(map(str, folders_of_runs(arguments.root)))
        print(plain(f"telescope: {pluralize(len(runs), 'run')} in {where}"), file=sys.stderr)
    print_result(result, arguments.format, sys.stdout)
    return EXIT_FAILED if warn_of_unreadable(runs, "the answer") else 0


def choose_runs(wanted: list[str], root: Path | None) -> list[Run]:
    """Returns the named runs, or all runs in `root`, which defaults to the folders where runs are written.

    A name is a folder, a name below `root`, or `latest`. Prints to stderr which run is `latest`. Raises `UserError` for
    an unknown or ambiguous name.
    """
    if wanted and all(is_run(user_path(name)) for name in wanted):
        return [Run(user_path(name)) for name in dict.fromkeys(wanted)]
    runs, where = runs_in(root), ", ".join(map(str, folders_of_runs(root)))
    if not runs:
        named = f"{_why_no_run(wanted[0])} " if wanted and wanted[0] != LATEST else ""
        raise UserError(f"{named}No runs in {where!r}. Set --root to the folder of the runs, or name that of one run.")
    return [_choose(name, runs) for name in dict.fromkeys(wanted)] if wanted else runs


def _choose(name: str, runs: list[Run]) -> Run:
    if is_run(user_path(name)):
        return Run(user_path(name))
    if name == LATEST:
        newest = max(runs, key=lambda run: run.info.started_at if run.info else 0.0)
        print(plain(f"telescope: the latest run is {newest.files.run_dir}"), file=sys.stderr)
        return newest
    matching = [run for run in runs if run.label == name]
    matching = matching or [run for run in runs if run.info and name in (run.info.name, run.info.run_id)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        labels = ", ".join(run.label for run in matching)
        raise UserError(f"{len(matching)} runs have the name {name!r}. Use one of the folders: {labels}.")
    known = sorted({LATEST} | {run.label for run in runs} | {run.info.name for run in runs if run.info})
    hint = did_you_mean(Path(name).name, known)
    raise UserError(f"{_why_no_run(name)}{hint} `telescope runs` lists the runs.")


def _why_no_run(name: str) -> str:
    if user_path(name).exists():
        return f"{name!r} is not a run: it has neither run.json nor tables/."
    return f"The folder {name!r} does not exist." if "/" in name else f"There is no run {name!r}."


def print_result(result: Result, form: str, out: TextIO) -> None:
    """Prints a result as `table`, `csv` or `json`."""
    if form == "json":
        json.dump(to_json_value(result.to_dicts()), out, indent=1)
        out.write("\n")
    elif form == "csv":
        # Files get exact values. A terminal would interpret control sequences.
        shown = plain if out.isatty() else str
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([shown(name) for name in result.columns])
        writer.writerows([shown(_cell(value, exact=True)) for value in row] for row in result.rows)
    else:
        _print_table(result, out)


def _print_table(result: Result, out: TextIO) -> None:
    shown = result.rows[:MAX_TERMINAL_ROWS] if out.isatty() else result.rows
    rows = [[plain(_cell(value, exact=False)) for value in row] for row in shown]
    names = [plain(name) for name in result.columns]
    is_number = [
        all(row[place] is None or isinstance(row[place], int | float) for row in shown) for place in range(len(names))
    ]
    if out.isatty():  # folds long cells
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name, number in zip(names, is_number, strict=True):
            table.add_column(Text(name), justify="right" if number else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        Console(file=out).print(table)
        if len(shown) < len(result.rows):
            more = f"telescope: {len(shown):,} of {len(result.rows):,} rows. Use LIMIT, or write all to a file"
            print(more, file=sys.stderr)
    else:  # lines are as long as needed; rich takes milliseconds for each
        lines = [
            part for row in [names, *rows] for part in zip_longest(*(cell.split("\n") for cell in row), fillvalue="")
        ]
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            padded = [
                " " * (width - cell_len(cell)) + cell if number else cell + " " * (width - cell_len(cell))
                for cell, width, number in zip(line, widths, is_number, strict=True)
            ]
            out.write("  ".join(padded).rstrip() + "\n")
    if not rows:
        out.write("(no rows)\n")


def _cell(value: Any, *, exact: bool) -> str:
    """Returns a value as text, rounded unless `exact`."""
    if value is None:
        return ""
    if isinstance(value, float) and not exact:
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.13g}"  # a Unix time with its milliseconds
    if isinstance(value, dict | list):
        return json.dumps(to_json_value(value), ensure_ascii=False)
    return str(value)
