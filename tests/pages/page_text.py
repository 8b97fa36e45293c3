"""Reads numbers and tables as the pages write them."""

from __future__ import annotations

import math
import re

from playwright.sync_api import Locator

SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "%": 1e-2}
NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)([kMG%]?)(?![\w.])")


def plain(text: str) -> str:
    """Returns a text with the usual minus, and without the thin spaces inside numbers."""
    return re.sub(r"\s+", " ", text.replace("\u2212", "-").replace("\u202f", "")).strip()


def numbers(text: str) -> list[float]:
    """Returns all numbers of a text; a percentage as a share."""
    return [float(digits) * SCALES[scale] for digits, scale in NUMBER.findall(plain(text).replace(" %", "%"))]


def number(text: str) -> float | None:
    """Returns the first number of a text, None for the dash of a missing one."""
    found = numbers(text)
    return found[0] if found else None


def shows(text: str, value: float | None) -> bool:
    """Returns whether a text is the value, to the last digit that it has."""
    found = NUMBER.search(plain(text).replace(" %", "%"))
    if value is None or math.isnan(value) or found is None:
        return found is None and (value is None or math.isnan(value))
    decimals = len(found[1].partition("e")[0].partition(".")[2])
    digit = float("1e" + (found[1].partition("e")[2] or "0")) * SCALES[found[2]] * 10.0**-decimals
    return math.isclose(float(found[1]) * SCALES[found[2]], value, rel_tol=1e-9, abs_tol=0.501 * digit)


def table(found: Locator) -> list[dict[str, str]]:
    """Returns the rows of a table's body, by the titles of its columns."""
    titles = [plain(title) for title in found.locator("thead th").all_inner_texts()]
    rows = []
    for row in found.locator("tbody tr").all():
        cells = [plain(cell) for cell in row.locator("td").all_inner_texts()]
        if len(cells) == len(titles):
            rows.append(dict(zip(titles, cells, strict=True)))
    return rows
