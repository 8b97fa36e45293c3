"""Log lines: newest at the end, by level and text."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input, RichLog, Static

from telescope.dashboard.timeline import logs
from telescope.tui.page import Page
from telescope.tui.text import safe
from telescope.utils.text import single_line

NUM_LINES, MOST_LINES = 500, 5000
"""Newest lines that are read at first, and lines that are kept."""
LEVELS = ("", "INFO", "WARNING", "ERROR")
STYLES = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}
COMPONENT = "component="


class LogsPage(Page):
    """The lines of all processes of a run."""

    FIRST = "RichLog"
    DEFAULT_CSS = """
    LogsPage RichLog { height: 1fr; background: $background; padding: 0 1; }
    LogsPage #log-state { height: 1; padding: 0 1; color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("f", "follow", "Follow"), Binding("e", "level", "Level")]

    level = search = ""
    follows = True
    next_row: int | None = None

    def compose(self) -> ComposeResult:
        """Creates filter and lines."""
        yield Input(placeholder=f"/ search, or {COMPONENT}trainer-0", id="log-filter")
        yield Static(id="log-state", markup=False)
        yield RichLog(max_lines=MOST_LINES, wrap=True, markup=False, highlight=False, auto_scroll=False)

    def read(self) -> dict[str, Any]:
        """Returns the newest lines at first, and those since then later."""
        asked = (self.level, self.search)
        words = self.search.split()
        component = next((word.removeprefix(COMPONENT) for word in words if word.startswith(COMPONENT)), "")
        search = " ".join(word for word in words if not word.startswith(COMPONENT))
        limit = NUM_LINES if self.next_row is None else MOST_LINES
        found = logs(
            self.view.store, since=self.next_row, level=self.level, component=component, search=search, limit=limit
        )
        return {**found, "asked": asked}

    def show(self, found: dict[str, Any]) -> None:
        """Adds the lines."""
        if found["asked"] != (self.level, self.search):
            return
        lines = self.query_one(RichLog)
        if self.next_row is None:
            lines.clear()
        self.next_row = found["next"]
        for row in found["rows"]:
            lines.write(draw_line(row), width=max(20, lines.scrollable_content_region.width), scroll_end=False)
        if self.follows:
            lines.scroll_end(animate=False)
        level = f"{self.level.lower()} and above" if self.level else "all levels"
        follows = "follows" if self.follows else "stands still, f follows"
        components = ", ".join(map(single_line, found["components"]))
        self.query_one("#log-state", Static).update(f"{level}, {follows}; components: {components}")

    @on(Input.Submitted, "#log-filter")
    def search_submitted(self, event: Input.Submitted) -> None:
        """Reads the lines of the search."""
        self.search = event.value
        self.action_focus_first()
        self.read_anew()

    def action_level(self) -> None:
        """Takes the next lowest level."""
        self.level = LEVELS[(LEVELS.index(self.level) + 1) % len(LEVELS)]
        self.read_anew()

    def action_follow(self) -> None:
        """Follows new lines, or stands still."""
        self.follows = not self.follows
        self.refresh_data()

    def read_anew(self) -> None:
        """Reads the newest lines again."""
        self.next_row = None
        self.refresh_data()

    def on_resize(self) -> None:
        """Wraps the lines anew."""
        if self.next_row is not None and self.view.page is self:
            self.read_anew()


def draw_line(row: dict[str, Any]) -> Text:
    """Returns a log line: time, level, component and message."""
    level = row["level"] or ""
    moment = time.strftime("%H:%M:%S", time.localtime(row["time"])) if row["time"] is not None else ""
    head = Text.assemble((f"{moment} ", "dim"), (f"{level.lower()[:8]:<8} ", STYLES.get(level, "dim")))
    head.append(f"{single_line(row['component']):<14} ", "cyan")
    return head.append_text(safe(row["message"], STYLES.get(level, "") if level in ("ERROR", "CRITICAL") else ""))
