"""The `telescope` command.

Runs a subcommand and turns errors into messages and exit codes.

Exit codes: 0 done; 1 failure, with a message or a traceback; 2 bad input, with a message that names the fix, nothing
started; 130 stopped by Ctrl-C; 143 or 129 by SIGTERM or SIGHUP. Each subcommand is a module of this package with
`add_parser(subparsers)`, which sets `func`, and `imports`: modules to import before it; those of `OWN_ARGUMENTS` have
`run(argv)` instead. The only argument of the command itself is `--version`. Without a command, it opens the dashboard
where there are runs, and prints its help elsewhere. `take_own` separates a command's own options from flags of fields.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

# Nothing that takes long to import: Ctrl-C ends the command quietly only after these imports.
from telescope import __version__
from telescope.errors import ConfigError, RunError, UserError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from types import FrameType

    from rich.console import Console

# In the order of the help: what a user needs first comes first.
COMMANDS = (
    "train", "ui", "tui", "eval", "chat", "convert", "verify", "config", "doctor", "tiny_model", "envs", "runs",
    "query", "compact",
)  # fmt: skip
OWN_ARGUMENTS = {
    "train": "train a model",
    "eval": "measure checkpoints and models",
    "chat": "talk to a checkpoint or a model",
    "verify": "check engine, trainer and weights on this machine",
}
"""Commands with a flag for every field of the schema, and their help. They parse their own arguments."""
PIPE_WIDTH = 140
LONGEST_ERROR = 200  # characters of an error that quotes a path
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code. `argv` defaults to the process's own arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except ConfigError as error:
        _print_problems(error)
        return EXIT_BAD_INPUT
    except UserError as error:
        _print_error(error)
        return EXIT_BAD_INPUT
    except RunError as error:
        _print_error(error)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the output (`head`, a pager) has exited.
        sys.stderr.close()
        return 0
    except (OSError, RuntimeError) as error:
        # Any path may be too long, or begin with `~` and a user that does not exist.
        if getattr(error, "errno", None) != errno.ENAMETOOLONG and "home directory" not in str(error):
            raise
        print(f"telescope: an argument is no usable path: {str(error)[:LONGEST_ERROR]}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except SystemExit as exit_request:  # raised by argparse after it has printed its message
        return exit_request.code if isinstance(exit_request.code, int) else EXIT_BAD_INPUT


def command(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the `telescope` command. `argv` is that of `main`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a command in the background ignores it
        signal.signal(signal.SIGINT, _exit_interrupted)
    from telescope.utils.process import run_and_exit

    run_and_exit(lambda: main(argv))


def _exit_interrupted(_number: int, _frame: FrameType | None) -> NoReturn:
    """Ends a command that only imports modules. An exception would be a traceback, or become an `ImportError`."""
    os._exit(EXIT_INTERRUPTED)


def _interrupt_by_exception() -> None:
    """Lets Ctrl-C raise `KeyboardInterrupt` once there is something to clean up."""
    if signal.getsignal(signal.SIGINT) is _exit_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    import argparse

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
    from telescope.cli.runs import DEFAULT_ROOT

    if not arguments and DEFAULT_ROOT.is_dir():
        arguments = ["ui"]
    parsed = parser.parse_args(arguments)
    if not hasattr(parsed, "func"):
        parser.print_help()
        return 0
    for name in getattr(parsed, "imports", ()):
        importlib.import_module(name)
    _interrupt_by_exception()
    return int(parsed.func(parsed) or 0)


@dataclass(frozen=True)
class Option:
    """An argument of a command itself. `value` describes its value, as in "the path of a file"; None for a switch."""

    value: str | None
    aliases: tuple[str, ...] = ()
    repeats: bool = False
    once: str = "Give one"
    """What to do if it is given twice."""


HELP = {"--help": Option(None, ("-h",), repeats=True)}


def take_own(argv: Sequence[str], options: Mapping[str, Option]) -> tuple[dict[str, list[str]], list[str]]:
    """Returns the values of `options` by their names, and the remaining arguments.

    `--some-flag VALUE`, `--some_flag VALUE` and `--some-flag=VALUE` are the same. A switch has the value "". Raises
    `ConfigError` for a missing value, and for one that is given twice.
    """
    names = {alias: name for name, option in options.items() for alias in (name, *option.aliases)}
    own: dict[str, list[str]] = {}
    rest: list[str] = []
    waiting = list(argv)
    while waiting:
        argument = waiting.pop(0)
        flag, equals, value = argument.partition("=")
        name = names.get(flag.replace("_", "-"))
        if name is None or (equals and options[name].value is None):
            rest.append(argument)
            continue
        option = options[name]
        if option.value is not None and not equals:
            if not waiting or waiting[0].startswith("--"):
                raise ConfigError(f"{name} needs {option.value}")
            value = waiting.pop(0)
        if name in own and option.value is not None and not option.repeats:
            raise ConfigError(f"{name} is given twice: {own[name][0]} and {value}. {option.once}")
        own.setdefault(name, []).append(value)
    return own, rest


def make_console() -> Console:
    """Returns a console of standard output, which is `PIPE_WIDTH` wide in a pipe or a file."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def _print_error(error: Exception) -> None:
    """Prints the message of an error and its notes."""
    from telescope.utils.text import plain

    print(plain("\n".join([f"telescope: {error}", *getattr(error, "__notes__", ())])), file=sys.stderr)


def _print_problems(error: ConfigError) -> None:
    """Prints each problem of a configuration once."""
    from telescope.utils.text import plain

    # Two checks may find the same problem. A quoted template or path may contain control sequences.
    problems = list(dict.fromkeys(map(plain, error.problems)))
    if len(problems) == 1:
        print(f"telescope: {problems[0]}", file=sys.stderr)
        return
    print(f"telescope: {len(problems)} problems:", file=sys.stderr)
    for problem in problems:
        print(f"  - {problem}", file=sys.stderr)


if __name__ == "__main__":
    command()
