"""Implements `telescope sandbox`, which destroys what runs left behind, and opens a sandbox for manual commands."""

import argparse
import asyncio
import shlex
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from telescope.cli.main import CommandParser
from telescope.cli.query import choose_runs
from telescope.cli.runs import add_root
from telescope.errors import ConfigError, UserError
from telescope.orchestrator.conversion import config_of_run
from telescope.sandbox import SandboxCommandTimeoutError, SandboxConfig, SandboxError, SandboxHandle, get_provider
from telescope.sandbox.base import PROVIDERS, provider_arguments, provider_class
from telescope.sandbox.ledger import SandboxLedger, reap
from telescope.utils.text import plain

COMMAND_SECONDS = 600.0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="telescope sandbox",
        description="Sandboxes run code that a model writes, on this machine or in the cloud (docs/sandboxes.md).",
        epilog="`telescope doctor --sandbox NAME` checks a provider.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    reaping = commands.add_parser(
        "reap",
        help="destroy the sandboxes that ended runs left",
        description="Destroy the sandboxes that ended runs left behind: those in the file sandboxes.jsonl of the run "
        "that were not destroyed, and those that carry the label of the run. A run does this itself when it starts and "
        "ends; only killed runs need it. Live runs are left alone.",
        epilog="example: telescope sandbox reap latest --provider e2b",
    )
    reaping.add_argument("run", nargs="*", metavar="RUN", help="a run: its folder, its name, or latest (default: all)")
    reaping.add_argument(
        "--provider", action="append", default=[], metavar="NAME",
        help="also look for the run's label at this provider, e.g. after a node was lost with its file",
    )  # fmt: skip
    add_root(reaping)
    reaping.set_defaults(func=run_reap)
    shell = commands.add_parser(
        "shell",
        help="open a sandbox and run commands in it",
        description="Open a sandbox, run the commands that you type, each by a shell of its own, and destroy the "
        "sandbox at the end (exit, or Ctrl-D). Files and background processes stay between commands.",
        epilog="example: telescope sandbox shell local --memory-mb 512",
    )
    shell.add_argument(
        "provider", nargs="?", default="local", metavar="NAME",
        help=f"{', '.join(PROVIDERS)}, or package.module.Class (default: local)",
    )  # fmt: skip
    shell.add_argument("--image", default="", help="image, or for local a folder with a root file system")
    shell.add_argument("--memory-mb", type=int, default=2048, help="memory (default: 2048)")
    shell.set_defaults(func=lambda arguments: asyncio.run(run_shell(arguments)))
    return parser


def run_reap(arguments: argparse.Namespace) -> int:
    """Reaps the sandboxes of each run. Returns the exit code."""
    total, problems = 0, list[str]()
    for name in arguments.provider:
        provider_class(name)  # refuses an unknown name
    for run in choose_runs(arguments.run, arguments.root):
        if run.status == "live":
            if arguments.run:
                raise UserError(f"{str(run.files.run_dir)!r} is live, and reaps its sandboxes itself when it ends.")
            continue
        folder = run.files.run_dir
        providers = {name: dict[str, Any]() for name in arguments.provider}
        try:
            providers |= _recorded_arguments(folder, arguments.provider)
        except ConfigError as error:  # the sandboxes may need no arguments
            problems.append(f"{run.label}: {error}")
        destroyed = asyncio.run(reap(folder, providers, problems.append))
        total += len(destroyed)
        if destroyed:
            print(plain(f"{run.label}: {len(destroyed)} sandboxes destroyed: {', '.join(destroyed)}"))
    for problem in dict.fromkeys(problems):
        print(plain(problem), file=sys.stderr)
    if not total and not problems:
        print("No sandboxes were left.")
    return int(bool(problems))


def _recorded_arguments(run_dir: Path, named: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the `provider_kwargs` in a run's config of the providers that are `named` or in its ledger."""
    used = {PROVIDERS.get(name, name) for name in named} | {row.get("made_by") for row in SandboxLedger(run_dir).rows()}
    config = config_of_run(run_dir) if used else {}
    entries = (*(config.get("environments") or ()), *(config.get("evals") or ()))
    found = provider_arguments(entry.get("kwargs") or {} for entry in entries)
    return {name: kwargs for name, kwargs in found.items() if PROVIDERS.get(name, name) in used}


async def run_shell(arguments: argparse.Namespace) -> int:
    """Runs typed commands in a sandbox. Returns the last command's exit code."""
    provider = get_provider(arguments.provider)
    handle: SandboxHandle | None = None
    folder: str | None = None
    code = 0
    try:
        handle = await provider.create(SandboxConfig(image=arguments.image, memory_mb=arguments.memory_mb))
        print(f"sandbox {handle.id}; exit ends it, and Ctrl-D", file=sys.stderr)
        mark = uuid.uuid4().hex
        while line := await _read_line(f"{folder or '~'} $ "):
            # Each command has a new shell, so its folder is carried over.
            enter = f"cd -- {shlex.quote(folder)} || cd\n" if folder else ""
            command = f"{enter}{line}\nstatus=$?; printf '{mark}%s{mark}' \"$PWD\" >&2; exit $status"
            try:
                result = await provider.execute(handle, command, COMMAND_SECONDS)
            except (SandboxCommandTimeoutError, UserError) as error:
                print(error, file=sys.stderr)
                continue
            errors, *told = result.stderr.split(mark)
            if told:  # not printed after `exit` or a syntax error
                folder = told[0]
            sys.stdout.write(result.stdout)
            sys.stderr.write(errors + "".join(told[1:]))
            code = result.exit_code
            if line.split()[:1] == ["exit"]:
                break
    except SandboxError as error:
        raise UserError(str(error)) from error
    finally:
        if handle is not None:
            await provider.destroy(handle)
        await provider.close()
    return code


async def _read_line(prompt: str) -> str:
    """Returns a typed line with its end, or `""` at the end of the input."""
    if not sys.stdin.isatty():
        return await asyncio.to_thread(sys.stdin.readline)
    print(prompt, end="", file=sys.stderr, flush=True)
    typed = asyncio.Event()  # because a reading thread would delay Ctrl-C
    asyncio.get_running_loop().add_reader(sys.stdin, typed.set)
    try:
        await typed.wait()
        return sys.stdin.readline()
    finally:
        asyncio.get_running_loop().remove_reader(sys.stdin)
