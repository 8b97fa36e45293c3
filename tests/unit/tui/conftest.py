"""A short replay of the recorded run, and the application over it."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from textual.pilot import Pilot
from textual.widgets import Input, RichLog, Static
from textual.worker import WorkerCancelled

from telescope.record.reader import Run
from telescope.testing.replay import Replay
from telescope.tui.app import RunApp

NUM_STEPS, NUM_SERVERS = 12, 3
SIZE = (130, 40)


@pytest.fixture(scope="session")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 12 steps."""
    folder = tmp_path_factory.mktemp("runs") / "replayed"
    with Replay(folder, num_steps=NUM_STEPS) as replay:
        replay.write_all()
    return folder


class View:
    """The application in a test: keys, and what a widget shows as text."""

    def __init__(self, app: RunApp, pilot: Pilot[None]) -> None:
        self.app, self._pilot = app, pilot

    async def press(self, *keys: str) -> None:
        """Presses keys, and waits after each until everything is read and drawn."""
        for key in keys:
            await self._pilot.press(key)
            await self.settle()

    async def write(self, text: str) -> None:
        field = self.app.focused
        assert isinstance(field, Input)
        field.value = text
        await self.press("enter")

    async def resize(self, width: int, height: int) -> None:
        await self._pilot.resize_terminal(width, height)
        await self.settle()

    async def poll(self) -> None:
        self.app.read_grown()
        await self.settle()

    async def animations(self) -> None:
        """Waits until nothing scrolls any more."""
        await self._pilot.wait_for_scheduled_animations()
        await self.settle()

    async def settle(self) -> None:
        """Waits until everything is read and drawn."""
        num_quiet = 0
        while num_quiet < 2:  # what a read shows may begin another one
            await self._pilot.pause()
            num_quiet = 0 if list(self.app.workers) else num_quiet + 1
            with suppress(WorkerCancelled):  # a newer read replaces one that runs
                await self.app.workers.wait_for_complete()

    def text(self, selector: str) -> str:
        """What a widget shows, as a terminal would get it."""
        widget = self.app.query_one(selector)
        if isinstance(widget, RichLog):
            return "\n".join(strip.text for strip in widget.lines)
        assert isinstance(widget, Static)
        console = Console(width=SIZE[0], force_terminal=False)
        with console.capture() as captured:
            console.print(widget.content)
        return captured.get()


Open = Callable[..., AbstractAsyncContextManager[View]]


@pytest.fixture
def open_view() -> Open:
    @asynccontextmanager
    async def opened(folder: Path, **options: Any) -> AsyncIterator[View]:
        app = RunApp(Run(folder))
        async with app.run_test(size=options.get("size", SIZE)) as pilot:
            view = View(app, pilot)
            await view.settle()
            yield view

    return opened
