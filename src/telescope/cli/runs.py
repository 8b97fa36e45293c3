"""Implements `telescope runs`, which lists runs, newest first. Parses and prints; `record.reader` reads."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from telescope.cli.main import CommandParser
from telescope.errors import UserError
from telescope.record.reader import Run, RunSummary, find_runs, newest_first
from telescope.record.run_info import STATUS_WORDS
from telescope.utils.text import plain, user_path

DEFAULT_ROOT = Path("runs")  # folder of the runs, unless `run_dir` is set
RUN_DIR_VARIABLE = "TELESCOPE_RUN_DIR"  # environment variable that fills in `run_dir`
WATCH_SECONDS = 5.0
_NO_LIMIT = 100_000  # more columns than any table needs

_STATUS_STYLES = {"live": "bold green", "finished": "", "stopped": "yellow", "failed": "red", "dead": "red"}


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="telescope runs",
        description="List the runs in a folder, newest first: status, steps (of how many), mean reward of the first "
        "and last 10 steps (of each half, if fewer than 20), held-out accuracy before and after. A run stopped "
        "unexpectedly if its process exited without writing an end; --json calls it dead.",
    )
    parser.add_argument("folder", nargs="?", type=user_path, metavar="ROOT", help="folder of the runs, or one run")
    add_root(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON array instead of a table")
    parser.add_argument("--watch", action="store_true", help="show the table anew every 5 seconds, until Ctrl-C")
    return parser


def add_root(parser: argparse.ArgumentParser) -> None:
    """Adds `--root` to the parser of a command that looks for runs."""
    parser.add_argument("--root", type=user_path, help=f"folder of the runs (default: runs and ${RUN_DIR_VARIABLE})")


def folders_of_runs(root: Path | None) -> list[Path]:
    """Returns the folders to search: `root`, or the default folders of runs. Some may not exist."""
    if root is not None:
        return [root]
    configured = os.environ.get(RUN_DIR_VARIABLE)
    return [DEFAULT_ROOT, *([user_path(configured)] if configured else [])]


def runs_in(root: Path | None) -> list[Run]:
    """Returns the distinct runs in `folders_of_runs`. Raises `UserError` if the user gave a missing `root`."""
    folders = [folder for folder in folders_of_runs(root) if root is not None or folder.is_dir()]
    found = {run.files.run_dir.resolve(): run for folder in reversed(folders) for run in find_runs(folder)}
    return list(found.values())


def run(arguments: argparse.Namespace) -> int:
    """Prints the runs, repeatedly with `--watch`. Returns the exit code."""
    while arguments.watch:
        Console().clear()
        print_runs(arguments)
        time.sleep(WATCH_SECONDS)
    return print_runs(arguments)


def print_runs(arguments: argparse.Namespace) -> int:
    """Prints the runs once. Returns the exit code."""
    if arguments.folder and arguments.root:
        raise UserError(f"Give {arguments.folder} or --root {arguments.root}, not both.")
    root = arguments.folder or arguments.root
    runs = runs_in(root)
    summaries = newest_first(run.summary() for run in runs)
    if arguments.json:
        print(json.dumps([as_json(summary) for summary in summaries], indent=1))
    elif not summaries:
        where = ", ".join(map(str, folders_of_runs(root)))
        print(f"No runs in {where}. `telescope train --config F` creates one; --root sets another folder.")
    else:
        Console(width=_NO_LIMIT).print(as_table(summaries))  # so that paths are not wrapped
        for summary in summaries:
            if summary.error:
                Console().print(Text(plain(f"{summary.label}: {summary.error}"), style="red"), soft_wrap=True)
    for run in runs:
        if (problem := run.config_problem) is not None:
            print(plain(f"telescope: {problem}"), file=sys.stderr)
    warn_of_unreadable(runs, "the list")
    return 0


def warn_of_unreadable(runs: Iterable[Run], what: str) -> bool:
    """Prints to stderr how many unreadable files `what` lacks. Returns whether there are any."""
    num_unreadable = sum(len(run.unreadable) for run in runs)
    if num_unreadable:
        files = "1 file of a table" if num_unreadable == 1 else f"{num_unreadable} files of tables"
        print(f"telescope: {what} is incomplete: {files} cannot be read (see above)", file=sys.stderr)
    return num_unreadable > 0


def as_json(summary: RunSummary) -> dict[str, Any]:
    """Returns a run as JSON values. Times are Unix seconds."""
    values = {name: getattr(summary, name) for name in RunSummary.__slots__}
    return {**values, "path": str(summary.path.resolve()), "tags": list(summary.tags)}


def as_table(summaries: list[RunSummary]) -> Table:
    """Returns the runs as a table for a terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (
        *(("name", "left"), ("status", "left"), ("started", "left"), ("steps", "right")),
        *(("reward", "right"), ("held-out", "right"), ("duration", "right"), ("path", "left")),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for summary in summaries:
        table.add_row(
            Text(plain(summary.name)),
            Text(STATUS_WORDS.get(summary.status, summary.status), style=_STATUS_STYLES.get(summary.status, "")),
            "-" if summary.started_at is None else f"{datetime.fromtimestamp(summary.started_at):%Y-%m-%d %H:%M}",
            # The total is left out when all steps are finished.
            str(summary.steps)
            if summary.num_steps in (None, summary.steps)
            else f"{summary.steps}/{summary.num_steps}",
            _change(summary.reward_first, summary.reward_last),
            _change(summary.heldout_before, summary.heldout_after),
            duration(summary.duration),
            Text(plain(str(summary.path))),
        )
    return table


def duration(seconds: float | None) -> str:
    """Formats seconds: `12 s`, `4 min 05 s`, `3 h 20 min`."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _change(first: float | None, last: float | None) -> str:
    if first is None and last is None:
        return "-"
    return " -> ".join("-" if value is None else f"{value:.3g}" for value in (first, last))
