"""The application: its pages, keys and the look for new rows.

Reading runs in threads, because a query may take a second over a slow disk. A page reads when it is seen, and again
when one of its tables has grown.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widgets import ContentSwitcher, Footer, Static

from telescope.dashboard.events import ENDED_SECONDS, LIVE_SECONDS, TableSizes
from telescope.dashboard.registry import Registry
from telescope.record.reader import Run
from telescope.tui.logs import LogsPage
from telescope.tui.metrics import MetricsPage
from telescope.tui.overview import OverviewPage
from telescope.tui.page import Page
from telescope.tui.rollouts import RolloutsPage
from telescope.utils.text import single_line

PAGES = ("overview", "metrics", "rollouts", "logs")


class RunApp(App[None]):
    """Shows one run."""

    TITLE = "Telescope"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: $background; }
    #head { height: 1; padding: 0 1; }
    #name { width: 1fr; text-style: bold; }
    #tabs { width: auto; }
    #problem { height: auto; padding: 0 1; color: $warning; display: none; }
    ContentSwitcher { height: 1fr; }
    Input { border: none; height: 1; padding: 0 1; background: $surface; }
    * { scrollbar-size: 1 1; scrollbar-background: $background; scrollbar-color: $surface-lighten-2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(place + 1), f"show('{name}')", show=False) for place, name in enumerate(PAGES)),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("escape", "leave", "Back", show=False),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.registry = Registry([run.files.run_dir])
        self.run_id = next(iter(self.registry.stores()))
        self.store = self.registry.store(self.run_id)
        self._run = run
        self._sizes = TableSizes(self.store.run)
        self._seen: dict[str, int] = {}
        self._state: str | None = None
        self._since_look = 0.0

    def compose(self) -> ComposeResult:
        """Creates the pages."""
        with Horizontal(id="head"):
            yield Static(single_line(self._run.label), id="name", markup=False)
            yield Static(id="tabs", markup=False)
        yield Static(id="problem", markup=False)
        with ContentSwitcher(initial=PAGES[0]):
            yield OverviewPage(id="overview")
            yield MetricsPage(id="metrics")
            yield RolloutsPage(id="rollouts")
            yield LogsPage(id="logs")
        yield Footer()

    def on_mount(self) -> None:
        """Begins to look for new rows."""
        self.action_show(PAGES[0])
        self.set_interval(LIVE_SECONDS, self._tick)

    @property
    def page(self) -> Page:
        """The page that is seen."""
        return self.query_one(f"#{self.query_one(ContentSwitcher).current}", Page)

    def action_show(self, name: str) -> None:
        """Shows a page."""
        self.query_one(ContentSwitcher).current = name
        named = [(one, f"{place + 1} {one}") for place, one in enumerate(PAGES)]
        marks = [f"[{text}]" if one == name else f" {text} " for one, text in named]
        self.query_one("#tabs", Static).update(" ".join(marks))
        self.page.open()

    def action_filter(self) -> None:
        """Goes to the filter of the page."""
        self.page.go_to_filter()

    def action_leave(self) -> None:
        """Leaves the filter."""
        self.page.leave()

    def say(self, problem: str) -> None:
        """Shows why something could not be read; an empty text removes it."""
        line = self.query_one("#problem", Static)
        line.display = bool(problem)
        line.update(single_line(problem))

    def _tick(self) -> None:
        self._since_look += LIVE_SECONDS
        if any(self.workers):
            return  # on a slow disk, a new look or read of a page would replace it each time, and none would end
        if self._state in (None, "live") or self._since_look >= ENDED_SECONDS:
            self._since_look = 0.0
            self._look()

    @work(exclusive=True, group="look")
    async def _look(self) -> None:
        """Reads which tables have grown, and tells the pages."""
        sizes, state = await asyncio.to_thread(lambda: (self._sizes.read(), self.store.run.status))
        if not self.is_running:
            return
        grown = {name for name, rows in sizes.items() if self._seen.get(name) != rows}
        if state != self._state:
            grown.add("status")
        self._seen, self._state = sizes, state
        for page in self.query(Page):
            page.read_grown(grown)
