"""Implements `telescope config`, which explains and prints fields, and prints the help of `telescope train`."""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from telescope.cli.main import CommandParser, make_console
from telescope.config import load_config
from telescope.config.base import Section
from telescope.config.generate import FieldDescription, default_yaml, describe_all, describe_section, resolved_yaml
from telescope.config.messages import ENTRY_TYPES
from telescope.config.other_names import hint
from telescope.config.rules import RULES
from telescope.config.schema import SECTIONS
from telescope.errors import UserError
from telescope.utils.text import did_you_mean, user_path


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="telescope config",
        epilog="examples: telescope config explain learning_rate evals.num_samples Trainer; "
        "telescope config show configs/examples/demo_countdown.yaml --set seed=1",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    explain = actions.add_parser("explain", help="what a field or section means; all fields without a name")
    explain.add_argument("names", nargs="*", metavar="FIELD", help="such as learning_rate, evals.num_samples, Trainer")
    explain.set_defaults(func=_explain)

    show = actions.add_parser("show", help="the whole configuration that a file resolves to, as YAML")
    show.add_argument("config", type=user_path, help="YAML file of the run")
    show.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field; repeatable")
    show.set_defaults(func=_show)

    defaults = actions.add_parser("defaults", help="every field with its default and description, as YAML")
    defaults.set_defaults(func=lambda _: print(default_yaml(), end=""))
    return parser


def _explain(arguments: argparse.Namespace) -> int:
    console = make_console()
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


WIDEST = 118  # columns; longer lines of prose are hard to read


MOST_USED = (
    "model", "environments", "evals", "run_dir", "inference_num_workers", "trainer_num_workers", "number_of_steps",
    "prompts_batch_size_for_trainer", "group_size", "max_tokens", "learning_rate", "max_async_rollout",
)  # fmt: skip
"""The fields that users change first, which the short help shows."""


def print_train_help(parser: CommandParser, console: Console, *, all_fields: bool = False) -> None:
    """Prints the help of `telescope train`, with few or all fields."""
    print(parser.format_help())
    if all_fields:
        print_sections(console, SECTIONS)
        console.print("`telescope config explain FIELD` describes one in full.", style="dim", width=WIDEST)
        return
    console.print(Text("Most used fields", style="bold cyan"))
    grid = _grid()
    described = {field.name: field for field in describe_all()}
    for name in MOST_USED:
        _add_field(grid, described[name])
    console.print(grid)
    console.print(f"\nThe {len(described)} fields come in sections, which `telescope config explain SECTION` lists:")
    console.print(Text(", ".join(section.TITLE for section in SECTIONS)), width=WIDEST)
    console.print("`telescope config explain FIELD` explains one field, `telescope train --help-all` lists them all.")


def print_sections(console: Console, sections: Sequence[type[Section]]) -> None:
    """Prints the fields of each section with default and first sentence."""
    for section in sections:
        console.print(Text(section.TITLE, style="bold cyan"))
        grid = _grid()
        for field in describe_section(section):
            _add_field(grid, field)
        console.print(grid)
        console.print()


def _add_field(grid: Table, field: FieldDescription) -> None:
    name = Text(f"--{field.name}")
    default = field.default_text
    short = default if len(default) <= 24 else f"{default[:21]}..."
    value = Text(field.type if field.required or field.default in (None, [], {}) else short)
    grid.add_row(name, value, Text(field.summary))


def explain(console: Console, name: str) -> None:
    """Prints a field, a section, or a key of a list's entries.

    Keys have the form `evals.num_samples` or `evals[0].num_samples`.

    Raises `UserError` for any other name.
    """
    wanted = re.sub(r"\[\d*\]", "", name.strip().lstrip("-")).replace("-", "_")
    for field in describe_all():
        if field.name == wanted:
            _print_field(console, field)
            return
    entries, dot, key = wanted.partition(".")
    if dot and entries in ENTRY_TYPES:
        keys = {field.name: field for field in describe_section(ENTRY_TYPES[entries])}
        if key not in keys:
            near = did_you_mean(key, keys)
            raise UserError(f"An entry of {entries} has no key '{key}'.{near} The keys are {', '.join(keys)}")
        place = f"a key of each entry of {entries}"
        _print_field(console, replace(keys[key], name=f"{entries}[].{key}", section=place))
        return
    for section in SECTIONS:
        if section.TITLE.lower() == name.strip().lower():
            print_sections(console, [section])
            return
    known = [field for section in SECTIONS for field in section.model_fields]
    known += [f"{entries}.{key}" for entries, kind in ENTRY_TYPES.items() for key in kind.model_fields]
    raise UserError(f"There is no field or section '{name}'.{hint(wanted, known)} `telescope config explain` lists all")


def _print_field(console: Console, field: FieldDescription) -> None:
    console.print(Text.assemble((field.name, "bold"), ("  ", ""), (field.section, "dim")))
    console.print(field.text, width=WIDEST, markup=False)
    grid = _grid()
    grid.add_row("type", Text(field.type))
    grid.add_row("default", Text(field.default_text))
    if field.range:
        grid.add_row("range", Text(field.range))
    for rule in RULES:
        if field.name in rule.fields:
            about = "" if rule.fields[0] == field.name else f"{rule.fields[0]} "
            grid.add_row("rule", Text(f"{about}{rule.statement}"))
    console.print(grid)
    if field.name in ENTRY_TYPES:
        console.print("\nEach entry of the list:")
        entries = _grid()
        for part in describe_section(ENTRY_TYPES[field.name]):
            entries.add_row(Text(part.name), Text(part.default_text), Text(part.text))
        console.print(entries)


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="green")
    return grid
