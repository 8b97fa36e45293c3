"""In any order of completions, failures, restarts and syncs, the counts balance and the run ends.

Each example is a whole run on a simulated clock; `Simulation.check` asserts what must hold, and a run in which every
task waits for another is a `Deadlock`.
"""

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.orchestrator.fakes import config_of
from tests.unit.orchestrator.simulated_clock import run_simulated
from tests.unit.orchestrator.simulation import Pace, Simulation
from tests.unit.orchestrator.test_checkpoints import directory_of

from telescope.orchestrator.checkpoints import Checkpointer, CheckpointFolder
from telescope.orchestrator.supervision import Supervisor

seconds = st.sampled_from([0.0, 0.01, 0.3, 1.0, 4.0])


def spans(low: st.SearchStrategy[float]) -> st.SearchStrategy[tuple[float, float]]:
    return st.tuples(low, low).map(lambda pair: (min(pair), max(pair)))


paces = st.builds(
    Pace,
    train=spans(seconds),
    sync=seconds,
    score=spans(seconds),
    tokens=st.sampled_from([(1, 1), (1, 20), (1, 200), (50, 60)]),
    tokens_per_second=st.sampled_from([0.0, 5.0, 50.0]),
    turns=st.sampled_from([(1, 1), (1, 3)]),
    environment_failures=st.sampled_from([0.0, 0.05, 0.3]),
    engine_failures=st.sampled_from([0.0, 0.05]),
    own_aborts=st.sampled_from([0.0, 0.1]),
    lost_conversations=st.sampled_from([0.0, 0.1]),
    deaths=st.lists(st.tuples(st.floats(0, 60), st.integers(0, 1), st.sampled_from([0.1, 5.0, 30.0])), max_size=3).map(
        tuple
    ),
    lost_workers=st.lists(st.tuples(st.floats(0, 60), st.integers(0, 2)), max_size=3).map(tuple),
)


LONG: dict[str, Any] = {
    "environment_error_budget": 1.0, "inference_num_workers": 2, "max_tokens": 1000, "max_model_len": 4096,
    "seq_len": 4096,
}  # fmt: skip
RUNS: dict[str, st.SearchStrategy[Any]] = {
    "prompts_batch_size_for_trainer": st.integers(1, 3),
    "number_of_steps": st.integers(1, 6),
    "max_async_rollout": st.integers(0, 4),
}
"""Fields of any run."""
LANES: dict[str, st.SearchStrategy[Any]] = {
    "group_size": st.integers(1, 4),
    "max_off_policy_steps": st.sampled_from([-1, 0, 1, 2, 8]),
    "max_concurrent_prompts_per_server": st.integers(1, 6),
    "enable_individual_sample_lanes": st.booleans(),
}


@pytest.mark.timeout(600)
@settings(max_examples=40)
@given(paces, st.integers(0, 10_000), st.integers(1, 3), st.fixed_dictionaries(RUNS | LANES), st.booleans())
def test_every_prompt_is_accounted_for_and_nothing_leaks_or_hangs(pace, seed, num_workers, fields, free):
    free = free and fields["enable_individual_sample_lanes"]
    config = config_of(**LONG, **fields, free_lane_after_generation=free)
    run_simulated(Simulation(config, pace, seed=seed, num_servers=2, num_workers=num_workers).run())


class DelayedRanks:
    """Ranks with any delays, which train, sync and save one after the other."""

    world_size = 2

    def __init__(self, simulation: Simulation, delays: tuple[float, float], rng: random.Random) -> None:
        self.queue = asyncio.Lock()
        self._delays, self._rng = delays, rng
        trainer: Any = simulation.trainer
        trainer.train_step = self.alone(trainer.train_step)
        trainer.sync = self.alone(trainer.sync)

    def alone(self, command: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def run(*arguments: Any) -> Any:
            async with self.queue:
                await self.delay()
                return await command(*arguments)

        return run

    async def delay(self) -> None:
        await asyncio.sleep(self._rng.uniform(*self._delays))

    async def save_checkpoint(self, step: int, directory: Path) -> None:
        assert self.queue.locked()
        await self.delay()

    async def finish_checkpoint(self) -> dict[str, str]:
        await self.delay()
        return {}

    async def bring_servers_up(self) -> None:
        """Takes the queue now and then, as a server that comes back does."""
        while True:
            await self.delay()
            await asyncio.sleep(0.5)
            async with self.queue:
                await self.delay()


@settings(max_examples=25)
@given(paces, spans(seconds), st.integers(0, 10_000), st.fixed_dictionaries(RUNS), st.sampled_from([-1, 0, 2]))
def test_checkpoints_after_every_step_with_any_delays_never_block_a_run(pace, delays, seed, fields, bound):
    config = config_of(**LONG, **fields, group_size=2, max_off_policy_steps=bound, checkpoint_every=1)
    steps, batch = config.number_of_steps, config.prompts_batch_size_for_trainer

    async def run(folder: CheckpointFolder) -> None:
        simulation = Simulation(config, pace, seed=seed, num_servers=2)
        ranks = DelayedRanks(simulation, delays, random.Random(seed))
        checkpointer = Checkpointer(config, folder, ranks, simulation.status, directory_of())
        simulation.orchestrator.after_step = checkpointer.after_step
        others = Supervisor()
        others.spawn(ranks.bring_servers_up(), "servers")
        async with asyncio.timeout(20_000):  # simulated seconds; some loops never stop setting timers
            await others.run_until(simulation.run())
        await checkpointer.save_last(steps, simulation.orchestrator.run_state)

    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:  # each file is synced, which a busy disk delays
        folder = CheckpointFolder(Path(path))
        run_simulated(run(folder))
        assert folder.steps() == list(range(1, steps + 1))
        for step in folder.steps():
            state = folder.load(step).state
            ledger = state.ledger
            assert ledger.is_balanced()
            assert ledger.num_trained == step * batch
            assert ledger.open == {group.group_id for group in state.groups}
            unfinished = set(state.sampler.unfinished)
            assert len(unfinished | ledger.open) == len(unfinished) + len(ledger.open)
            settled = ledger.num_trained + sum(ledger.dropped.values())
            assert settled + len(unfinished) + len(ledger.open) == state.sampler.next_draw


def test_the_status_counts_the_samples_that_a_slow_environment_holds_up(monkeypatch):
    simulation = Simulation(config_of(number_of_steps=1, max_async_rollout=0), Pace(score=(60.0, 60.0)))
    said: set[tuple[str, str]] = set()

    class Components(dict[str, str]):
        def __setitem__(self, part: str, doing: str) -> None:
            said.add((part, doing))

    simulation.status.components = Components()
    run_simulated(simulation.run())
    assert ("environments", "4 samples in tools and rewards") in said
