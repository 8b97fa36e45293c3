"""Implements `telescope compact`, which merges files of ended runs. Parses and prints; `record.compact` merges."""

import argparse

from telescope.cli.main import EXIT_FAILED, CommandParser
from telescope.cli.query import choose_runs
from telescope.cli.runs import add_root, warn_of_unreadable
from telescope.errors import RunError
from telescope.record.compact import compact, file_sizes
from telescope.utils.text import plain


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="telescope compact",
        description="Merge the files of each table of ended runs into few large ones, for archives and for faster "
        "queries. Rows and their order stay. A live run is refused. May be interrupted at any time and repeated. "
        "Exits with 1 when files are damaged; those stay.",
        epilog="example: telescope compact latest",
    )
    parser.add_argument("run", nargs="+", metavar="RUN", help="a run: its folder, its name, or latest")
    add_root(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Compacts the runs and prints what changed. Returns the exit code."""
    runs = choose_runs(arguments.run, arguments.root)
    for each in runs:
        before = file_sizes(each)
        try:
            compact(each)
        except OSError as error:
            folder = str(each.files.run_dir)
            raise RunError(
                f"{folder!r} cannot be compacted: {error}. Nothing is lost. Free space or fix its permissions, and try "
                "again."
            ) from error
        print(plain(f"{each.label}: {_size(before)} -> {_size(file_sizes(each))}"))
    return EXIT_FAILED if warn_of_unreadable(runs, "the record") else 0


def _size(sizes: list[int]) -> str:
    return f"{len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB"
