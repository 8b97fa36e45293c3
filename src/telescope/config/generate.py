"""Describes the fields of the schema, and writes default and resolved values as YAML."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from telescope.config.base import Section, member_types, thaw
from telescope.config.schema import SECTIONS
from telescope.config.yaml_file import dump_yaml

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

COMMENT_WIDTH = 116
GENERATED = (
    "generated from the schema by `python scripts/generate_references.py`; edit `src/telescope/config/sections/`"
)


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


def _described(field: FieldDescription) -> str:
    choices = f" One of {field.type}." if field.type.startswith('"') else ""
    span = f" Range: {field.range}." if field.range and "Range:" not in field.text else ""
    return f"{field.text}{choices}{span}"


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
