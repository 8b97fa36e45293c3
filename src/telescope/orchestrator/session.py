"""Surrounds the components of a run with the record, the view and stop signals, for every command that starts them.

    reaper -> record -> view -> stop signals -> components, with supervised tasks beside them

They end in reverse order in any case; only the view outlives the record. `run`, `eval_run` and `verify.run` do their
own work in between.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from telescope.cluster.ray_cluster import watch_daemons
from telescope.cluster.reaper import Reaper
from telescope.config import TelescopeConfig
from telescope.orchestrator.run_components import RunComponents, start_components
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.supervision import Interrupt, Supervisor, watchdog

Record = TypeVar("Record")


class View(Protocol):
    """Shows the progress of a run."""

    def start(self, status: RunStatus) -> None: ...

    def stop(self) -> None: ...


class Session:
    """Runs one command. `stack` ends its components; `temporary` is its private directory while it is open."""

    temporary: Path

    def __init__(self, status: RunStatus, view: View | None) -> None:
        self.status = status
        self.has_view = view is not None
        self._view = view
        self.interrupt = Interrupt(status)
        self.supervisor = Supervisor()
        self.stack = AsyncExitStack()

    @contextmanager
    def open(self, record: AbstractContextManager[Record]) -> Iterator[Record]:
        """Opens the record, shows the run and handles stop signals until the end."""
        with ExitStack() as stack:
            self.temporary = stack.enter_context(Reaper()).directory
            if self._view is not None:
                stack.callback(self._view.stop)  # after the record is closed, because the last uploads may fail
            opened = stack.enter_context(record)
            if self._view is not None:
                self._view.start(self.status)
            self.interrupt.install(asyncio.get_running_loop())
            yield opened

    async def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Awaits `main`, or raises the first error of a supervised task. Then ends the components."""
        async with self.stack:
            try:
                await self.supervisor.run_until(main)
            finally:
                if not self.interrupt.requested:  # otherwise the phase explains the next signal
                    self.status.phase = "shutting down"

    async def start(
        self,
        config: TelescopeConfig,
        directory: RunDirectory,
        *,
        with_trainer: bool = True,
        on_data: Callable[[RunComponents], Awaitable[TelescopeConfig | None]] | None = None,
    ) -> RunComponents:
        """Starts the components (`start_components`) and supervises them. Call it inside `run`."""

        def on_ray_started() -> None:
            self.interrupt.install(asyncio.get_running_loop())
            self.supervisor.spawn(watch_daemons(), "Ray's daemons")

        components = await start_components(
            config, directory, self.status, self.stack, self.temporary,
            with_trainer=with_trainer, on_ray_started=on_ray_started, on_data=on_data,
        )  # fmt: skip
        if components.inference is not None:
            self.supervisor.spawn(components.servers.watch(), "server watch")
        self.status.progressed()
        self.supervisor.spawn(watchdog(self.status, config.watchdog_seconds, components.dump_stacks), "watchdog")
        return components
