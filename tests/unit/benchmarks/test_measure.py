"""The meters of the benchmarks: lag of a blocked loop of either kind; provenance of results."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import uvloop

BLOCKED_SECONDS = 0.2


@pytest.fixture
def measure() -> Any:
    import measure

    return measure


@pytest.mark.parametrize("loop", [asyncio.SelectorEventLoop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_blocked_loop_is_measured_as_lag_for_its_whole_duration(measure: Any, loop: Any) -> None:
    async def lags() -> list[float]:
        meter = measure.LagMeter()
        await asyncio.sleep(2 * measure.LAG_GRID_SECONDS)
        meter.take()
        time.sleep(BLOCKED_SECONDS)  # noqa: ASYNC251  (the fault that the meter is there to see)
        await asyncio.sleep(2 * measure.LAG_GRID_SECONDS)
        meter.stop()
        lags: list[float] = meter.take()
        return lags

    with asyncio.Runner(loop_factory=loop) as runner:
        seen = runner.run(lags())
    assert max(seen) >= BLOCKED_SECONDS - measure.LAG_GRID_SECONDS
    late = [lag for lag in seen if lag >= measure.LAG_GRID_SECONDS]
    assert len(late) >= BLOCKED_SECONDS / measure.LAG_GRID_SECONDS - 2, "every point of the blocked time counts"


def test_iterations_are_measured_in_cpu_time_without_waits(measure: Any) -> None:
    selector = measure.TimedSelector()

    async def work() -> None:
        started = time.thread_time()
        while time.thread_time() - started < 0.05:
            pass
        await asyncio.sleep(0.1)
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(work())
    turns, seconds = selector.take()
    assert max(turns) >= 0.05
    assert sum(turns) <= seconds - 0.1, "the wait is not in it"
    assert selector.take()[0] == [], "returned iterations are removed"


@pytest.mark.parametrize(("turns", "p99"), [([], 0.0), ([0.5], 0.4), ([0.5, 0.5], 0.45), ([0.1] * 10, 0.09)])
def test_a_callback_waits_for_the_rest_of_the_running_iteration(measure: Any, turns: list[float], p99: float) -> None:
    # Of 10 s, 1% is 0.1 s: the turns' last moments that add up to it are what more than 99% of all moments avoid.
    assert measure.lag_of_turns(turns, 10.0, 0.99) == pytest.approx(p99)


def test_a_copy_without_history_names_the_given_commit(
    measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "REPOSITORY", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("SOURCE_COMMIT", "abc1234")
    where = measure.provenance([])
    assert where["commit"] == "abc1234"
    assert where["uncommitted_changes"] is None


def test_a_copy_inside_another_repository_does_not_name_its_commit(
    measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    commit = ["-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-q", "--allow-empty", "-m", "another"]
    for arguments in (["init", "-q"], commit):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("copy\n")
    monkeypatch.delenv("SOURCE_COMMIT", raising=False)
    monkeypatch.setattr(measure, "REPOSITORY", copy)
    assert measure.sources("src") == {"commit": "unknown", "uncommitted_changes": None}
    monkeypatch.setattr(measure, "REPOSITORY", tmp_path)
    own = measure.sources("src")
    assert own["uncommitted_changes"] is False
    monkeypatch.setenv("SOURCE_COMMIT", own["commit"])
    assert measure.sources("src") == own
    monkeypatch.setenv("SOURCE_COMMIT", "0123abc")
    assert measure.sources("src") == {"commit": "0123abc", "uncommitted_changes": None}


def test_without_git_the_commit_is_unknown(measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SOURCE_COMMIT", raising=False)
    assert measure.provenance(["torch"])["commit"] == "unknown"


@pytest.mark.parametrize(
    "name",
    ["end_to_end", "engine_loss", "engine_steps", "engine_throughput", "logprob", "timeline", "trainer", "weight_sync"],
)
def test_gpu_benchmarks_refuse_a_cpu_without_quick(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    benchmark = importlib.import_module(name)
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    assert "no GPU was found; --quick runs on the CPU" in capsys.readouterr().err
