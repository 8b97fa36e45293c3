"""Restarts of the trainer's ranks: what the loops continue with, and when the run ends instead."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.orchestrator.fakes import config_of, group
from tests.unit.orchestrator.simulation import InMemoryRun
from tests.unit.orchestrator.test_checkpoints import Saving
from tests.unit.rollout.fakes import generation, tick

from telescope.config import TelescopeConfig
from telescope.errors import RankLost
from telescope.orchestrator.async_window import Ledger, Staleness
from telescope.orchestrator.groups import Group
from telescope.orchestrator.prompt_sampler import SamplerPosition
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.run_state import RunState, after_restart
from telescope.orchestrator.status import StepSummary
from telescope.orchestrator.supervision import Supervisor
from telescope.orchestrator.training import Training
from telescope.record.reader import Run

ANY_AGE = Staleness(-1)


def sampled_by(n: int, *versions: int) -> Group:
    """A finished group of prompt n whose sample has one token of each version."""
    made = group([1.0], n=n)
    spans = [(version, index, index + 1) for index, version in enumerate(versions)]
    made.samples[0].turns[0].generation = generation([7] * len(versions), spans=spans)
    made.start_version = versions[0]
    return made


def lost_at(step: int, *groups: Group) -> RunState:
    return RunState(step=step, groups=list(groups))


def versions_of(state: RunState) -> dict[int, list[int]]:
    return {g.group_id: g.samples[0].turns[0].generation.version_N.tolist() for g in state.groups}


@pytest.mark.parametrize(
    ("sampled", "labels"), [([2, 3, 4], [2, 3, 4]), ([4, 5, 6], [4, 3, 2]), ([6, 8], [2, 0]), ([3, 5], [3, 3])]
)
def test_tokens_of_lost_versions_are_as_old_as_the_steps_between_their_weights_and_the_checkpoints(sampled, labels):
    state = after_restart(RunState(step=4), lost_at(8, sampled_by(1, *sampled)), ANY_AGE, synchronous=False)
    assert versions_of(state) == {1: labels}
    for version, label in zip(sampled, labels, strict=True):
        assert 4 - label == abs(4 - version)
    assert state.groups[0].start_version <= state.groups[0].oldest_version() == min(labels)


def test_groups_without_a_label_too_old_or_of_lost_versions_in_synchronous_mode_are_sampled_again():
    def groups() -> list[Group]:
        return [sampled_by(1, 2), sampled_by(2, 3), sampled_by(3, 4), sampled_by(4, 5)]

    checkpoint = RunState(step=2)
    asynchronous = after_restart(checkpoint, lost_at(5, *groups()), ANY_AGE, synchronous=False)
    assert versions_of(asynchronous) == {1: [2], 2: [1], 3: [0]}
    assert asynchronous.sampler.unfinished == (0,)
    bounded = after_restart(checkpoint, lost_at(5, *groups()), Staleness(1), synchronous=False)
    assert versions_of(bounded) == {1: [2], 2: [1]}
    synchronous = after_restart(checkpoint, lost_at(5, *groups()), ANY_AGE, synchronous=True)
    assert versions_of(synchronous) == {1: [2]}


def test_kept_groups_are_open_and_every_other_prompt_is_unfinished():
    checkpoint = RunState(
        step=2,
        sampler=SamplerPosition(10, (6, 8, 9)),
        ledger=Ledger({7}, num_opened=7, num_trained=4, dropped={"zero_advantage": 2}, num_requeued=1, requeues={8: 1}),
        groups=[sampled_by(7, 2)],
    )  # fmt: skip
    requeued = sampled_by(12, 3)
    requeued.num_requeues = 2
    lost = RunState(step=4, groups=[sampled_by(7, 2), sampled_by(8, 2), requeued])
    state = after_restart(checkpoint, lost, ANY_AGE, synchronous=False)
    assert [g.group_id for g in state.groups] == [7, 8, 12], "prompt 7 once"
    assert state.sampler == SamplerPosition(13, (6, 9, 10, 11))
    assert state.ledger.open == {7, 8, 12}
    assert state.ledger.num_opened == 4 + 2 + 3
    assert state.ledger.requeues == {8: 1, 12: 2}
    assert state.step == 2


async def train_with_losses(config: TelescopeConfig, every: int, losses: list[int]) -> tuple[InMemoryRun, list[Any]]:
    """Trains to the end. A rank is lost after each of these numbers of event loop turns.

    Returns the last loops, and the groups of every step of the surviving lineage.
    """
    checkpoints = {0: json.dumps(RunState().state_dict())}
    start = RunState()
    rows: list[dict[str, Any]] = []

    async def after_step(step: int, state: Callable[[], RunState]) -> None:
        if step % every == 0:
            checkpoints[step] = json.dumps(state().state_dict())
        await tick(1)

    async def lose(ticks: int) -> None:
        await tick(ticks)
        raise RankLost("trainer rank 0 was killed")

    for ticks in [*losses, None]:
        run = InMemoryRun(config, start=start, after_step=after_step)
        loops = Supervisor()
        if ticks is not None:
            loops.spawn(lose(ticks), "trainer ranks")
        try:
            await loops.run_until(run.orchestrator.run(loops))
        except RankLost:
            newest = max(checkpoints)
            loaded, lost = RunState.load_state_dict(json.loads(checkpoints[newest])), run.orchestrator.run_state()
            rows = [row for row in [*rows, *run.recorder.of("groups")] if row["step"] < newest]
            start = after_restart(
                loaded, lost, Staleness(config.max_off_policy_steps), synchronous=config.max_async_rollout == 0
            )
            await tick(30)
            assert run.slots.num_used == 0
        else:
            return run, [*rows, *run.recorder.of("groups")]
    raise AssertionError("the last run has no loss")


@pytest.mark.timeout(300)
@settings(max_examples=60)
@given(
    losses=st.lists(st.integers(0, 120), min_size=1, max_size=3),
    every=st.integers(1, 3),
    ahead=st.integers(0, 3),
    bound=st.sampled_from([-1, 1, 3]),
    individual=st.booleans(),
)
async def test_every_prompt_is_trained_once_whenever_ranks_are_lost(losses, every, ahead, bound, individual):
    config = config_of(
        number_of_steps=6, max_async_rollout=ahead, max_off_policy_steps=bound, prompt_prefetch_buffer_size=5,
        enable_individual_sample_lanes=individual,
    )  # fmt: skip
    async with asyncio.timeout(60):
        run, rows = await train_with_losses(config, every, losses)
    kept = [row["group_id"] for row in rows if row["status"] == "kept"]
    settled = [row["group_id"] for row in rows if row["status"] in ("kept", "discarded")]
    assert len(kept) == 12
    assert len(set(settled)) == len(settled), "no prompt is used twice"
    position = run.orchestrator.position()
    assert {*settled, *position.unfinished} == set(range(position.next_draw)), "none is skipped"
    assert run.orchestrator.ledger.is_balanced()
    assert run.orchestrator.ledger.num_trained == 12
    assert all(row["age"] >= 0 for row in run.recorder.of("samples", status="kept"))
    if ahead == 0:
        straight = InMemoryRun(config)
        await straight.run()
        of_straight = straight.recorder.of("groups", status="kept")
        assert sorted((row["step"], row["group_id"]) for row in rows if row["status"] == "kept") == sorted(
            (row["step"], row["group_id"]) for row in of_straight
        ), "synchronous mode trains what an uninterrupted run does"


class Ranks:
    def __init__(self, calls: list[str]) -> None:
        self.queue = asyncio.Lock()
        self.config = CONFIG
        self.calls = calls

    async def replace(self) -> None:
        assert self.queue.locked()
        self.calls.append("replace")

    async def setup(self) -> list[Any]:
        assert self.queue.locked()
        self.calls.append("setup")
        return [SimpleNamespace(config_hash=CONFIG.hash, compiles=False)]

    async def load_checkpoint(self, step: int, directory: Path) -> None:
        assert self.queue.locked()
        self.calls.append(f"load {directory.name}")

    async def sync(self) -> dict[str, float]:
        assert not self.queue.locked()
        self.calls.append("sync")
        return {}


CONFIG = config_of(checkpoint_every=1, trainer_max_restarts=2, use_wandb=False)
LOST = RankLost("trainer rank 1 on here was killed by SIGKILL during: training step 3. Its log (x) is empty")


class Bench:
    """Restarts in a run directory with checkpoints after steps 1 and 2, lost in step 3."""

    def __init__(self, folder: Path, config: TelescopeConfig = CONFIG) -> None:
        self.calls: list[str] = []
        ranks = Ranks(self.calls)
        self.saving = Saving(folder / "checkpoints", checkpoint_every=1)
        self.status = self.saving.status
        self.directory = RunDirectory(folder, config, [])
        parts: Any = SimpleNamespace(config=config, trainer=ranks, weights=ranks)
        none: Any = None
        self.training = Training(parts, none, self.directory, self.status, self.saving.folder, none)

    async def restart(self) -> RunState:
        loops: Any = SimpleNamespace(run_state=lambda: lost_at(3, sampled_by(1, 2)))
        return await self.training.restart(LOST, loops, self.saving.checkpointer)


async def test_ranks_are_replaced_before_the_newest_checkpoint_is_loaded_and_sent(tmp_path):
    bench = Bench(tmp_path)
    await bench.saving.steps(2)
    bench.status.step = bench.status.version = 3
    numbers = [0.0] * 8
    bench.status.history = [StepSummary(step, *numbers) for step in range(3)]
    with bench.directory.open_record(console=False) as recorder:
        bench.directory.started({}, 0)
        for step in range(3):
            recorder.write("steps", {"step": step, "version": step + 1})
        state = await bench.restart()
        bench.directory.started({}, state.step)
        recorder.write("steps", {"step": 2, "version": 3})
    assert bench.calls == ["replace", "setup", "load step_2", "sync"]
    assert state.step == bench.status.step == bench.status.version == 2
    assert [summary.step for summary in bench.status.history] == [0, 1]
    news = bench.status.messages[-1]
    assert news.startswith("trainer rank 1 on here was killed by SIGKILL; 1 step lost, continuing after step 2 with 1 ")
    assert news.endswith("(restart 1 of 2)")
    run = Run(tmp_path)
    assert sorted((row["step"], row["attempt"]) for row in run.table("steps").to_pylist()) == [(0, 1), (1, 1), (2, 2)]
    assert [(row["attempt"], row["first_step"]) for row in run.attempts()] == [(1, 0), (2, 2)]


async def test_a_checkpoint_whose_ranks_are_lost_while_it_is_written_is_not_waited_for_by_the_restart(tmp_path):
    bench = Bench(tmp_path)
    await bench.saving.steps(1)
    await bench.saving.checkpointer.wait()
    bench.saving.trainer.error = cast(Any, LOST)
    await bench.saving.checkpointer.after_step(2, lambda: RunState(step=2))
    with bench.directory.open_record(console=False):
        assert (await bench.restart()).step == 1
    assert bench.saving.folder.steps() == [1]


async def test_without_a_complete_checkpoint_the_run_starts_over_with_the_first_weights(tmp_path):
    bench = Bench(tmp_path)
    with bench.directory.open_record(console=False):
        assert (await bench.restart()).step == 0
    assert bench.calls == ["replace", "setup", "sync"]


@pytest.mark.parametrize(("changes", "restarts", "fix"), [
    ({"checkpoint_every": 0}, 0, "set checkpoint_every"),
    ({"trainer_max_restarts": 0}, 0, "trainer_max_restarts is 0: raise it"),
    ({}, 2, r"restarted 2 times already \(trainer_max_restarts\)"),
])  # fmt: skip
async def test_a_rank_that_cannot_restart_or_is_lost_again_and_again_ends_the_run_with_the_field(
    tmp_path, changes, restarts, fix
):
    bench = Bench(tmp_path, CONFIG.replace(**changes))
    await bench.saving.steps(1)
    with bench.directory.open_record(console=False):
        for _ in range(restarts):
            await bench.restart()
        bench.calls.clear()
        with pytest.raises(RankLost, match=f"(?s)during: training step 3.*{fix}"):
            await bench.restart()
    assert bench.calls == []
