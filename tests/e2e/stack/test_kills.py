"""A synchronous run with killed processes equals an undisturbed one, bit for bit."""

from __future__ import annotations

import os
import random
from functools import partial

import pytest
from tests.e2e.kills import FLAGS, assert_trains_the_same, kill
from tests.e2e.stack.conftest import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

NUM_STEPS = 8


async def test_a_rank_an_environment_worker_and_a_server_are_killed_and_the_same_is_trained(stack: Stack) -> None:
    straight = await stack.run(**FLAGS, number_of_steps=NUM_STEPS)
    before = await stack.parts.inference.handles[0].status()
    rng = random.Random()
    targets = rng.sample(["rank", "worker", "server"], 3)
    # Within a step, so that a fast machine does not end the run before the last kill.
    shortest_step = min(row["metrics"]["timing_step_total"] for row in straight.steps())
    plan = [(step, rng.uniform(0.0, shortest_step), target) for step, target in zip((1, 3, 5), targets, strict=True)]
    print(f"kills (step, seconds after it, target): {plan}")
    killed = await stack.run(
        **FLAGS, number_of_steps=NUM_STEPS, timeout=280,
        after_steps=[(step, seconds, partial(kill, os.getpid(), target)) for step, seconds, target in plan],
    )  # fmt: skip
    assert_trains_the_same(killed.record, straight.record)
    assert len(killed.record.attempts()) == 2, "the restart of the ranks is an attempt"
    assert (await stack.parts.inference.handles[0].status()).restarts == before.restarts + 1
    assert killed.status.num_masked_samples == 0
    assert stack.parts.weights.last_probe[0].ok
