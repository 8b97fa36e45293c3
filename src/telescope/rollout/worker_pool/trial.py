"""Trial load of the environments before a run: imports, constructors and datasets.

Runs user code in one process that can be killed, forked from a server without a tokenizer, so that it takes a second or
two. Owns the deadlines and the error messages. The pool loads everything again, in processes with the tokenizer.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from telescope.environments.types import EnvironmentInfo, EnvironmentSpec
from telescope.errors import UnreachableError, UserError
from telescope.rollout.worker_pool.launcher import Launcher
from telescope.rollout.worker_pool.messages import load_header
from telescope.rollout.worker_pool.worker_handle import STACK_SECONDS, WorkerProcess

SERVER_SECONDS = 120.0
"""Time for a bare interpreter to start on a busy machine."""
DATASET_SECONDS = 600.0
"""Time for one environment to load its dataset, downloads included."""
SLOW_SECONDS = 3.0
"""Time after which a progress line is shown."""


def try_environments(
    specs: Sequence[EnvironmentSpec],
    *,
    environments_path: Sequence[str | Path] = (),
    making_seconds: float = 120.0,
    say: Callable[[str], None] = lambda _: None,
) -> list[EnvironmentInfo]:
    """Loads every environment and its dataset in a separate process. Returns their descriptions, in order.

    `making_seconds` bounds the import and the constructor of one environment. Calls `say` with a line when it takes
    long. Call it from the main thread (see `Launcher`). Raises `UserError` with the environment and the fault: an error
    with its line, an exit of the process, a hang with its stack, an empty dataset, answers that no completion can
    equal.
    """
    return asyncio.run(_Trial(specs, environments_path, making_seconds, say).run())


def notices_of(infos: Sequence[EnvironmentInfo]) -> list[str]:
    """Returns the notices of environments, each once."""
    return list(dict.fromkeys(text for info in infos for text in info.notices))


class _Trial:
    def __init__(
        self,
        specs: Sequence[EnvironmentSpec],
        environments_path: Sequence[str | Path],
        making_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self._header = load_header(specs, environments_path) | {"trial": True}
        self._seconds = {"making": making_seconds, "dataset": DATASET_SECONDS}
        self._say = say
        self._doing = "loading the environments"
        self._deadline: asyncio.TimerHandle | None = None

    async def run(self) -> list[EnvironmentInfo]:
        self._loop = asyncio.get_running_loop()
        self._verdict: asyncio.Future[list[EnvironmentInfo]] = self._loop.create_future()
        self._ended = asyncio.Event()
        with tempfile.TemporaryDirectory(prefix="telescope-trial-") as folder:
            launcher = Launcher(None, Path(folder))
            try:
                await launcher.start(SERVER_SECONDS)
                self._process = WorkerProcess(
                    launcher, Path(folder) / "environments.log", on_frame=self._on_frame, on_ended=self._on_ended
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
                    await self._ended.wait()
            finally:
                await launcher.close()

    def _on_frame(self, header: dict[str, Any], blob: bytes) -> None:
        if "loading" in header:
            self._doing = header["loading"]
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = self._loop.call_later(self._seconds[header["stage"]], self._on_hang, header["stage"])
        elif "ready" in header:
            self._decide([EnvironmentInfo(**fields) for fields in header["ready"]])
        else:
            self._decide(header["failed"], UserError if header.get("reachable", True) else UnreachableError)

    def _on_ended(self) -> None:
        self._decide(f"{self._doing} ended the process, which {self._process.how_it_ended()}{self._last_output()}")
        self._ended.set()

    def _on_hang(self, stage: str) -> None:
        self._process.dump_stacks()
        self._loop.call_later(STACK_SECONDS, self._report_hang, stage)

    def _report_hang(self, stage: str) -> None:
        limit = f"{self._seconds[stage]:g} seconds"
        field = " (environment_timeout_seconds)" if stage == "making" else ""
        self._decide(f"{self._doing} did not end within {limit}{field}{self._last_output()}")

    def _last_output(self) -> str:
        tail = self._process.log_tail()
        return f". Its last output:\n{tail}" if tail else ""

    def _decide(self, outcome: list[EnvironmentInfo] | str, kind: type[UserError] = UserError) -> None:
        """Sets the descriptions, or what is wrong, as an error of that kind. Ignores later outcomes."""
        if self._verdict.done():
            return
        if isinstance(outcome, list):
            self._verdict.set_result(outcome)
        else:
            self._verdict.set_exception(kind(outcome[:1].upper() + outcome[1:]))
