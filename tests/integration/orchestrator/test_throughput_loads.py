"""The loads of `benchmarks/engine_throughput.py` over a fake engine: both end early and leave nothing behind."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import FakeEngineSettings
from tests.fakes.server import FakeEngineServer
from tests.integration.orchestrator.harness import FakeHandle, Ground, config_for
from tests.repository_modules import benchmarks_importable

from telescope.inference.client import EngineClient
from telescope.inference.vllm.step_meter import StepReading

pytestmark = pytest.mark.asyncio(loop_scope="session")

ENGINE = FakeEngineSettings(mean_tokens=500, tokens_per_second=80, vocabulary=300, end_token=None, max_running=16)
REQUESTS = 128


@pytest.fixture(autouse=True)
def _importable() -> Iterator[None]:
    with benchmarks_importable():
        yield


@dataclass
class AfterLoad:
    """What the engine had been asked for since the beginning, and what it still had, when a load was over."""

    requested: int
    left: int


def metered(fake: FakeEngineServer) -> Any:
    """A server whose every token is a step, in place of vLLM's; `after` gets a note at the end of each load."""
    from loaded_engine import Sample, Server

    @dataclass
    class Metered(Server):  # type: ignore[misc]
        fake: FakeEngineServer
        after: list[AfterLoad] = field(default_factory=list)

        def __post_init__(self) -> None:
            self.url, self.secret = self.fake.url, self.fake.secret

        async def status(self) -> Any:
            return FakeHandle(self.fake)

        def client(self) -> EngineClient:
            return EngineClient(self.url, self.secret)

        def reading(self) -> StepReading:
            engine = self.fake.app.engine
            tokens = engine.num_sampled_tokens
            return StepReading(time.monotonic(), float(tokens), tokens, tokens, engine.num_running)

        def sample(self) -> Sample:
            return Sample(self.reading(), {"engine": 0.0, "server": 0.0, "driver": 0.0})

        async def until_idle(self, timeout: float = 10.0) -> None:
            await super().until_idle(timeout)
            self.after.append(AfterLoad(self.fake.app.num_requests, len(self.fake.app.engine.requests)))

    return Metered(fake)


@asynccontextmanager
async def bench_over(ground: Ground, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """A `Bench` whose requests a fake engine answers, with 16 tokens on average."""
    import engine_throughput
    from forced_lengths import Lengths

    async def empty_prefix_cache(client: EngineClient) -> None:
        """A fake engine has none."""

    monkeypatch.setattr(engine_throughput, "empty_prefix_cache", empty_prefix_cache)
    config = config_for(ground.tokenizer, max_concurrent_prompts_per_server=4)
    async with FakeEngineServer(ENGINE) as fake:
        yield engine_throughput.Bench(config, metered(fake), folder, Lengths(16, 30), REQUESTS)


async def test_loads_end_with_their_window_and_leave_the_engine_idle(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench_over(ground, tmp_path / "loads", monkeypatch) as bench:
        saved: list[dict[str, Any]] = []
        results = await bench.measure(repeats=2, deadline=None, save=saved.append)
        server = bench.server
    assert [run["load"] for run in results["runs"]] == ["orchestrator", "bare", "bare", "orchestrator"]
    assert [after.left for after in server.after] == [0] * 5
    requested = [after.requested for after in server.after]
    assert requested[0] >= REQUESTS, "the warm-up sends all of them"
    for before, now in itertools.pairwise(requested):
        assert results["lanes"] < now - before < requested[0], (
            "finished requests were replaced until the end of the window"
        )
    assert all(run["tokens_per_second"] > 0 for run in results["runs"])
    assert [len(kept["runs"]) for kept in saved] == [2, 4], "what is measured is kept pair by pair"
    assert saved[-1] == results


async def test_no_pair_begins_that_may_end_after_the_deadline(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench_over(ground, tmp_path / "loads", monkeypatch) as bench:
        results = await bench.measure(repeats=3, deadline=time.monotonic(), save=lambda _: None)
    assert [run["load"] for run in results["runs"]] == ["orchestrator", "bare"], "the first pair is always measured"
