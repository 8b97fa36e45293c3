"""Writes the default YAML and the configuration reference from the schema.

`python -m telescope.config.generate` writes both into the checkout; a test checks that the committed files match.
The installed package generates them too: `telescope config defaults` prints the default file.
"""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from telescope.config.base import Section, member_types, thaw
from telescope.config.environments import EnvironmentEntry, EvalEntry
from telescope.config.loader import ENVIRONMENT_VARIABLES
from telescope.config.rules import RULES
from telescope.config.schema import SECTIONS
from telescope.config.yaml_file import dump_yaml

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

COMMENT_WIDTH = 116
GENERATED = "generated from the schema by `python -m telescope.config.generate`; edit `src/telescope/config/sections/`"


def default_yaml() -> str:
    """Returns `default_train.yaml`: every field with its default. Each is under its section, described in a comment."""
    lines = ["# Every field of Telescope's configuration with its default.", f"# This file is {GENERATED}.", ""]
    for section in SECTIONS:
        lines += [f"# --- {section.TITLE} ---", ""]
        for field in describe_section(section):
            text = textwrap.wrap(_described(field), COMMENT_WIDTH - 2, break_on_hyphens=False)
            lines += [f"# {line}" for line in text]
            lines += [f"{field.name}: {yaml_text(field.default)}", ""]
    return "\n".join(lines).rstrip() + "\n"


def resolved_yaml(config: TelescopeConfig) -> str:
    """A resolved configuration as YAML, section by section. Fields that a person chose are marked."""
    values = config.values
    lines = [f"# config hash {config.hash}"]
    for section in SECTIONS:
        lines += ["", f"# --- {section.TITLE} ---"]
        for name in section.model_fields:
            mark = "  # set" if name in config.user_set else ""
            lines.append(f"{name}: {yaml_text(values[name])}{mark}")
    return "\n".join(lines) + "\n"


def documentation() -> str:
    """Returns `configuration.md`: layers, every field, rules between fields."""
    parts = [_INTRODUCTION]
    for section in SECTIONS:
        parts.append(f"## {section.TITLE}\n")
        if section.INTRO:
            parts.append(section.INTRO + "\n")
        parts.append(_table(describe_section(section)))
        if "environments" in section.model_fields:
            parts.append("Each entry of `environments`:\n")
            parts.append(_table(describe_section(EnvironmentEntry)))
            parts.append(_ENVIRONMENTS_EXAMPLE)
        if "evals" in section.model_fields:
            parts.append("Each entry of `evals`:\n")
            parts.append(_table(describe_section(EvalEntry, "evals.")))
            parts.append(_EVALS_EXAMPLE)
    parts.append("## Rules between fields\n")
    parts.append(
        "A rule marked with *adjusts* changes the field when only its default breaks the rule, and the run prints a "
        "line. When you set the field yourself, a broken rule is an error. All other rules are errors always.\n"
    )
    for rule in RULES:
        parts.append(f"- `{rule.fields[0]}` {rule.statement}{' *(adjusts)*' if rule.adjust else ''}.")
    parts.append("\n## Environment variables\n")
    parts.append("Each fills in a field that neither the YAML file nor the command line sets.\n")
    parts += [f"- `{variable}`: `{field}`" for variable, field in ENVIRONMENT_VARIABLES.items()]
    parts.append("")
    return "\n".join(parts)


def write_files(root: Path) -> list[Path]:
    """Writes both files below a checkout. Returns their paths."""
    files = generated_files()
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [root / name for name in files]


def generated_files() -> dict[str, str]:
    """Path below the checkout to content."""
    return {"configs/defaults/default_train.yaml": default_yaml(), "docs/configuration.md": documentation()}


def _described(field: FieldDescription) -> str:
    choices = f" One of {field.type}." if field.type.startswith('"') else ""
    span = f" Range: {field.range}." if field.range and "Range:" not in field.text else ""
    return f"{field.text}{choices}{span}"


def _table(fields: list[FieldDescription]) -> str:
    lines = ["| field | type | default | description |", "|---|---|---|---|"]
    for field in fields:
        text = field.text
        if field.range and "Range:" not in text:
            text += f" Range: {field.range}."
        cells = (f"`{field.name}`", field.type, f"`{field.default_text}`" if not field.required else "required", text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


_INTRODUCTION = f"""# Configuration

*This page is {GENERATED}.*

A run is described by one flat set of fields. Each has a default, and a run states only what differs:

```yaml
model: "Qwen/Qwen2.5-3B"
environments:
  - name: "countdown"
number_of_steps: 300
learning_rate: 1.0e-6
```

```bash
telescope train --config run.yaml --learning_rate 5e-7
```

Later layers win: the defaults (`configs/defaults/default_train.yaml`, or `telescope config defaults`), the
environment variables below, the YAML file, the command line. On the command line `--learning_rate 5e-7`,
`--learning-rate 5e-7` and `--learning_rate=5e-7` are the same; values are YAML scalars, lists and mappings; a boolean
flag alone means true. A name that is not a field is an error that suggests the nearest one; so is a flag given twice.

A value in the file that equals the default counts as a default, so a copy of the whole default file is as good as an
empty one. Defaults that do not fit the machine are adjusted, and one line lists them: the cores and numbers of workers,
`share_gpus` on a machine with one GPU, the port of the servers when it is in use, the prompts in flight when too few
files may be open. A value that you set is kept, and refused if it does not fit.

`telescope train --config run.yaml --dry-run` prints what was set or adjusted (`--all`: every field), the hash, where
the workers would go, and how much memory they would need, and starts nothing. It exits with 2 and all problems for what
a run would refuse on this machine; where the run is meant for another one (it joins a cluster, or `device` is auto, no
GPU is here, and cores or memory are too few without), it reports that, and what is wrong with this one is a remark.
With `--gpu-memory-gib 80` the plan is judged as on a machine with enough GPUs of 80 GiB each, whatever this one has.
`telescope config explain FIELD` explains a field. The resolved
configuration is frozen, written to the run directory, and handed to every process as it is; the hash, of all values, is
the same in each.

The upper bounds of numbers are far above anything that runs: they only catch typing errors.
"""

_ENVIRONMENTS_EXAMPLE = """```yaml
environments:
  - name: "countdown"
    weight: 0.5
    reward_min: 0.0
    reward_max: 2.0
  - name: "my_package.my_module:MyEnvironment"
    weight: 0.5
    kwargs:
      num_samples: 1000
```
"""

_EVALS_EXAMPLE = """```yaml
evals:
  - name: "countdown"
    num_samples: 500
    separate_eval_samples: true
    temperature: 1.0
```
"""


NAMES = {type(None): "null", Any: "any"}


@dataclass(frozen=True)
class FieldDescription:
    """A field of the schema, described for users."""

    name: str
    section: str
    type: str
    """As in the documentation: `int`, `"a" | "b"`, `float | null`."""
    default: Any
    range: str
    """`> 0`, `0 to 1`, or nothing."""
    text: str
    """The whole description, in one paragraph."""
    required: bool = False

    @property
    def summary(self) -> str:
        """The first sentence of the description."""
        return re.split(r"(?<=[.!?])\s+(?=[A-Z\"0-9-])", self.text, maxsplit=1)[0].rstrip(".")

    @property
    def default_text(self) -> str:
        """The default as YAML would write it."""
        return "required" if self.required else yaml_text(self.default)


def describe_section(section: type[Section], prefix: str = "") -> list[FieldDescription]:
    """The fields of a section in order. An entry type has a `prefix` such as `evals.`."""
    return [
        FieldDescription(
            name=name,
            section=section.TITLE,
            type=_type_text(field.annotation),
            default=None if field.is_required() else thaw(field.get_default(call_default_factory=True)),
            range=_range_text(field),
            text=re.sub(r"\s+", " ", field.description or "").strip(),
            required=field.is_required(),
        )
        for name, field in section.model_fields.items()
    ]


def describe_all() -> list[FieldDescription]:
    """Every field of the configuration, section by section."""
    return [field for section in SECTIONS for field in describe_section(section)]


def yaml_text(value: Any) -> str:
    """Formats a value as one line of YAML that reads back."""
    if isinstance(value, float):
        return _float_text(value)
    if isinstance(value, str):
        return dump_yaml(value, default_style='"', width=1_000_000, allow_unicode=True).removesuffix("\n")
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "[" + ", ".join(yaml_text(item) for item in value) + "]"
    text = dump_yaml(value, default_flow_style=True, width=1_000_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _float_text(value: float) -> str:
    text = repr(value)
    if "e" in text:  # with a dot, so that YAML 1.1 readers see a number too
        mantissa, exponent = text.split("e")
        return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent}"
    return text


def _type_text(annotation: Any) -> str:
    return " | ".join(dict.fromkeys(_member_text(member) for member in member_types(annotation)))


def _member_text(member: Any) -> str:
    origin = get_origin(member)
    if origin is Literal:
        return " | ".join(f'"{choice}"' for choice in get_args(member))
    if origin is list:
        item = get_args(member)[0]
        return "list[object]" if isinstance(item, type) and issubclass(item, Section) else f"list[{_type_text(item)}]"
    if origin is dict:
        return "dict"
    return NAMES.get(member) or str(getattr(member, "__name__", member))


def _constraints(field: FieldInfo) -> list[Any]:
    """The bounds of a field, also those inside `Annotated[...] | None`."""
    found = list(field.metadata)
    pending = [field.annotation]
    while pending:
        annotation = pending.pop()
        arguments = get_args(annotation)
        if get_origin(annotation) is Annotated:
            found += [item for extra in arguments[1:] for item in getattr(extra, "metadata", [extra])]
            pending.append(arguments[0])
        elif get_origin(annotation) is not Literal:
            pending += [argument for argument in arguments if argument is not None]
    return found


def _range_text(field: FieldInfo) -> str:
    low = high = ""
    for constraint in _constraints(field):
        if isinstance(constraint, Gt):
            low = f"> {_bound(constraint.gt)}"
        elif isinstance(constraint, Ge):
            low = f">= {_bound(constraint.ge)}"
        elif isinstance(constraint, Lt):
            high = f"< {_bound(constraint.lt)}"
        elif isinstance(constraint, Le):
            high = f"<= {_bound(constraint.le)}"
        elif isinstance(constraint, MinLen):
            return "not empty"
    return ", ".join(part for part in (low, high) if part)


def _bound(value: Any) -> str:
    return "2^63" if value == 2**63 else f"{value:g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Writes the files into this checkout, or into the folder in `argv`."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[3]
    for path in write_files(root):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
