"""Implements the `telescope` command.

Runs a subcommand and turns errors into messages and exit codes.

Exit codes: 0 done; 1 failure, with a message or a traceback; 2 bad input, with a message that names the fix, nothing
started; 130 stopped by Ctrl-C; 143 or 129 by SIGTERM or SIGHUP. Each subcommand is a module of this package. Its
`add_parser(subparsers)` sets `func`, and `imports` for modules to import first. The modules in `OWN_ARGUMENTS` have
`run(argv)` instead. The only argument of the command itself is `--version`. Without a subcommand, it opens the
dashboard if there are runs, and otherwise prints its help. `OwnParser` separates a command's own options from flags of
fields.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

# Imports nothing slow, because Ctrl-C ends the command quietly only after these imports.
from telescope import __version__
from telescope.errors import EXIT_INTERRUPTED, ConfigError, RunError, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import FrameType

    from rich.console import Console

# In the order of the help, which begins with what a user needs first.
COMMANDS = (
    "train", "ui", "tui", "eval", "chat", "convert", "verify", "config", "doctor", "launch", "tiny_model", "envs",
    "runs", "query", "compact", "sandbox",
)  # fmt: skip
OWN_ARGUMENTS = {
    "train": "train a model",
    "eval": "measure checkpoints and models",
    "chat": "talk to a checkpoint or a model",
    "launch": "train by a job of Slurm, KubeRay or SkyPilot",
    "verify": "check engine, trainer and weights on this machine",
}
"""Commands with a flag for every field of the schema, and their help texts. They parse their own arguments."""
PIPE_WIDTH = 140
LONGEST_ERROR = 200  # characters of an error that quotes a path
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code. `argv` defaults to the arguments of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except (UserError, RunError) as error:
        _print_error(error)
        return EXIT_FAILED if isinstance(error, RunError) else EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the output (`head`, a pager) has exited.
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # for an argument that may be the path or name of a run
            raise
        print(f"telescope: {str(error)[:LONGEST_ERROR]}. Give the path of a file that exists", file=sys.stderr)
        return EXIT_BAD_INPUT
    except SystemExit as exit_request:  # raised by argparse after it has printed its message
        return exit_request.code if isinstance(exit_request.code, int) else EXIT_BAD_INPUT


def command(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs `main(argv)` as the entry point of the `telescope` command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a command in the background ignores it
        signal.signal(signal.SIGINT, _exit_interrupted)
    from telescope.utils.process import run_and_exit

    run_and_exit(lambda: main(argv))


def _exit_interrupted(_number: int, _frame: FrameType | None) -> NoReturn:
    """Exits at once during imports, where an exception would print a traceback or become an `ImportError`."""
    os._exit(EXIT_INTERRUPTED)


def _interrupt_by_exception() -> None:
    """Lets Ctrl-C raise `KeyboardInterrupt` once there is something to clean up."""
    if signal.getsignal(signal.SIGINT) is _exit_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="telescope",
        description="Trains language models with reinforcement learning. Reads what runs have recorded.",
        epilog="`telescope COMMAND --help` explains a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"telescope {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in COMMANDS:
        if name in OWN_ARGUMENTS:
            subparsers.add_parser(name, help=OWN_ARGUMENTS[name], add_help=False)
        else:
            importlib.import_module(f"telescope.cli.{name}").add_parser(subparsers)
    return parser


def _dispatch(arguments: list[str]) -> int:
    if arguments and arguments[0] in OWN_ARGUMENTS:
        module = importlib.import_module(f"telescope.cli.{arguments[0]}")
        _interrupt_by_exception()
        return int(module.run(arguments[1:]))
    names = [name.replace("_", "-") for name in COMMANDS]
    if arguments and not arguments[0].startswith("-") and arguments[0] not in names:
        from telescope.utils.text import did_you_mean

        hint = did_you_mean(arguments[0], names)
        raise UserError(f"There is no command '{arguments[0]}'.{hint} The commands are {', '.join(names)}")
    parser = build_parser()
    from telescope.cli.runs import folders_of_runs

    if not arguments and any(folder.is_dir() for folder in folders_of_runs(None)):
        arguments = ["ui"]
    parsed = parser.parse_args(arguments)
    if not hasattr(parsed, "func"):
        parser.print_help()
        return 0
    for name in getattr(parsed, "imports", ()):
        importlib.import_module(name)
    _interrupt_by_exception()
    return int(parsed.func(parsed) or 0)


class _StoreOnce(argparse.Action):
    """Stores a value and refuses a second one."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        if (before := getattr(namespace, self.dest)) is not None:
            raise ConfigError(f"{self.option_strings[0]} is given twice: {before} and {values}. Give it once")
        setattr(namespace, self.dest, values)


class OwnParser(argparse.ArgumentParser):
    """Parses a command's own options and leaves the flags of config fields. Raises `ConfigError`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.register("action", None, _StoreOnce)

    def take(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Returns the values of the options, and the remaining arguments. Accepts `--some_flag` for `--some-flag`."""
        own = [name for action in self._actions for name in action.option_strings]
        spelled = []
        for argument in argv:
            flag, equals, value = argument.partition("=")
            dashed = flag.replace("_", "-")
            spelled.append(f"{dashed}{equals}{value}" if dashed in own else argument)
        return self.parse_known_args(spelled)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        return []  # argparse would read `-config x` as `-c onfig`

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}. `{self.prog} --help` explains it")


def file_to_write(text: str) -> Path:
    """Returns the path of a file in an existing folder."""
    from telescope.utils.text import user_path

    path = user_path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is not a folder; create it or name another file")
    return path


def make_console() -> Console:
    """Returns a console for standard output, which is `PIPE_WIDTH` wide in a pipe or a file."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=PIPE_WIDTH, highlight=False)


def _print_error(error: UserError | RunError) -> None:
    """Prints an error's message and notes, and each problem of a configuration once."""
    from telescope.utils.text import plain

    # Two checks may find the same problem. A quoted template or path may contain control sequences.
    problems = list(dict.fromkeys(map(plain, error.problems if isinstance(error, ConfigError) else [str(error)])))
    text = problems[0] if len(problems) == 1 else "\n  - ".join([f"{len(problems)} problems:", *problems])
    print("\n".join([f"telescope: {text}", *map(plain, getattr(error, "__notes__", ()))]), file=sys.stderr)


if __name__ == "__main__":
    command()
