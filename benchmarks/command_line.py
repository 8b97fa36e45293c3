"""Shared by the benchmarks: their command lines, tables and files of results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from measure import REPOSITORY
from rich.console import Console
from rich.table import Table


def parser_of(description: str | None, quick: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Returns a parser with `--quick`, which `quick` describes, and `--json`."""
    parser = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, with machine and commit")
    return parser


def positive(text: str) -> int:
    """Parses a positive integer of a command line."""
    if not text.isdecimal() or not (number := int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return number


def require_gpus(parser: argparse.ArgumentParser, *, quick: bool) -> None:
    """Exits with a usage error without a GPU, unless `quick`."""
    import torch

    if not quick and not torch.cuda.is_available():
        parser.error("no GPU was found; --quick runs on the CPU")


def fields_of(settings: Sequence[str]) -> dict[str, Any]:
    """Parses `name=value` pairs of a command line; values are JSON, else text."""
    fields: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        try:
            fields[name] = json.loads(value)
        except json.JSONDecodeError:
            fields[name] = value
    return fields


def command() -> str:
    """Returns the command of this benchmark."""
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def write_json(path: Path | None, report: Any) -> None:
    """Writes a report, if there is a path, without the path of the sources, which is irrelevant to a reader."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1).replace(f"{REPOSITORY}/", "") + "\n")


def show(
    titles: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, *, texts: int = 1, width: int = 120
) -> None:
    """Prints a table whose first `texts` columns are texts, and the others numbers. `width` is that of a file."""
    table = Table(title=title)
    for place, heading in enumerate(titles):
        table.add_column(heading, justify="left" if place < texts else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else width).print(table)
