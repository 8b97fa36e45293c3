"""The trainer compiles while the servers start, unless they share GPUs, and only if it has something to compile."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.orchestrator.fakes import config_of

from telescope.config import TelescopeConfig
from telescope.orchestrator.run_components import start_workers
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.status import RunStatus
from telescope.utils.timeline import Span

DEADLINE_SECONDS = 20.0
SPANS = [Span("compile", 10.0, 13.0, 0), Span("compile", 11.0, 14.0, 1)]


class Workers:
    """A trainer group and an inference group that log events; a server waits for `until`, if given."""

    def __init__(self, config: TelescopeConfig, *, compiles: bool, until: str | None = None) -> None:
        self.happened: list[str] = []
        self.written: list[dict[str, Any]] = []
        self.config = config
        self._info = SimpleNamespace(config_hash=config.hash, compiles=compiles)
        self._until = until
        self._news = asyncio.Event()
        self.handles = [SimpleNamespace(status=self._no_news)]
        recorder = SimpleNamespace(write=lambda table, row: self.written.append({"table": table, **row}))
        self.directory = cast(RunDirectory, SimpleNamespace(recorder=recorder))

    def note(self, what: str) -> None:
        self.happened.append(what)
        self._news.set()

    async def _no_news(self) -> Any:
        return SimpleNamespace(last_log_lines=[])

    async def setup(self) -> list[Any]:
        self.note("model loaded")
        return [self._info, self._info]

    async def warm_up(self) -> list[Span]:
        self.note("compiling")
        return SPANS

    async def start(self, index: int) -> Any:
        while self._until is not None and self._until not in self.happened:
            self._news.clear()
            await self._news.wait()
        self.note("server up")
        return self._info


async def started(config: TelescopeConfig, workers: Workers) -> RunStatus:
    status = RunStatus("test", 1)
    async with asyncio.timeout(DEADLINE_SECONDS):
        parts: Any = SimpleNamespace(config=config, trainer=workers, inference=workers)
        await start_workers(parts, workers.directory, status)
    return status


async def test_the_trainer_compiles_while_a_server_starts():
    config = config_of()
    workers = Workers(config, compiles=True, until="compiling")
    status = await started(config, workers)
    assert workers.happened == ["model loaded", "compiling", "server up"]
    assert status.components == {"trainer": "ready", "server 0": "ready"}


async def test_a_server_that_shares_its_gpu_is_up_before_the_trainer_takes_any_memory():
    config = config_of(share_gpus=True)
    workers = Workers(config, compiles=True)
    await started(config, workers)
    assert workers.happened == ["server up", "model loaded", "compiling"]


async def test_a_trainer_without_compilation_is_not_warmed_up():
    config = config_of()
    workers = Workers(config, compiles=False)
    await started(config, workers)
    assert sorted(workers.happened) == ["model loaded", "server up"]
    assert workers.written == []


async def test_when_each_rank_compiled_is_recorded_outside_of_any_step(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    config = config_of()
    workers = Workers(config, compiles=True)
    await started(config, workers)
    assert [(row["table"], row["name"], row["rank"], row["step"], row["start"]) for row in workers.written] == [
        ("spans", "compile", 0, None, 10.0),
        ("spans", "compile", 1, None, 11.0),
    ]
    assert "took 4.0 s" in caplog.text
