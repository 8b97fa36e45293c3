"""Implements `telescope tui`, which shows a run in the terminal. Parses arguments; `telescope.tui` is the view."""

import argparse
import sys

from telescope.cli.main import CommandParser
from telescope.cli.query import LATEST, choose_runs
from telescope.cli.runs import add_root
from telescope.errors import UserError


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="telescope tui",
        description="Watch a run in the terminal, live or afterwards, over SSH for example: verdict and health, "
        "metrics, answers, and logs. It only reads, and does not slow a run.",
        epilog="keys:\n"
        "  1 2 3 4   overview, metrics, rollouts, logs\n"
        "  /         filter: metrics by name, answers by words or step=40..50 status=kept, lines by words\n"
        "  j k       move in a list      space   keep a plot      s   sort answers\n"
        "  e         evals or training samples, lowest level of log lines\n"
        "  f         follow       q         quit\n\n"
        "examples:\n"
        "  telescope tui                 the newest run in ./runs\n"
        "  telescope tui runs/demo       this run",
    )
    parser.add_argument(
        "run", nargs="?", default=LATEST, metavar="RUN_DIR", help="a run: its folder, its name, or latest (the default)"
    )
    add_root(parser)
    parser.set_defaults(imports=("telescope.tui.app",))
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Shows the run until the user presses q. Returns the exit code."""
    (chosen,) = choose_runs([arguments.run], arguments.root)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("telescope tui needs a terminal. `telescope ui` serves pages, `telescope query` prints tables.")
    from telescope.tui.app import RunApp

    app = RunApp(chosen)
    app.run()
    return app.return_code or 0
