"""Reads and writes YAML: files of a configuration, values of flags, and a run's `config.yaml`.

Scalars follow version 1.2 of YAML, where PyYAML follows 1.1: `1e-6` is a number, `010` is ten, and `1:30` and
`2024-01-01` are text instead of 90 and a date. `yes`, `no`, `on` and `off` stay booleans. A key that stands twice in
one mapping is an error, and the line of every top-level key is kept for error messages. What is written here reads back
unchanged, also by a reader of version 1.1.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from telescope.config.messages import show
from telescope.errors import ConfigError

SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"(?i:true|false|yes|no|on|off)", list("tTfFyYnNoO")),
    ("int", r"[-+]?\d[\d_]*|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?|[-+]?\d[\d_]*[eE][-+]?\d+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
)
"""Tag, pattern and first characters of the plain scalars that are not text."""


class _ConfigLoader(yaml.SafeLoader):
    """SafeLoader with the differences above."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (as in the base class)


class _ConfigDumper(yaml.SafeDumper):
    """SafeDumper that quotes text which either version of YAML would read as something else."""


def _construct_mapping(loader: _ConfigLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
            continue
        line = key_node.start_mark.line + 1
        if key_node.value in seen:
            problem = f"'{key_node.value}' is set twice, first in line {seen[key_node.value]}"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        seen[key_node.value] = line
    loader.flatten_mapping(node)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


def _construct_int(loader: _ConfigLoader, node: yaml.ScalarNode) -> int:
    text = node.value.replace("_", "")
    return int(text, 0 if text[:2] in ("0o", "0x") else 10)


_ConfigLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
_ConfigLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
for _tag, _pattern, _first in SCALARS:
    for _class in (_ConfigLoader, _ConfigDumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)


def read_yaml_file(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns a file's top-level mapping, empty for an empty file, and where each key stands. Raises `ConfigError`."""
    if path.is_dir():
        raise ConfigError(f"--config {path} is a directory. Give the path of a YAML file")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"--config {path} does not exist{_neighbors(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from None
    data, node = _load(text, str(path))
    if data is None:
        return {}, {}
    if not isinstance(data, dict) or not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path} must hold `field: value` lines, and holds a {type(data).__name__}")
    lines = {key.value: key.start_mark.line + 1 for key, _ in node.value if isinstance(key, yaml.ScalarNode)}
    values = {str(key): value for key, value in data.items()}
    # A merged key, and one that is no text, such as `on`, has no line of its own.
    return values, {name: f"{path}, line {lines[name]}" if name in lines else str(path) for name in values}


def parse_yaml_value(text: str, *, what: str) -> Any:
    """One value of the command line, read as YAML. `what` names it in the error, a `ConfigError`."""
    return _load(text, f"{what} {show(text)}")[0]


def _load(text: str, what: str) -> tuple[Any, yaml.Node | None]:
    """Returns the value and its node. The `ConfigError` begins with `what`."""
    try:
        return yaml.load(text, Loader=_ConfigLoader), yaml.compose(text, Loader=_ConfigLoader)
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} is not valid YAML: {yaml_problem(error)}") from None
    except (ValueError, LookupError, AttributeError) as error:  # a tag that does not fit, or too many digits
        raise ConfigError(f"{what} has a value that cannot be read: {show(str(error))}") from None


def dump_yaml(value: Any, **style: Any) -> str:
    """Formats plain data as YAML that `read_yaml_file` reads back with the same values and types."""
    return str(yaml.dump(value, Dumper=_ConfigDumper, sort_keys=False, **style))


def yaml_problem(error: yaml.YAMLError) -> str:
    """Returns what is wrong, with line and column, and what began in another line, such as a text without an end."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark, begin = error.problem_mark or error.context_mark, error.context_mark
        problem = f"{error.problem or error.context}{_place(mark)}"
        if error.context and begin and mark and begin.line != mark.line:
            problem += f", {error.context}{_place(begin)}"
        return problem
    return str(error).splitlines()[0]


def _place(mark: yaml.Mark | None) -> str:
    return f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""


def _neighbors(path: Path) -> str:
    """Lists files beside a missing one. Its name is often nearly right."""
    folder = path.parent
    if not folder.is_dir():
        return f"; neither does the directory {folder}"
    names = sorted(item.name for item in folder.iterdir() if item.suffix in (".yaml", ".yml"))
    return f". In {folder} there are: {', '.join(names)}" if names else ""
