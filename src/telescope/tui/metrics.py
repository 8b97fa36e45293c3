"""Step metrics as plots, chosen by a filter. A character of a plot has two by four dots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
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
LABEL_COLUMNS = 10
MOST_KEEP = 0.98
MOST_DRAWN = 1e300
"""Magnitude at which values are cut, so that the range of all stays finite."""

BLANK = 0x2800
DOTS = np.array(((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80)))
"""Bits of a braille character by row and column."""

Array = np.ndarray[Any, Any]


class MetricsPage(Page):
    """A list of metrics at the left, plots at the right."""

    TABLES: ClassVar[frozenset[str]] = frozenset({"steps", "step_stats", "attempts"})
    FIRST = "#metric-list"
    DEFAULT_CSS = """
    MetricsPage #names { width: 40%; max-width: 56; height: 1fr; border-right: solid $surface-lighten-2; }
    MetricsPage OptionList, MetricsPage OptionList:focus {
        height: 1fr; border: none; background: $background; padding: 0 1;
    }
    MetricsPage #plots { width: 1fr; height: 1fr; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("space", "pin", "Keep the plot")]

    _steps: Sequence[int] = ()
    _metrics: Mapping[str, Sequence[float]] = {}
    _current: str | None = None

    def compose(self) -> ComposeResult:
        """Creates the list and the plots."""
        self._kept: list[str] = []
        with Horizontal():
            with Vertical(id="names"):
                yield Input(placeholder="/ filter, such as reward or timing total", id="metric-filter")
                yield OptionList(id="metric-list", markup=False)
            yield Static(id="plots", markup=False)

    def read(self) -> tuple[Sequence[int], Mapping[str, Sequence[float]]]:
        """Returns the steps and every metric."""
        _, columns, metrics = self.view.store.steps()
        return columns["step"], metrics

    def show(self, found: tuple[Sequence[int], Mapping[str, Sequence[float]]]) -> None:
        """Shows the names, if they changed, and the plots."""
        known = set(self._metrics)
        self._steps, self._metrics = found
        if set(self._metrics) != known:
            self.list_names()
        self.draw()

    @on(Input.Submitted, "#metric-filter")
    def filter_submitted(self) -> None:
        """Moves the focus to the list."""
        self.focus_first()

    @on(OptionList.OptionHighlighted, "#metric-list")
    def name_chosen(self, event: OptionList.OptionHighlighted) -> None:
        """Plots the metric under the cursor."""
        self._current = event.option.id
        self.draw()

    def action_pin(self) -> None:
        """Keeps the plot of the current metric, or lets it go."""
        if self._current in self._kept:
            self._kept.remove(self._current)
        elif self._current is not None:
            self._kept.append(self._current)
        self.draw()

    def on_resize(self) -> None:
        """Draws for the new size."""
        self.draw()

    @on(Input.Changed, "#metric-filter")
    def list_names(self) -> None:
        """Shows the names that contain every word of the filter, those that are looked at first before the others."""
        words = self.query_one(Input).value.lower().split()
        names = self.query_one(OptionList)
        every = dict.fromkeys([*(name for name in FIRST if name in self._metrics), *sorted(self._metrics)])
        shown = [name for name in every if all(word in name.lower() for word in words)]
        current = self._current
        names.clear_options()
        names.add_options([Option(single_line(name), id=name) for name in shown])
        if shown:
            names.highlighted = shown.index(current) if current in shown else 0

    def draw(self) -> None:
        """Draws the kept plots and the current one, which share the height."""
        chosen = [name for name in dict.fromkeys((*self._kept, self._current or "")) if name in self._metrics]
        area = self.query_one("#plots", Static)
        width, height = max(30, area.size.width - 2), max(MIN_PLOT_LINES + 2, area.size.height)
        each = max(MIN_PLOT_LINES, height // max(1, len(chosen)) - 2)
        parts: list[RenderableType] = []
        for name, color in zip(chosen, COLORS * len(chosen), strict=False):
            values = self._metrics[name]
            newest = next((value for value in reversed(values) if not math.isnan(value)), None)
            kept = " (kept)" if name in self._kept else ""
            parts.append(Text.assemble((single_line(name), "bold"), f"  {number(newest)}", (kept, "dim")))
            parts.append(plot(values, self._steps, width, each, color))
        nothing = "No metric has this name." if self._metrics else "No metric yet."
        area.update(Group(*parts) if parts else Text(nothing, "dim"))


def smooth(values: Array) -> Array:
    """Returns the exponential moving average, corrected for its start. Of more values, more is kept."""
    known = np.isfinite(values)
    keep = min(MOST_KEEP, 1 - 0.4 * min(1.0, 100 / max(1, known.sum())))
    mean = weight = 0.0
    smoothed = np.full(len(values), np.nan)
    for place in np.flatnonzero(known):
        mean, weight = keep * mean + (1 - keep) * values[place], keep * weight + (1 - keep)
        smoothed[place] = mean / weight
    return smoothed


def plot(values: Sequence[float], steps: Sequence[int], width: int, height: int, style: str = "cyan") -> Text:
    """Returns a plot of `width` x `height` characters: the smoothed line in `style`, the raw values dim beneath it.

    The axis at the left has the largest, middle and smallest value, and the last line the steps.
    """
    raw = np.array(values, float)
    raw = np.where(np.isfinite(raw), raw.clip(-MOST_DRAWN, MOST_DRAWN), np.nan)
    if np.isnan(raw).all():
        return Text("no finite value yet", "dim")
    columns, rows = max(2, width - LABEL_COLUMNS - 1), max(2, height - 1)
    low, high = float(np.nanmin(raw)), float(np.nanmax(raw))
    if low == high:
        pad = max(abs(high) * 0.1, 1e-9) / 2
        low, high = low - pad, high + pad
    every = np.arange(len(raw), dtype=float)
    between = np.concatenate([every, np.linspace(0, len(raw) - 1, 16 * columns)])
    under = _braille(raw, every, columns, rows, low, high)
    over = _braille(smooth(raw), between, columns, rows, low, high)
    labels = {0: high, rows // 2: high - (high - low) * (rows // 2) / (rows - 1), rows - 1: low}
    made = Text(no_wrap=True)
    for row in range(rows):
        label = f"{labels[row]:.4g}" if row in labels else ""
        made.append(f"{label[:LABEL_COLUMNS]:>{LABEL_COLUMNS}} ", "dim")
        for line, dots in zip(over[row], under[row], strict=True):
            made.append(chr(BLANK | (line or dots)), style if line else "bright_black")
        made.append("\n")
    first, last = f"step {steps[0]}", str(steps[-1])
    return made.append(" " * (LABEL_COLUMNS + 1) + first + last.rjust(max(1, columns - len(first))), "dim")


def _braille(values: Array, places: Array, columns: int, rows: int, low: float, high: float) -> list[list[int]]:
    """Returns the bits of each character: dots at fractional `places` of the values, on the lines between them."""
    left = places.astype(int)
    part = places - left
    ends = values[np.minimum(left + 1, len(values) - 1)]
    heights = np.where(part > 0, values[left] + part * (ends - values[left]), values[left])
    known = np.isfinite(heights)
    grid = np.zeros((4 * rows, 2 * columns), int)
    y = np.rint((high - heights[known]) / (high - low) * (4 * rows - 1)).astype(int)
    grid[y, np.rint(places[known] / max(1, len(values) - 1) * (2 * columns - 1)).astype(int)] = 1
    cells: list[list[int]] = np.einsum("rycx,yx->rc", grid.reshape(rows, 4, columns, 2), DOTS).tolist()
    return cells
