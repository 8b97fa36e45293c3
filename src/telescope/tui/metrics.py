"""Step metrics as plots, chosen by a filter."""

from __future__ import annotations

import math
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
from telescope.tui.plot import plot
from telescope.tui.text import number, one_line

FIRST = (rules.REWARD, rules.TRAINED_REWARD, rules.ENTROPY, rules.GRAD_NORM, rules.KL, rules.LENGTH)
"""Metrics at the head of the list."""

COLORS = ("cyan", "yellow", "green", "magenta")
MIN_PLOT_LINES = 8


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
        names.add_options([Option(one_line(name), id=name) for name in shown])
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
            parts.append(Text.assemble((one_line(name), "bold"), f"  {number(newest)}", (kept, "dim")))
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
