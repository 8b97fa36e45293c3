"""Draws bar charts as SVG: a panel per quantity, a bar per row, without dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

NAME_WIDTH, PANEL_WIDTH, GAP = 170, 150, 18
BAR_HEIGHT, ROW_HEIGHT, TOP = 14, 22, 40
COLORS = ("#3b6ea5", "#3b6ea5", "#2e8b57", "#b8860b", "#a94442", "#b8860b", "#a94442")


@dataclass(frozen=True)
class Panel:
    """One quantity: its values in the order of the rows, and their format."""

    title: str
    values: Sequence[float]
    form: str


def bar_chart(names: Sequence[str], panels: Sequence[Panel]) -> str:
    """Returns an SVG with one row per name; in each panel the longest bar is the largest value."""
    width = NAME_WIDTH + len(panels) * (PANEL_WIDTH + GAP)
    height = TOP + ROW_HEIGHT * len(names) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for row, name in enumerate(names):
        y = TOP + ROW_HEIGHT * row + BAR_HEIGHT - 3
        parts.append(f'<text x="{NAME_WIDTH - 10}" y="{y}" text-anchor="end">{escape(name)}</text>')
    for column, panel in enumerate(panels):
        left = NAME_WIDTH + column * (PANEL_WIDTH + GAP)
        parts.append(f'<text x="{left}" y="{TOP - 14}" font-weight="bold">{escape(panel.title)}</text>')
        largest = max(*panel.values, 1e-12)
        for row, value in enumerate(panel.values):
            y = TOP + ROW_HEIGHT * row
            length = max(0.0, value) / largest * (PANEL_WIDTH - 50)
            color = COLORS[row % len(COLORS)]
            parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT}" fill="{color}"/>')
            text = escape(panel.form.format(value))
            parts.append(f'<text x="{left + length + 4:.1f}" y="{y + BAR_HEIGHT - 3}">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
