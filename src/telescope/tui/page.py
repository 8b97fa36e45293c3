"""What the pages of the terminal view share: when they read, and where their keys work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual.binding import Binding, BindingType
from textual.widgets import Input, TabPane

from telescope.errors import UserError
from telescope.utils.text import single_line

if TYPE_CHECKING:
    from telescope.tui.app import RunApp


class Page(TabPane):
    """A page of a run. `read` runs in a thread, `show` gets what it returned."""

    FIRST: ClassVar[str]
    """Selector of the widget in which the keys of the page work."""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "move('down')", show=False),
        Binding("k", "move('up')", show=False),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("escape", "focus_first", "Back", show=False),
    ]

    @property
    def view(self) -> RunApp:
        """The application."""
        return cast("RunApp", self.app)

    def read(self) -> Any:
        """Returns what the page shows. Runs in a thread; must not touch widgets."""
        raise NotImplementedError

    def show(self, found: Any) -> None:
        """Shows what `read` returned."""
        raise NotImplementedError

    def refresh_data(self) -> None:
        """Reads in a thread and shows the result. A newer request replaces one that runs."""
        self.in_thread(self.read, self.show, "read")

    def in_thread(self, read: Callable[[], Any], show: Callable[[Any], None], group: str) -> None:
        """Calls `read` in a thread and then `show` with its result. Of one group, only the newest is shown."""

        async def run() -> None:
            try:
                found = await asyncio.to_thread(read)
            except UserError as error:
                self.notify(single_line(str(error)), severity="warning", markup=False)
                return
            if self.view.is_running:  # otherwise the application ended meanwhile, and its widgets are gone
                show(found)

        # Not `run()`: one that is replaced before it begins would be a coroutine that nobody awaits.
        self.run_worker(run, exclusive=True, group=f"{self.id} {group}")  # type: ignore[arg-type]

    def action_focus_first(self) -> None:
        """Moves the focus to where the keys of the page work."""
        self.query_one(self.FIRST).focus()

    def action_filter(self) -> None:
        """Moves the focus to the filter, if there is one."""
        for field in self.query(Input):
            field.focus()

    async def action_move(self, way: str) -> None:
        """Moves the cursor of the list, or scrolls the text."""
        first = self.query_one(self.FIRST)
        await first.run_action(f"cursor_{way}" if hasattr(first, "action_cursor_down") else f"scroll_{way}")
