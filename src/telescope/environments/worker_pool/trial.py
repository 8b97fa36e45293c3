"""A look at the environments before anything is started: do they import, and is there anything in their datasets?

Runs users' code in one process that can be killed, forked from a server without a tokenizer, so that the answer is
there in a second or two. Owns the deadlines and the words for what went wrong. What is loaded here is thrown away: the
pool loads it again in processes that also have the tokenizer.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from telescope.environments.worker_pool.launcher import Launcher
from telescope.environments.worker_pool.messages import EnvironmentInfo, EnvironmentSpec, load_header
from telescope.environments.worker_pool.worker_handle import STACK_SECONDS, WorkerProcess
from telescope.errors import UserError

SERVER_SECONDS = 120.0
"""Given to a bare interpreter to start, on a machine that is busy with other things."""
DATASET_SECONDS = 600.0
"""Given to one environment to load its dataset, downloads included."""
SLOW_SECONDS = 3.0
"""After which whoever waits is told for what."""


def try_environments(
    specs: Sequence[EnvironmentSpec],
    *,
    environments_path: Sequence[str | Path] = (),
    making_seconds: float = 120.0,
    dataset_seconds: float = DATASET_SECONDS,
    say: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Import and make every environment, and load its dataset, in a process of its own. Returns what they had to tell.

    `making_seconds` bounds the import and the constructor of one environment, `dataset_seconds` the loading of its
    dataset. `say` is given a line when it takes long. Call it from the main thread (see `Launcher`).

    Raises `UserError` that names the environment and the fault: an error with its place, an end of the process, a hang
    with its stack, an empty dataset.
    """
    return asyncio.run(_Trial(specs, environments_path, making_seconds, dataset_seconds, say).run())


class _Trial:
    def __init__(
        self,
        specs: Sequence[EnvironmentSpec],
        environments_path: Sequence[str | Path],
        making_seconds: float,
        dataset_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self._header = load_header(specs, environments_path) | {"trial": True}
        self._seconds = {"making": making_seconds, "dataset": dataset_seconds}
        self._say = say
        self._doing = "loading the environments"
        self._deadline: asyncio.TimerHandle | None = None

    async def run(self) -> list[str]:
        self._loop = asyncio.get_running_loop()
        self._verdict: asyncio.Future[list[str]] = self._loop.create_future()
        self._gone = asyncio.Event()
        with tempfile.TemporaryDirectory(prefix="telescope-trial-") as folder:
            launcher = Launcher(None, Path(folder))
            try:
                await launcher.start(SERVER_SECONDS)
                self._process = WorkerProcess(
                    launcher, Path(folder) / "environments.log", on_frame=self._on_frame, on_gone=self._on_gone
                )
                self._process.send(self._header)
                self._process.flush()
                slow = self._loop.call_later(SLOW_SECONDS, lambda: self._say(f"{self._doing} ..."))
                try:
                    return await self._verdict
                finally:
                    slow.cancel()
                    if self._deadline is not None:
                        self._deadline.cancel()
                    self._process.kill()
                    await self._gone.wait()
            finally:
                await launcher.close()

    def _on_frame(self, header: dict[str, Any], blob: bytes) -> None:
        if "loading" in header:
            self._doing = header["loading"]
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = self._loop.call_later(self._seconds[header["stage"]], self._hangs, header["stage"])
        elif "ready" in header:
            said = [text for fields in header["ready"] for text in EnvironmentInfo(**fields).notices]
            self._decide(list(dict.fromkeys(said)))
        else:
            self._decide(header["failed"])

    def _on_gone(self) -> None:
        self._decide(f"{self._doing} ended the process, which {self._process.how_it_ended()}{self._printed()}")
        self._gone.set()

    def _hangs(self, stage: str) -> None:
        self._process.dump_stacks()
        self._loop.call_later(STACK_SECONDS, self._gives_up, stage)

    def _gives_up(self, stage: str) -> None:
        limit = f"{self._seconds[stage]:g} seconds"
        field = " (environment_timeout_seconds)" if stage == "making" else ""
        self._decide(f"{self._doing} did not end within {limit}{field}{self._printed()}")

    def _printed(self) -> str:
        tail = self._process.log_tail()
        return f". What it printed last:\n{tail}" if tail else ""

    def _decide(self, outcome: list[str] | str) -> None:
        """The notices, or what is wrong. The first outcome holds."""
        if self._verdict.done():
            return
        if isinstance(outcome, list):
            self._verdict.set_result(outcome)
        else:
            self._verdict.set_exception(UserError(outcome[:1].upper() + outcome[1:]))
