"""What the pages of the terminal view share: when they read, and where their filter is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual.containers import Vertical
from textual.widgets import Input

from telescope.errors import UserError

if TYPE_CHECKING:
    from telescope.tui.app import RunApp


class Page(Vertical):
    """A page over some tables. `read` runs in a thread, `show` gets what it returned."""

    TABLES: ClassVar[frozenset[str]] = frozenset()
    """Tables whose growth makes the page read again."""

    is_stale = True

    @property
    def view(self) -> RunApp:
        """The application."""
        return cast("RunApp", self.app)

    @property
    def is_in_front(self) -> bool:
        """Returns whether this page is in front."""
        return self.view.page is self

    def read(self) -> Any:
        """Returns what the page shows. Runs in a thread; must not touch widgets."""
        raise NotImplementedError

    def show(self, found: Any) -> None:
        """Shows what `read` returned."""
        raise NotImplementedError

    def open(self) -> None:
        """Brings the page to the front and reads what is new."""
        self.focus_first()
        if self.is_stale:
            self.refresh_data()

    def read_grown(self, tables: set[str]) -> None:
        """Reads again if one of its tables has grown, now or when it is opened."""
        if self.TABLES & tables:
            self.is_stale = True
            if self.is_in_front:
                self.refresh_data()

    def refresh_data(self) -> None:
        """Reads in a thread and shows the result. A newer request replaces one that runs."""
        self.is_stale = False
        self.in_thread(self.read, self.show, "read")

    def in_thread(self, read: Callable[[], Any], show: Callable[[Any], None], group: str) -> None:
        """Calls `read` in a thread and then `show` with its result. Of one group, only the newest is shown."""

        async def run() -> None:
            try:
                found, problem = await asyncio.to_thread(read), None
            except UserError as error:
                found, problem = None, error
            if not self.view.is_running:  # the application ended meanwhile, and its widgets are gone
                return
            self.view.say("" if problem is None else str(problem))
            if problem is None:
                show(found)

        # Not `run()`: one that is replaced before it begins would be a coroutine that nobody awaits.
        self.run_worker(run, exclusive=True, group=f"{self.id} {group}")  # type: ignore[arg-type]

    def focus_first(self) -> None:
        """Puts the cursor where the keys of the page work."""

    def go_to_filter(self) -> None:
        """Puts the cursor into the filter, if there is one."""
        for field in self.query(Input):
            field.focus()

    def leave(self) -> None:
        """Leaves the filter."""
        self.focus_first()
