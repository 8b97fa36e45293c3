"""`telescope doctor`: what is installed, what this machine has, and the fix for whatever is missing.

Arguments and printing only; `cli.doctor_checks` looks. Exit code 0: a run can start here; 1: something prevents it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from telescope.cli.doctor_checks import Check, Status, can_train, run_checks

_MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "note": ("note", "yellow"),
    "bad": ("missing", "bold red"),
}


def add_parser(subparsers: Any) -> None:
    """Register the subcommand on `telescope`'s parser."""
    parser = subparsers.add_parser(
        "doctor",
        help="say what works on this machine, and the fix for what does not",
        description="Look at the packages, devices, memory, ports and services that a run needs. Starts and changes "
        "nothing. Exit code 0: a run can start here; 1: something marked `missing` keeps it from it.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a table")
    parser.add_argument("--no-hub", action="store_true", help="ask nothing of the network")
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what was found. Returns the exit status."""
    checks = run_checks(hub=not arguments.no_hub)
    able = can_train(checks)
    if arguments.json:
        print(json.dumps({"can_train": able, "checks": [dataclasses.asdict(check) for check in checks]}, indent=1))
    else:
        print_checks(checks, Console())
    return 0 if able else 1


def print_checks(checks: list[Check], console: Console) -> None:
    """A table of all checks, then the verdict."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("what", no_wrap=True)
    table.add_column("found, and the fix", overflow="fold")
    for check in checks:
        mark, style = _MARKS[check.status]
        table.add_row(Text(mark, style=style), check.name, Text(check.found))
        if check.fix:
            table.add_row("", "", Text(f"-> {check.fix}", style=style))
    console.print(table)
    console.print()
    if can_train(checks):
        console.print(Text("Training can run on this machine.", style="bold green"))
    else:
        missing = ", ".join(check.name for check in checks if check.status == "bad")
        console.print(Text(f"Training cannot run on this machine yet: {missing}.", style="bold red"))
