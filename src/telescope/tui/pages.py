"""Defines the base class of the terminal view's pages, and all pages except rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import duckdb
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Input, OptionList, RichLog, Static, TabPane
from textual.widgets.option_list import Option

from telescope.dashboard.timeline import LogQuery, logs
from telescope.errors import UserError
from telescope.health import rules
from telescope.tui.overview import curve, draw, read_overview
from telescope.tui.text import number, safe
from telescope.utils.text import single_line

if TYPE_CHECKING:
    from telescope.tui.app import RunApp

FIRST = (rules.REWARD, rules.TRAINED_REWARD, rules.ENTROPY, rules.GRAD_NORM, rules.KL, rules.LENGTH)
"""Metrics at the top of the list."""
COLORS = ("#5fd7e7", "#d7af5f", "#87d787", "#d787d7")
MIN_PLOT_LINES = 8
LABEL_COLUMNS = 10
NUM_LINES, MOST_LINES = 500, 5000
"""Number of newest lines that are read at first, and number of lines that are kept."""
LEVELS = ("", "INFO", "WARNING", "ERROR")
STYLES = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}
COMPONENT = "component="


class Page(TabPane):
    """A page of a run. `read` runs in a thread, and `show` gets its result."""

    FIRST: ClassVar[str]
    """Selector of the widget that the page's keys control."""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "move('down')", show=False),
        Binding("k", "move('up')", show=False),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("escape", "focus_first", "Back", show=False),
    ]

    filter = ""
    """The entered filter."""

    @property
    def view(self) -> RunApp:
        return cast("RunApp", self.app)

    def read(self) -> Any:
        """Returns the data of the page. Runs in a thread, so it must not touch widgets."""
        raise NotImplementedError

    def show(self, found: Any) -> None:
        raise NotImplementedError

    def refresh_data(self) -> None:
        """Reads in a thread and shows the result. A newer request replaces a running one."""
        self.in_thread(self.read, self.show, "read")

    def read_anew(self) -> None:
        """Reads from the start, because filter or order has changed."""
        self.refresh_data()

    @on(Input.Submitted)
    def submitted(self, event: Input.Submitted) -> None:
        """Applies the entered filter."""
        self.filter = event.value
        self.action_focus_first()
        self.read_anew()

    def in_thread(self, read: Callable[[], Any], show: Callable[[Any], None], group: str) -> None:
        """Calls `read` in a thread, then `show` with its result. In a group, a newer call replaces an older one."""

        async def run() -> None:
            try:
                found = await asyncio.to_thread(read)
            except (UserError, OSError, duckdb.Error) as error:  # the next read may succeed
                self.app.clear_notifications()
                self.notify(single_line(str(error)), severity="warning", markup=False)
                return
            if self.view.is_running:  # the application may have ended, and its widgets are gone then
                show(found)

        # Not `run()`: a worker that is replaced before it starts would leave a coroutine that is never awaited.
        self.run_worker(run, exclusive=True, group=f"{self.id} {group}")  # type: ignore[arg-type]

    def action_focus_first(self) -> None:
        """Moves the focus to the widget that the page's keys control."""
        self.query_one(self.FIRST).focus()

    def action_filter(self) -> None:
        """Moves the focus to the filter, if there is one."""
        for field in self.query(Input):
            field.focus()

    async def action_move(self, way: str) -> None:
        """Moves the cursor of the list, or scrolls the text."""
        first = self.query_one(self.FIRST)
        await first.run_action(f"cursor_{way}" if hasattr(first, "action_cursor_down") else f"scroll_{way}")


def next_of(values: Iterable[str], value: str) -> str:
    """Returns the value that follows `value`, and the first after the last."""
    every = list(values)
    return every[(every.index(value) + 1) % len(every)]


class OverviewPage(Page):
    """Shows the run's health, progress and current activity."""

    FIRST = "VerticalScroll"

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(id="about")

    def read(self) -> dict[str, Any]:
        return read_overview(self.view.registry, self.view.run_id)

    def show(self, found: dict[str, Any]) -> None:
        self.query_one("#about", Static).update(draw(found, width=max(60, self.size.width - 4)))


class MetricsPage(Page):
    """Shows a list of metrics on the left and plots on the right."""

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
        """Shows the names that contain every word of the filter, the most important metrics first."""
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
        self.current = event.option.id or ""
        self.draw()

    def action_pin(self) -> None:
        """Pins or unpins the plot of the current metric."""
        (self.kept.remove if self.current in self.kept else self.kept.append)(self.current)
        self.draw()

    def on_resize(self) -> None:
        self.draw()

    def draw(self) -> None:
        """Draws the pinned plots and the current one, which share the height."""
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
    """Returns a curve of `width` x `height` characters, with its extreme values and its steps."""
    columns = width - LABEL_COLUMNS - 1
    line = curve(values, columns, height - 1, color)
    if line is None:
        return Group(Text("no finite value yet", "dim"))
    made = Table.grid(Column(width=LABEL_COLUMNS, justify="right", style="dim"), Column(width=columns), padding=(0, 1))
    made.add_row(f"{max(line.data):.4g}" + "\n" * (height - 2) + f"{min(line.data):.4g}", line)
    first, last = f"step {steps[0]}", str(steps[-1])
    return Group(made, Text(" " * (LABEL_COLUMNS + 1) + first + last.rjust(columns - len(first)), "dim"))


class LogsPage(Page):
    """Shows the log lines of all processes of a run."""

    FIRST = "RichLog"
    DEFAULT_CSS = """
    LogsPage RichLog { height: 1fr; background: $background; padding: 0 1; }
    LogsPage #log-state { height: 1; padding: 0 1; color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("f", "follow", "Follow"), Binding("e", "level", "Level")]

    level = ""
    follows = True
    components: Sequence[str] = ()
    next_row: int | None = None

    def compose(self) -> ComposeResult:
        yield Input(placeholder=f"/ search, or {COMPONENT}trainer-0", id="log-filter")
        yield Static(id="log-state", markup=False)
        yield RichLog(max_lines=MOST_LINES, wrap=True, markup=False, highlight=False, auto_scroll=False)

    def on_mount(self) -> None:
        self.watch(self.query_one(RichLog), "scroll_y", self.scrolled, init=False)

    def scrolled(self) -> None:
        """Follows while the end is in view, so that new lines do not move what the user has scrolled to."""
        self.follows = self.query_one(RichLog).is_vertical_scroll_end
        self.show_state()

    def read(self) -> dict[str, Any]:
        """Returns the newest lines in the first call, and new lines in later calls."""
        asked = (self.level, self.filter)
        components = [word for word in asked[1].split() if word.startswith(COMPONENT)]
        component = components[0].removeprefix(COMPONENT) if components else ""
        search = " ".join(word for word in asked[1].split() if word not in components)
        since, limit = self.next_row, NUM_LINES if self.next_row is None else MOST_LINES
        query = LogQuery(since=since, level=asked[0], component=component, search=search, limit=limit)
        return {**logs(self.view.store, query), "asked": asked}

    def show(self, found: dict[str, Any]) -> None:
        if found["asked"] != (self.level, self.filter):
            return
        lines = self.query_one(RichLog)
        if self.next_row is None:
            lines.clear()
        self.next_row = found["next"]
        for row in found["rows"]:
            lines.write(draw_line(row), width=max(20, lines.scrollable_content_region.width), scroll_end=False)
        if self.follows:
            lines.scroll_end(animate=False)
        self.components = found["components"]
        self.show_state()

    def show_state(self) -> None:
        """Shows the chosen level, whether the page follows, and the components."""
        level = f"{self.level.lower()} and above" if self.level else "all levels"
        follows = "follows" if self.follows else "stands still, f follows"
        components = ", ".join(map(single_line, self.components))
        self.query_one("#log-state", Static).update(f"{level}, {follows}; components: {components}")

    def action_level(self) -> None:
        self.level = next_of(LEVELS, self.level)
        self.read_anew()

    def action_follow(self) -> None:
        self.follows = not self.follows
        self.refresh_data()

    def read_anew(self) -> None:
        """Shows the newest lines, and follows: those that the user had scrolled to may be among them no more."""
        self.next_row, self.follows = None, True
        super().read_anew()

    def on_resize(self) -> None:
        if self.next_row is not None and self.view.page is self:
            self.read_anew()


def draw_line(row: dict[str, Any]) -> Text:
    """Returns a log line: time, level, component and message."""
    level = row["level"] or ""
    moment = time.strftime("%H:%M:%S", time.localtime(row["time"])) if row["time"] is not None else ""
    head = Text.assemble((f"{moment} ", "dim"), (f"{level.lower()[:8]:<8} ", STYLES.get(level, "dim")))
    head.append(f"{single_line(row['component']):<14} ", "cyan")
    return head.append_text(safe(row["message"], STYLES.get(level, "") if level in ("ERROR", "CRITICAL") else ""))
