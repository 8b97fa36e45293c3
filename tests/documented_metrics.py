"""The names of metrics in `docs/metrics.md`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "metrics.md"


def undocumented(names: Iterable[str]) -> list[str]:
    """The names that no row of a table of the document has."""
    patterns = [re.compile(pattern) for pattern in _patterns()]
    return sorted(name for name in set(names) if not any(pattern.fullmatch(name) for pattern in patterns))


def _patterns() -> list[str]:
    """Every name in a code span before the last two columns of a row (formula, unit), as a regular expression."""
    rows = [line.split("|")[1:-1] for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    spans = [span for row in rows for cell in row[:-2] for span in re.findall(r"`([^`]+)`", cell)]
    return [pattern for span in spans for pattern in _expanded(span)]


def _expanded(span: str) -> list[str]:
    """`a/{b,c}/<name>` as the expressions `a/b/[^/]+` and `a/c/[^/]+`."""
    choices = [
        part[1:-1].split(",") if part.startswith("{") else [part] for part in re.split(r"(\{[^}]*\})", span) if part
    ]
    return [
        "".join(re.sub(r"<\w+>", "[^/]+", part) for part in combination) for combination in itertools.product(*choices)
    ]
