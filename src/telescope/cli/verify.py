"""Implements `telescope verify`, which checks engine, trainer and weight transfer on this machine.

Arguments and printing only; the checks are in `telescope.verify`. The exit code is 0 if all checks pass, 1 if one
fails, 2 for bad input, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from telescope.cli.main import EXIT_FAILED, CommandParser, file_to_write, make_console
from telescope.config import LoadedConfig, load_config
from telescope.errors import UserError
from telescope.tui.live import phases
from telescope.utils.data import to_json_value
from telescope.utils.text import user_path

if TYPE_CHECKING:
    from telescope.verify.checks import Report

TINY_CONFIG = Path(__file__).parents[1] / "verify" / "tiny.yaml"

DESCRIPTION = """\
Starts engine and trainer as a run would, and checks on this machine:
  - engine and trainer compute the same logprobs at the run's temperature, and the effect of top_p;
  - packed samples do not attend to each other, and the gradient does not depend on packing;
  - the first training step is on-policy;
  - weights arrive in the engine bit for bit, and one wrong bit is detected."""

NOT_VERIFIED: dict[str, Any] = {
    "checkpoint_dir": None, "resume_from_checkpoint": False, "checkpoint_every": 0, "save_final_model": False,
    "use_wandb": False, "trackers": None, "evals": [],
}  # fmt: skip
"""Fields that a verification does not use, with values that need nothing."""

EPILOG = """\
  --FIELD VALUE   any field of the configuration, as for `telescope train`; a smaller max_tokens is faster

Training results are discarded. Exit code: 0 all checks pass, 1 one fails, 2 bad input."""


def build_parser() -> CommandParser:
    usage = "telescope verify [--config FILE] [--json FILE] [--template] [--FIELD VALUE ...]"
    parser = CommandParser(
        prog="telescope verify", takes_fields=True, usage=usage, description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument(
        "--config", "-c", type=user_path, metavar="FILE",
        help="the configuration of a run (default: the tiny model on the CPU, built if missing)",
    )  # fmt: skip
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="also write the results to this file")
    parser.add_argument(
        "--template", action="store_true",
        help="only print a conversation of each environment as the model reads it: the trained tokens, what ends an "
        "answer, where a new sample begins, and which message is lost. Needs no GPU",
    )  # fmt: skip
    return parser


def run(own: argparse.Namespace) -> int:
    """Runs the command. Returns the exit code; raises `UserError` for bad input, before anything is started."""
    if own.template and own.json is not None:
        raise UserError("--json writes the results of checks, and --template makes none. Leave one of them out")
    loaded = _load(own.config, own.fields)
    if own.template:
        from telescope.cli.verify_template import print_template

        print_template(loaded.config, make_console())
        return 0
    # It writes below the folder for temporary files alone.
    loaded = replace(loaded, config=loaded.config.replace(**NOT_VERIFIED, run_dir=tempfile.gettempdir()))

    from telescope.cli.train import check_before_start, fit_to_machine

    loaded = fit_to_machine(loaded)
    notes = check_before_start(loaded)

    from telescope.verify.run import run_verification

    with phases("verification", notes) as view:
        report, logs = run_verification(
            loaded.config,
            view,
            lambda each: view.say(f"{'holds' if each.ok else 'FAILS'}  {each.name}: {each.measured}"),
        )
    if own.json is not None:
        own.json.write_text(json.dumps(to_json_value(report.to_json()), indent=1) + "\n")
    print_report(report, make_console(), logs)
    return 0 if report.ok else EXIT_FAILED


def _load(config_file: Path | None, overrides: list[str]) -> LoadedConfig:
    if config_file is not None:
        return load_config(config_file, overrides)
    if not any(argument.partition("=")[0] == "--model" for argument in overrides):
        from telescope.cli.tiny_model import warm_start_progress
        from telescope.tiny_model.cache import ensure_tiny_model

        load_config(TINY_CONFIG, ["--model=tiny", *overrides])  # refuses wrong fields before the model is made
        print("no --config: the tiny model on the CPU", file=sys.stderr)
        with warm_start_progress() as report:
            overrides = [f"--model={ensure_tiny_model(report=report)}", *overrides]
    return load_config(TINY_CONFIG, overrides)


def print_report(report: Report, console: Console, logs: Path | None) -> None:
    """Prints the table of checks and a summary line."""
    table = Table("check", "measured", "bound", "verdict", "s")
    for check in report.checks:
        verdict = Text("holds", style="green") if check.ok else Text("FAILS", style="bold red")
        table.add_row(Text(check.name), Text(check.measured), Text(check.bound), verdict, f"{check.seconds:.1f}")
    console.print(table)
    num_failed = sum(not check.ok for check in report.checks)
    said = (
        f"{num_failed} of {len(report.checks)} checks FAIL" if num_failed else f"all {len(report.checks)} checks hold"
    )
    console.print(f"{said}; config {report.config_hash}, {report.seconds:.0f} s")
    if logs is not None:
        console.print(f"logs of its processes: {logs / 'logs'}", soft_wrap=True)
