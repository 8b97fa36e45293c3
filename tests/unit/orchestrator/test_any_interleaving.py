"""In any order of completions, failures, restarts and syncs, the counts balance and the run ends.

Each example is a whole run on a simulated clock; `Simulation.check` asserts what must hold, and a run in which every
task waits for another is a `Deadlock`.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.orchestrator.fakes import config_of
from tests.unit.orchestrator.simulated_clock import run_simulated
from tests.unit.orchestrator.simulation import Pace, Simulation

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
)


@pytest.mark.timeout(600)
@settings(max_examples=40)
@given(
    pace=paces,
    seed=st.integers(0, 10_000),
    group_size=st.integers(1, 4),
    batch=st.integers(1, 3),
    steps=st.integers(1, 6),
    ahead=st.integers(0, 4),
    bound=st.sampled_from([-1, 0, 1, 2, 8]),
    slots=st.integers(1, 6),
    individual=st.booleans(),
    free=st.booleans(),
)
def test_every_prompt_is_accounted_for_and_nothing_leaks_or_hangs(
    pace: Pace,
    seed: int,
    group_size: int,
    batch: int,
    steps: int,
    ahead: int,
    bound: int,
    slots: int,
    individual: bool,
    free: bool,
) -> None:
    config = config_of(
        group_size=group_size,
        prompts_batch_size_for_trainer=batch,
        number_of_steps=steps,
        max_async_rollout=ahead,
        max_off_policy_steps=bound,
        max_concurrent_prompts_per_server=slots,
        enable_individual_sample_lanes=individual,
        free_lane_after_generation=free and individual,
        environment_error_budget=1.0,
        inference_num_workers=2,
        max_tokens=1000,
        max_model_len=4096,
        seq_len=4096,
    )
    run_simulated(Simulation(config, pace, seed=seed, num_servers=2).run())
