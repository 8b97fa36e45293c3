"""Line plots in a terminal: two by four dots in each character. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

BLANK = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character by row and column."""

LABEL_COLUMNS = 10
MOST_KEEP = 0.98


def smooth(values: Sequence[float | None], keep: float | None = None) -> list[float | None]:
    """Returns the exponential moving average, corrected for its start. `keep` grows with the number of values."""
    known = sum(value is not None for value in values)
    keep = min(MOST_KEEP, 1 - 0.4 * min(1.0, 100 / max(1, known))) if keep is None else keep
    mean = weight = 0.0
    out: list[float | None] = []
    for value in values:
        if value is None or not math.isfinite(value):
            out.append(None)
            continue
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(mean / weight)
    return out


class Canvas:
    """Dots of one series. Its size is in characters."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.cells = [[0] * width for _ in range(height)]

    def dot(self, x: int, y: int) -> None:
        """Sets a dot, counted from the lower left corner. Ignores those outside."""
        row = self.height - 1 - y // 4
        if 0 <= x < 2 * self.width and 0 <= row < self.height and y >= 0:
            self.cells[row][x // 2] |= DOTS[3 - y % 4][x % 2]

    def column(self, x: int, low: int, high: int) -> None:
        """Sets the dots of a vertical line."""
        for y in range(min(low, high), max(low, high) + 1):
            self.dot(x, y)


def plot(values: Sequence[float | None], steps: Sequence[int], width: int, height: int, style: str = "cyan") -> Text:
    """Returns a plot of `width` x `height` characters: the smoothed line in `style`, the raw one dim beneath it.

    The axis at the left has the largest, middle and smallest value, and the last line the steps.
    """
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    known = [value for value in finite if value is not None]
    inner, rows = max(2, width - LABEL_COLUMNS - 1), max(2, height - 1)
    if not known:
        return Text("no finite value yet", "dim")
    low, high = min(known), max(known)
    pad = (high - low) or max(abs(high) * 0.1, 1e-9)
    if high == low:
        low, high = low - pad / 2, high + pad / 2
    raw, line = _draw(finite, inner, rows, low, high, joined=False), _draw(smooth(finite), inner, rows, low, high)
    labels = {0: high, rows // 2: high - (high - low) * (rows // 2) / (rows - 1), rows - 1: low}
    made = Text(no_wrap=True)
    for row in range(rows):
        label = f"{labels[row]:.4g}" if row in labels else ""
        made.append(f"{label[:LABEL_COLUMNS]:>{LABEL_COLUMNS}} ", "dim")
        for under, over in zip(raw.cells[row], line.cells[row], strict=True):
            made.append(chr(BLANK | over | (under if not over else 0)), style if over else "bright_black")
        made.append("\n")
    first, last = f"step {steps[0]}", str(steps[-1])
    made.append(" " * (LABEL_COLUMNS + 1) + first + last.rjust(max(1, inner - len(first))), "dim")
    return made


def _draw(
    values: Sequence[float | None], width: int, height: int, low: float, high: float, *, joined: bool = True
) -> Canvas:
    """Draws values over the whole width. Where several share a column, the line spans them."""
    canvas = Canvas(width, height)
    columns: dict[int, tuple[int, int]] = {}
    before: tuple[int, int] | None = None
    for place, value in enumerate(values):
        if value is None:
            before = None
            continue
        x = round(place / max(1, len(values) - 1) * (2 * width - 1))
        y = round((value - low) / (high - low) * (4 * height - 1))
        bottom, top = columns.get(x, (y, y))
        columns[x] = (min(bottom, y), max(top, y))
        if joined and before is not None:
            from_x, from_y = before
            for between in range(from_x + 1, x):
                canvas.dot(between, round(from_y + (y - from_y) * (between - from_x) / (x - from_x)))
        before = (x, y)
    for x, (bottom, top) in columns.items():
        canvas.column(x, bottom, top)
    return canvas
