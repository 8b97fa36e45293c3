"""`telescope config`: explain fields, print the resolved configuration, print the defaults."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from telescope.config import load_config
from telescope.config.generate import default_yaml, resolved_yaml
from telescope.config.sections import SECTIONS


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "config",
        help="explain configuration fields, show what a file resolves to",
        epilog="examples: telescope config explain learning_rate evals.num_samples Trainer; "
        "telescope config show configs/examples/demo_countdown.yaml --set seed=1",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    explain = actions.add_parser("explain", help="what a field or section means; all fields without a name")
    explain.add_argument(
        "names",
        nargs="*",
        metavar="FIELD",
        help="field, key of an entry, or section: learning_rate, evals.num_samples, Trainer",
    )
    explain.set_defaults(func=_explain)

    show = actions.add_parser("show", help="the whole configuration that a file resolves to, as YAML")
    show.add_argument("config", type=Path, help="YAML file of the run")
    show.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field; repeatable")
    show.set_defaults(func=_show)

    defaults = actions.add_parser("defaults", help="every field with its default and description, as YAML")
    defaults.set_defaults(func=_defaults)


def _explain(arguments: argparse.Namespace) -> int:
    from telescope.cli.field_help import WIDEST, explain, print_sections

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDEST)  # a pipe has no width of its own
    if not arguments.names:
        print_sections(console, SECTIONS)
    for name in arguments.names:
        explain(console, name)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    loaded = load_config(arguments.config, [f"--{assignment}" for assignment in arguments.set])
    for note in loaded.notes:
        print(note, file=sys.stderr)
    print(resolved_yaml(loaded.config), end="")
    return 0


def _defaults(_: argparse.Namespace) -> int:
    print(default_yaml(), end="")
    return 0
