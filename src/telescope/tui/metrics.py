"""Step metrics as plots, chosen by a filter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from telescope.health import rules
from telescope.tui.page import Page
from telescope.tui.text import curve, number
from telescope.utils.text import single_line

FIRST = (rules.REWARD, rules.TRAINED_REWARD, rules.ENTROPY, rules.GRAD_NORM, rules.KL, rules.LENGTH)
"""Metrics at the head of the list."""
COLORS = ("#5fd7e7", "#d7af5f", "#87d787", "#d787d7")
MIN_PLOT_LINES = 8
LABEL_COLUMNS = 10


class MetricsPage(Page):
    """A list of metrics at the left, plots at the right."""

    FIRST = "#metric-list"
    DEFAULT_CSS = """
    MetricsPage #names { width: 40%; max-width: 56; border-right: solid $surface-lighten-2; }
    MetricsPage OptionList, MetricsPage OptionList:focus { height: 1fr; border: none; background: $background; }
    MetricsPage #plots { width: 1fr; height: 1fr; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("space", "pin", "Keep the plot")]

    steps: Sequence[int] = ()
    metrics: Mapping[str, Sequence[float]] = {}
    current: str = ""

    def compose(self) -> ComposeResult:
        """Creates the list and the plots."""
        self.kept: list[str] = []
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
        known = set(self.metrics)
        self.steps, self.metrics = found
        if set(self.metrics) != known:
            self.list_names()
        self.draw()

    @on(Input.Changed, "#metric-filter")
    def list_names(self) -> None:
        """Shows the names that contain every word of the filter, those that are looked at first before the others."""
        words = self.query_one(Input).value.lower().split()
        names = self.query_one(OptionList)
        every = dict.fromkeys([*(name for name in FIRST if name in self.metrics), *sorted(self.metrics)])
        shown = [name for name in every if all(word in name.lower() for word in words)]
        current = self.current
        names.clear_options()
        names.add_options([Option(single_line(name), id=name) for name in shown])
        if shown:
            names.highlighted = shown.index(current) if current in shown else 0

    @on(OptionList.OptionHighlighted, "#metric-list")
    def plot_chosen(self, event: OptionList.OptionHighlighted) -> None:
        """Plots the metric under the cursor."""
        self.current = event.option.id or ""
        self.draw()

    def action_pin(self) -> None:
        """Keeps the plot of the current metric, or lets it go."""
        (self.kept.remove if self.current in self.kept else self.kept.append)(self.current)
        self.draw()

    def on_resize(self) -> None:
        """Draws for the new size."""
        self.draw()

    def draw(self) -> None:
        """Draws the kept plots and the current one, which share the height."""
        chosen = [name for name in dict.fromkeys((*self.kept, self.current)) if name in self.metrics]
        area = self.query_one("#plots", Static)
        width, height = max(30, area.size.width - 2), max(MIN_PLOT_LINES + 2, area.size.height)
        each = max(MIN_PLOT_LINES, height // max(1, len(chosen)) - 2)
        parts: list[RenderableType] = []
        for name, color in zip(chosen, COLORS * len(chosen), strict=False):
            newest = next((value for value in reversed(self.metrics[name]) if value == value), None)
            kept = " (kept)" if name in self.kept else ""
            parts.append(Text.assemble((single_line(name), "bold"), f"  {number(newest)}", (kept, "dim")))
            parts.append(plot(self.metrics[name], self.steps, width, each, color))
        nothing = "No metric has this name." if self.metrics else "No metric yet."
        area.update(Group(*parts) if parts else Text(nothing, "dim"))


def plot(values: Sequence[float], steps: Sequence[int], width: int, height: int, color: str = COLORS[0]) -> Group:
    """Returns a curve of `width` x `height` characters, with its largest and smallest value and its steps."""
    columns = width - LABEL_COLUMNS - 1
    line = curve(values, columns, height - 1, color)
    if line is None:
        return Group(Text("no finite value yet", "dim"))
    made = Table.grid(Column(width=LABEL_COLUMNS, justify="right", style="dim"), Column(width=columns), padding=(0, 1))
    made.add_row(f"{max(line.data):.4g}" + "\n" * (height - 2) + f"{min(line.data):.4g}", line)
    first, last = f"step {steps[0]}", str(steps[-1])
    return Group(made, Text(" " * (LABEL_COLUMNS + 1) + first + last.rjust(columns - len(first)), "dim"))
