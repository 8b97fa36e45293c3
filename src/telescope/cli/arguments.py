"""Separates a command's own options from the flags of fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from telescope.errors import ConfigError


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
    taken: dict[str, list[str]] = {}
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
        if name in taken and option.value is not None and not option.repeats:
            raise ConfigError(f"{name} is given twice: {taken[name][0]} and {value}. {option.once}")
        taken.setdefault(name, []).append(value)
    return taken, rest
