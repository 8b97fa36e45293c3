"""Defines the application: its pages, its keys, and the poll for new rows.

Reading runs in threads, because a query may take a second over a slow disk. The visible page reads when it is
opened, and again when the run has grown.
"""

import asyncio
from typing import ClassVar

from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Footer, Static, TabbedContent, Tabs

from telescope.dashboard.events import LIVE_SECONDS, TableSizes
from telescope.dashboard.registry import Registry
from telescope.record.reader import Run
from telescope.tui.pages import LogsPage, MetricsPage, OverviewPage, Page
from telescope.tui.rollouts import RolloutsPage
from telescope.utils.text import single_line

PAGES = {"overview": OverviewPage, "metrics": MetricsPage, "rollouts": RolloutsPage, "logs": LogsPage}


class RunApp(App[None]):
    """Shows one run."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: $background; }
    #name { height: 1; width: auto; max-width: 50%; dock: right; padding: 0 1; text-style: bold; }
    TabbedContent, ContentSwitcher, TabPane { height: 1fr; }
    #about { padding: 0 1; }
    Input { border: none; height: 1; padding: 0 1; background: $surface; }
    * { scrollbar-size: 1 1; scrollbar-background: $background; scrollbar-color: $surface-lighten-2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"open('{name}')", show=False) for number, name in enumerate(PAGES, 1)),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.registry = Registry([run.files.run_dir])
        self.run_id = next(iter(self.registry.stores()))
        self.store = self.registry.store(self.run_id)
        self._label = run.label
        self._sizes = TableSizes(self.store.run)
        self._seen: object = None

    def compose(self) -> ComposeResult:
        with TabbedContent():
            for number, (name, page) in enumerate(PAGES.items(), 1):
                yield page(f"{number} {name}", id=name)
        yield Static(single_line(self._label), id="name", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(Tabs).can_focus = False  # the keys 1 to 4
        self.set_interval(LIVE_SECONDS, self.poll)

    @property
    def page(self) -> Page:
        return self.query_one(f"#{self.query_one(TabbedContent).active or 'overview'}", Page)

    @on(TabbedContent.TabActivated)
    def page_opened(self) -> None:
        self.page.action_focus_first()
        self.page.refresh_data()

    def action_open(self, name: str) -> None:
        self.query_one(TabbedContent).active = name

    def poll(self) -> None:
        """Reads the page again if the run has grown, unless a read is in progress (a slow disk may delay it)."""
        if not any(self.workers):
            self.read_grown()

    @work
    async def read_grown(self) -> None:
        """Reads the visible page if the run has grown."""
        seen = await asyncio.to_thread(lambda: (self._sizes.read(), self.store.run.status))
        if self.is_running and seen != self._seen:
            self._seen = seen
            self.page.refresh_data()
