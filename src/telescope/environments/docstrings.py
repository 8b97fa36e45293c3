"""Parses docstrings in Google, NumPy or Sphinx style, for the descriptions in tool schemas.

A docstring in another form is not an error: its first paragraphs are the description, and parameters have none.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

_SPHINX_FIELD = re.compile(r"^:(\w+)(?:\s+([^:]*))?:\s*(.*)$")
_PARAMETER_FIELDS = frozenset({"param", "parameter", "arg", "argument", "key", "keyword"})
_GOOGLE_SECTION = re.compile(
    r"^(Args|Arguments|Parameters|Params|Keyword Args|Keyword Arguments|Other Parameters|Returns?|Yields?|Raises|"
    r"Examples?|Notes?|Attributes|References|See Also|Warnings?|Todo):\s*$"
)
_PARAMETER_SECTIONS = frozenset(
    {"args", "arguments", "parameters", "params", "keyword args", "keyword arguments", "other parameters"}
)
_GOOGLE_ITEM = re.compile(r"^(\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_NUMPY_ITEM = re.compile(r"^(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?$")


@dataclass(slots=True)
class Docstring:
    """`description` is the text before the first section, `parameters` maps names to descriptions."""

    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def parse_docstring(text: str | None) -> Docstring:
    """Parses the text of `function.__doc__`."""
    lines = inspect.cleandoc(text or "").splitlines()
    if any(_sphinx_parameter(line) for line in lines):
        return _sphinx(lines)
    if any(_is_underline(lines, i) for i in range(len(lines))):
        return _numpy(lines)
    return _google(lines)


def _joined(lines: list[str]) -> str:
    """The paragraphs of the lines, each on one line."""
    paragraphs = "\n".join(line.strip() for line in lines).strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())


def _sphinx_parameter(line: str) -> str | None:
    """The parameter that a field line such as `:param int n: how many` describes."""
    match = _SPHINX_FIELD.match(line.strip())
    if match is None or match[1] not in _PARAMETER_FIELDS or not match[2]:
        return None
    return match[2].split()[-1]


def _sphinx(lines: list[str]) -> Docstring:
    first = next(i for i, line in enumerate(lines) if _SPHINX_FIELD.match(line.strip()))
    found = Docstring(_joined(lines[:first]))
    texts: dict[str, list[str]] = {}
    name: str | None = None
    for line in lines[first:]:
        match = _SPHINX_FIELD.match(line.strip())
        if match is not None:
            name = _sphinx_parameter(line)
            if name is not None:
                texts[name] = [match[3]]
        elif name is not None:
            texts[name].append(line)
    found.parameters = {key: _joined(value) for key, value in texts.items()}
    return found


def _google(lines: list[str]) -> Docstring:
    sections: list[tuple[str, list[str]]] = [("", [])]
    for line in lines:
        match = _GOOGLE_SECTION.match(line)
        if match is not None:
            sections.append((match[1].lower(), []))
        else:
            sections[-1][1].append(line)
    found = Docstring(_joined(sections[0][1]))
    for title, body in sections[1:]:
        if title not in _PARAMETER_SECTIONS:
            continue
        indent = min((_indent(line) for line in body if line.strip()), default=0)
        texts: dict[str, list[str]] = {}
        name: str | None = None
        for line in body:
            match = _GOOGLE_ITEM.match(line.strip()) if _indent(line) == indent else None
            if match is not None:
                name = match[1].lstrip("*")
                texts[name] = [match[2]]
            elif name is not None:
                texts[name].append(line)
        found.parameters.update({key: _joined(value) for key, value in texts.items()})
    return found


def _numpy(lines: list[str]) -> Docstring:
    first = next(i for i in range(len(lines)) if _is_underline(lines, i)) - 1
    found = Docstring(_joined(lines[:first]))
    inside, names = False, list[str]()
    texts: dict[str, list[str]] = {}
    for i in range(first, len(lines)):
        line = lines[i]
        if _is_underline(lines, i):
            continue
        if _is_underline(lines, i + 1):
            inside, names = line.strip().lower() in _PARAMETER_SECTIONS, []
            continue
        match = _NUMPY_ITEM.match(line) if inside and _indent(line) == 0 else None
        if match is not None:
            names = [name.strip().lstrip("*") for name in match[1].split(",")]
            texts.update({name: [] for name in names})
        else:
            for name in names:
                texts[name].append(line)
    found.parameters = {key: _joined(value) for key, value in texts.items()}
    return found


def _is_underline(lines: list[str], i: int) -> bool:
    """Whether line `i` underlines a section's title."""
    if not 0 < i < len(lines):
        return False
    line = lines[i].strip()
    return len(line) >= 3 and set(line) <= {"-"} and bool(lines[i - 1].strip())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip()) if line.strip() else -1
