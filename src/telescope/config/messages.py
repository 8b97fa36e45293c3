"""Error messages for single fields: field, value, source, fix.

Turns Pydantic's error records into sentences.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from telescope.config.base import Section
from telescope.config.environments import EnvironmentEntry, EvalEntry
from telescope.config.other_names import hint
from telescope.utils.text import did_you_mean

ENTRY_TYPES: dict[str, type[Section]] = {"environments": EnvironmentEntry, "evals": EvalEntry}
ENTRY_KEYS = {name: list(kind.model_fields) for name, kind in ENTRY_TYPES.items()} | {"checkpoints": ["path", "step"]}
ENTRY_EXAMPLES = dict.fromkeys(ENTRY_TYPES, "{name: countdown}") | {
    "checkpoints": "{path: runs/first/checkpoints/step_50}"
}
LONGEST_VALUE = 80  # characters of a wrong value that are worth repeating

EXPECTATIONS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "it must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "it must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "it must be true or false"),
    "finite_number": "it must be a finite number",
    "string_type": "it must be text; put it in quotes",
    "list_type": "it must be a list, such as [a, b]",
    "dict_type": "it must be a mapping, such as {key: value}",
    "string_too_short": "it must not be empty",
    "string_pattern_mismatch": "it must not be blank",
    "int_parsing_size": "it must be a whole number of at most a few digits",
    "extra_forbidden": "there is no such key",
}


def show(value: Any) -> str:
    """Formats a value as in YAML, shortened when it is long."""
    if isinstance(value, float):
        text = f"{value:g}"
    else:
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):  # values that JSON does not have, such as a date
            text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def unknown_field(name: str, known: Iterable[str], source: str | None, value: Any = None) -> str:
    """Returns the message for an unknown field. It may hold fields, as a section of another framework's file does."""
    where = f" ({source})" if source else ""
    fix = "Rename or remove it: `telescope config explain` lists all fields"
    return f"Unknown configuration field '{name}'{where}.{hint(name, known, value)} {fix}"


def describe_errors(error: ValidationError, values: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """A sentence per wrong field, each on its own line."""
    found: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_written_location(detail["loc"]), []).append(detail)
    return "\n".join(_describe(location, details, values, sources) for location, details in found.items())


def describe_argument(error: ValidationError, name: str, value: Any) -> str:
    """Returns a sentence on the wrong part of an argument's value: `criteria.a is "two", but it must be a number`."""
    # A union reports each alternative, with its type in the location. What leads deepest into the value is meant.
    found: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        place: tuple[int | str, ...] = ()
        for part in detail["loc"]:
            inner = _value_at(value, place)
            if (isinstance(inner, dict) and part in inner) or (isinstance(inner, list) and isinstance(part, int)):
                place += (part,)
        found.setdefault(place, []).append(detail)
    place = max(found, key=len)
    part = _value_at(value, place)
    return f"{_dotted((name, *place))} is {show(part)}, but {_alternatives(found[place], part)}"


def _alternatives(details: list[ErrorDetails], value: Any) -> str:
    """Returns what a value must be. A union reports each of its alternatives."""
    ordered = sorted(details, key=lambda detail: detail["type"] == "literal_error")  # last, as a suggestion may follow
    first, *others = dict.fromkeys(_expectation(detail, value) for detail in ordered)
    return first + "".join(f", or {other.removeprefix('it must be ')}" for other in others)


def _dotted(location: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _written_location(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Returns what a person wrote of Pydantic's location: the field, or list, index and key; no union alternatives."""
    if location and location[0] in ENTRY_KEYS:
        return location[:3]
    is_item = len(location) > 1 and isinstance(location[1], int)
    return location[:2] if is_item else location[:1]


def _describe(
    location: tuple[int | str, ...], details: list[ErrorDetails], values: Mapping[str, Any], sources: Mapping[str, str]
) -> str:
    detail = details[0]
    top = str(location[0]) if location else ""
    name = _dotted(location)
    where = f" ({sources[top]})" if top in sources else ""
    if detail["type"] == "extra_forbidden":
        known = ENTRY_KEYS[top]
        near = did_you_mean(key := str(location[-1]), known) or f" An argument of it goes into kwargs: {{{key}: ...}}."
        if key == "path":  # as in `telescope envs try NAME --path FOLDER`
            near += " Folders that hold environments and evals are the field environments_path."
        return f"Unknown key '{name}'{where}.{near} The keys are {', '.join(known)}"
    if detail["type"] == "missing":
        return f"{name} is missing{where}: each entry of {top} needs one, as in {ENTRY_EXAMPLES[top]}"
    value = _value_at(values, location)
    if detail["type"] == "model_type" or (detail["type"] == "list_type" and name in ENTRY_EXAMPLES):
        kind, form = ("list", "[{}]") if detail["type"] == "list_type" else ("mapping", "{}")
        return f"{name} is {show(value)}{where}, but it must be a {kind}, such as {form.format(ENTRY_EXAMPLES[top])}"
    if detail["loc"][-1] == "[key]":
        return f"{name} has the key {detail['input']!r}{where}, which must be text; put it in quotes"
    if detail["type"] == "value_error" and isinstance(value, dict) and len(location) == 2:
        return f"{name} ({value.get('name', 'without a name')}){where}: {_expectation(detail, value)}"
    return f"{name} is {show(value)}{where}, but {_alternatives(details, value)}"


def _expectation(detail: ErrorDetails, value: Any) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "missing":
        return f"{detail['loc'][-1]} is missing"
    if kind == "value_error":
        return detail["msg"].removeprefix("Value error, ")
    if kind == "literal_error":
        choices = str(context["expected"]).replace("'", '"').replace(" or ", ", ")
        suggestion = hint(str(value), [choice.strip('" ') for choice in choices.split(",")])
        return f"it must be {'one of ' if ',' in choices else ''}{choices}.{suggestion}".rstrip(".")
    for bound, words in (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most")):
        if bound in context:
            return f"it must be {words} {context[bound]}"
    return EXPECTATIONS.get(kind, detail["msg"][:1].lower() + detail["msg"][1:])


def _value_at(values: Any, location: tuple[int | str, ...]) -> Any:
    value = values
    for part in location:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value
