"""Step metrics as plots, chosen by a filter. A character of a plot has two by four dots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from rich.console import Group, RenderableType
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from telescope.health import rules
from telescope.tui.page import Page
from telescope.tui.text import number
from telescope.utils.text import single_line

FIRST = (rules.REWARD, rules.TRAINED_REWARD, rules.ENTROPY, rules.GRAD_NORM, rules.KL, rules.LENGTH)
"""Metrics at the head of the list."""

COLORS = ("cyan", "yellow", "green", "magenta")
MIN_PLOT_LINES = 8

BLANK = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character by row and column."""

LABEL_COLUMNS = 10
MOST_KEEP = 0.98


class MetricsPage(Page):
    """A list of metrics at the left, plots at the right."""

    TABLES: ClassVar[frozenset[str]] = frozenset({"steps", "step_stats", "attempts"})
    DEFAULT_CSS = """
    MetricsPage #names { width: 40%; max-width: 56; height: 1fr; border-right: solid $surface-lighten-2; }
    MetricsPage OptionList, MetricsPage OptionList:focus {
        height: 1fr; border: none; background: $background; padding: 0 1;
    }
    MetricsPage #plots { width: 1fr; height: 1fr; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "pin", "Keep the plot"),
        Binding("j", "move(1)", show=False),
        Binding("k", "move(-1)", show=False),
    ]

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self._steps: list[int] = []
        self._metrics: dict[str, list[float]] = {}
        self._kept: list[str] = []
        self._current: str | None = None

    def compose(self) -> ComposeResult:
        """Creates the list and the plots."""
        with Horizontal():
            with Vertical(id="names"):
                yield Input(placeholder="/ filter, such as reward or timing total", id="metric-filter")
                yield OptionList(id="metric-list", markup=False)
            yield Static(id="plots", markup=False)

    def focus_first(self) -> None:
        """Puts the cursor into the list."""
        self.query_one(OptionList).focus()

    def read(self) -> tuple[list[int], dict[str, list[float]]]:
        """Returns the steps and every metric."""
        _, columns, metrics = self.view.store.steps()
        return columns["step"], {name: metrics[name] for name in metrics}

    def show(self, found: tuple[list[int], dict[str, list[float]]]) -> None:
        """Shows the names, if they changed, and the plots."""
        known = set(self._metrics)
        self._steps, self._metrics = found
        if set(self._metrics) != known:
            self._list_names()
        self.draw()

    @on(Input.Changed, "#metric-filter")
    def filter_changed(self) -> None:
        """Shows the names that contain every word of the filter."""
        self._list_names()

    @on(Input.Submitted, "#metric-filter")
    def filter_submitted(self) -> None:
        """Goes to the list."""
        self.focus_first()

    @on(OptionList.OptionHighlighted, "#metric-list")
    def name_chosen(self, event: OptionList.OptionHighlighted) -> None:
        """Plots the metric under the cursor."""
        self._current = event.option.id
        self.draw()

    def action_pin(self) -> None:
        """Keeps the plot of the current metric, or lets it go."""
        if self._current is None:
            return
        if self._current in self._kept:
            self._kept.remove(self._current)
        else:
            self._kept.append(self._current)
        self.draw()

    def action_move(self, by: int) -> None:
        """Moves the cursor of the list."""
        names = self.query_one(OptionList)
        names.action_cursor_down() if by > 0 else names.action_cursor_up()

    def on_resize(self) -> None:
        """Draws for the new size."""
        self.draw()

    def _list_names(self) -> None:
        words = self.query_one(Input).value.lower().split()
        names = self.query_one(OptionList)
        current = self._current
        shown = [name for name in ordered(self._metrics) if all(word in name.lower() for word in words)]
        names.clear_options()
        names.add_options([Option(single_line(name), id=name) for name in shown])
        if shown:
            names.highlighted = shown.index(current) if current in shown else 0

    def draw(self) -> None:
        """Draws the kept plots and the current one, which share the height."""
        chosen = [name for name in dict.fromkeys((*self._kept, self._current)) if name in self._metrics]
        area = self.query_one("#plots", Static)
        width, height = max(30, area.size.width - 2), max(MIN_PLOT_LINES + 2, area.size.height)
        each = max(MIN_PLOT_LINES, height // max(1, len(chosen)) - 2)
        parts: list[RenderableType] = []
        for place, name in enumerate(chosen):
            values = [None if math.isnan(value) else value for value in self._metrics[name]]
            kept = " (kept)" if name in self._kept else ""
            newest = next((value for value in reversed(values) if value is not None), None)
            parts.append(Text.assemble((single_line(name), "bold"), f"  {number(newest)}", (kept, "dim")))
            parts.append(plot(values, self._steps or [0], width, each, COLORS[place % len(COLORS)]))
        area.update(
            Group(*parts)
            if parts
            else Text("No metric yet." if not self._metrics else "No metric has this name.", "dim")
        )


def ordered(metrics: dict[str, Any]) -> list[str]:
    """Returns the names, those that are looked at first before the others."""
    first = [name for name in FIRST if name in metrics]
    return [*first, *sorted(name for name in metrics if name not in first)]


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """Returns the exponential moving average, corrected for its start. Of more values, more is kept."""
    known = sum(value is not None for value in values)
    keep = min(MOST_KEEP, 1 - 0.4 * min(1.0, 100 / max(1, known)))
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
