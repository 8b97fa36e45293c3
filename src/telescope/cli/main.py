"""Implements the `telescope` command.

Runs a subcommand and turns errors into messages and exit codes.

Exit codes: 0 done; 1 failure, with a message or a traceback; 2 bad input, with a message that names the fix, nothing
started; 130 stopped by Ctrl-C; 143 or 129 by SIGTERM or SIGHUP. Each subcommand is a module of this package: its
`build_parser()` returns a `CommandParser`, and its `run(arguments)`, or the action that the arguments choose as `func`,
returns the exit code. `imports` names modules to import first. Without a subcommand, the command opens the dashboard
and takes `DASHBOARD_FLAGS`; its other arguments are `--help` and `--version`.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import math
import os
import select
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

# Imports nothing slow, because Ctrl-C ends the command quietly only after these imports.
from telescope import __version__
from telescope.errors import EXIT_INTERRUPTED, ConfigError, RunError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import FrameType

    from rich.console import Console

COMMANDS = {
    "train": "train a model",
    "ui": "open the dashboard",
    "tui": "watch a run in the terminal",
    "eval": "measure checkpoints and models",
    "chat": "talk to a checkpoint or a model",
    "convert": "turn checkpoints into Hugging Face models",
    "verify": "check engine, trainer and weights on this machine",
    "config": "explain configuration fields, show what a file resolves to",
    "doctor": "check this machine and its packages, with fixes",
    "launch": "train by a job of Slurm, KubeRay or SkyPilot",
    "tiny-model": "make a model of a million parameters that can be trained on a CPU, or fetch a small released one",
    "envs": "list, describe, try, check or create environments",
    "runs": "list runs",
    "query": "query runs with SQL",
    "compact": "merge the files of ended runs",
    "sandbox": "destroy sandboxes that runs left, or look into one",
}
"""What each command does. The order begins with what a user needs first."""
DASHBOARD_FLAGS = ("--port", "--host", "--no-browser")
"""Flags of `telescope ui` that the command takes without it: `telescope --port 8006`."""
SWITCH_VALUES = ("true", "false", "yes", "no", "on", "off", "0", "1")
"""What may follow the flag of a boolean field as its value."""
PIPE_WIDTH = 140
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code. `argv` defaults to the arguments of the process."""
    code = 0
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        print(end="", flush=True)
    except BrokenPipeError as error:
        if not (_has_lost_its_reader(sys.stdout) or _has_lost_its_reader(sys.stderr)):  # a connection broke
            raise
        _discard_output()
        sys.stderr.close()
        code = code or _code_of(error.__context__)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _has_no_space(sys.stdout):
            raise
        _discard_output()
        print(f"telescope: the output cannot be written: {error.strerror}. Free space on its disk", file=sys.stderr)
        code = EXIT_FAILED
    return code


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the exit flushes


def _has_no_space(stream: TextIO) -> bool:
    """Returns whether the disk of `stream` is full."""
    number = stream.fileno()
    return os.fstatvfs(number).f_bavail == 0 or os.readlink(f"/proc/self/fd/{number}") == "/dev/full"


def _code_of(error: BaseException | None) -> int:
    """Returns the exit code for an error, 0 for None or one that is not the user's, such as of a closed pipe."""
    codes = {RunError: EXIT_FAILED, UserError: EXIT_BAD_INPUT, KeyboardInterrupt: EXIT_INTERRUPTED}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), 0)


def _has_lost_its_reader(stream: TextIO) -> bool:
    """Returns whether the reader of `stream`, such as `head` or a pager, has exited."""
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _run(arguments: list[str]) -> int:
    try:
        return _dispatch(arguments)
    except (UserError, RunError) as error:
        _print_error(error)
        return _code_of(error)
    except KeyboardInterrupt as error:
        print("Interrupted", file=sys.stderr)
        return _code_of(error)
    except ModuleNotFoundError as error:
        from telescope.utils.packages import is_installed

        if error.name is None or is_installed(error.name.partition(".")[0]):
            raise
        # Frames of the import system have no file.
        files = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
        print(
            f"telescope: {files[-1].filename}:{files[-1].lineno} needs the package {error.name}, which is not "
            f"installed. Install it, perhaps with: pip install {error.name.partition('.')[0]}. `make setup` in a "
            "checkout installs all that Telescope needs; `telescope doctor` lists what is missing",
            file=sys.stderr,
        )
        return EXIT_BAD_INPUT
    except SystemExit as exit_request:  # raised by argparse after it has printed its message
        if isinstance(exit_request.__context__, BrokenPipeError):  # raised by rich, which now writes to /dev/null
            return 0
        return exit_request.code if isinstance(exit_request.code, int) else EXIT_BAD_INPUT


def command(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs `main(argv)` as the entry point of the `telescope` command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a command in the background ignores it
        signal.signal(signal.SIGINT, _exit_interrupted)
    for descriptor, name in (1, "stdout"), (2, "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, such as a daemon: packages write to it all the same
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr: a locale without an arrow ends no run
        sys.stdout.reconfigure(errors="backslashreplace")
    from telescope.utils.process import run_and_exit

    run_and_exit(lambda: main(argv))


def ui() -> NoReturn:
    """Runs `telescope ui` as the entry point of the `telescope-ui` command."""
    command(["ui", *sys.argv[1:]])


def _exit_interrupted(_number: int, _frame: FrameType | None) -> NoReturn:
    """Exits at once during imports, where an exception would print a traceback or become an `ImportError`."""
    os._exit(EXIT_INTERRUPTED)


def call(name: str, argv: Sequence[str]) -> int:
    """Runs one subcommand and returns its exit code. Raises its errors."""
    module = importlib.import_module(f"telescope.cli.{name.replace('-', '_')}")
    arguments = module.build_parser().parse_args(argv)
    for needed in getattr(arguments, "imports", ()):
        importlib.import_module(needed)
    if signal.getsignal(signal.SIGINT) is _exit_interrupted:  # from here on there may be something to clean up
        signal.signal(signal.SIGINT, signal.default_int_handler)
    action = getattr(arguments, "func", None) or module.run
    return int(action(arguments) or 0)


def _dispatch(argv: list[str]) -> int:
    if argv and argv[0] in COMMANDS:
        return call(argv[0], argv[1:])
    if argv and not argv[0].startswith("-"):
        from telescope.utils.text import did_you_mean

        hint = did_you_mean(argv[0], COMMANDS)
        raise UserError(f"There is no command '{argv[0]}'.{hint} The commands are {', '.join(COMMANDS)}")
    if not argv or argv[0].partition("=")[0].replace("_", "-") in DASHBOARD_FLAGS:
        return call("ui", argv)
    parser = CommandParser(
        prog="telescope",
        description="Trains language models with reinforcement learning. Reads what runs have recorded. Without a "
        f"command, it opens the dashboard ({', '.join(DASHBOARD_FLAGS)}).",
        epilog="`telescope COMMAND --help` explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"telescope {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    parser.parse_args(argv)
    parser.print_help()
    return 0


class _Formatter(argparse.HelpFormatter):
    """Wraps a text of one line, and keeps the lines of others, such as examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class _StoreOnce(argparse.Action):
    """Stores a value and refuses a second one."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if option_string and (before := parser.given.setdefault(self.dest, values)) is not values:
            raise ConfigError(f"{self.option_strings[0]} is given twice: {before} and {values}. Give it once")
        setattr(namespace, self.dest, values)


class CommandParser(argparse.ArgumentParser):
    """Parses the arguments of a command. Raises `ConfigError` with the fix.

    Accepts `--some_flag` for `--some-flag`. With `takes_fields`, all other arguments are left in `fields`: first those
    that are no flags, then the flags of fields with their values. Without, they are refused.
    """

    def __init__(self, *, takes_fields: bool = False, **settings: Any) -> None:
        super().__init__(**{"formatter_class": _Formatter, **settings}, allow_abbrev=False)
        self.register("action", None, _StoreOnce)
        self.takes_fields = takes_fields
        self.given: dict[str, Any] = {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.given = {}
        own = [name for action in self._actions for name in action.option_strings]
        spelled = []
        for argument in args:
            flag, equals, value = argument.partition("=")
            dashed = flag.replace("_", "-")
            spelled.append(f"{dashed}{equals}{value}" if dashed in own else argument)
        fields = _take_fields(spelled, own) if self.takes_fields else []
        parsed, rest = super().parse_known_args(spelled, namespace)
        if self.takes_fields:
            parsed.fields = [*rest, *fields]
        elif rest:
            from telescope.utils.text import nearest_name

            near = nearest_name(
                rest[0].partition("=")[0].strip("-"), [name.strip("-").replace("-", "_") for name in own]
            )
            hint = f" Did you mean --{near.replace('_', '-')}?" if near and rest[0].startswith("-") else ""
            raise ConfigError(f"Unexpected argument {rest[0]!r}.{hint} `{self.prog} --help` lists the arguments")
        return parsed, []

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        return []  # argparse would read `-config x` as `-c onfig`

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}. `{self.prog} --help` explains it")


def _take_fields(arguments: list[str], own: Sequence[str]) -> list[str]:
    """Removes flags of fields with their values, which argparse would take for other arguments, and returns them."""
    from telescope.config.base import member_types
    from telescope.config.schema import TelescopeConfig

    fields: list[str] = []
    left, arguments[:] = arguments[::-1], []
    while left:
        argument = left.pop()
        if not argument.startswith("--") or argument.partition("=")[0] in own:
            arguments.append(argument)
            continue
        fields.append(argument)
        field = TelescopeConfig.model_fields.get(argument[2:].replace("-", "_"))
        is_switch = field is not None and member_types(field.annotation) == (bool,)
        is_value = left and not left[-1].startswith("--") and left[-1] not in own
        if "=" not in argument and is_value and not (is_switch and left[-1].lower() not in SWITCH_VALUES):
            fields.append(left.pop())
    return fields


def number(kind: type[int] | type[float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """Returns the type of a flag that takes a finite number from `least` to `most`."""

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value <= most or value == math.inf:
            bounds = f"{least:g} or more" if most == math.inf else f"a number from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"it is {text}; set it to {bounds}")
        return value

    parse.__name__ = kind.__name__  # argparse names it for a text that is no number
    return parse


def file_to_write(text: str) -> Path:
    """Returns the path of a file that can be written. Its folder exists."""
    from telescope.utils.text import user_path

    path = user_path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is not a folder; create it or name another file")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        problem = "is a folder" if path.is_dir() else "may not be written"
        raise argparse.ArgumentTypeError(f"{path} {problem}; name another file")
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
