"""User code that raises, hangs and waits, in the threads and the event loop of one process."""

import asyncio
import os

import pytest

from telescope.errors import EnvironmentFailure

pytestmark = pytest.mark.asyncio(loop_scope="session")
FINE = "fine"


async def do(pool, encode, deed, index=0):
    return (await pool.answer("hostile", index, encode(deed), "stop")).reward


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("raise_error 5", r"item 9: compute_reward failed: ValueError: no luck with 5 \(environment.py:\d+\)"),
        ("exit", "SystemExit"),
        ("exit_later", "user code raised SystemExit"),
        ("await_a_cancelled_task", "user code raised CancelledError"),
        ("wrong_type", "returned float 1.0, not a RewardResult"),
        ("wrong_metric", r"sample_metrics\['rank'\] is str 'first', not a number"),
        ("number nan", "total_reward is nan"),
        ("number inf", "total_reward is inf"),
        ("raise_what_cannot_be_printed", r"Unprintable: \(its __str__ raises RuntimeError\)"),
        ("say_a_lot", r"the environment's result has \d+ bytes; the limit is"),
    ],
)
async def test_a_failing_reward_fails_its_sample_alone_and_the_answer_is_recorded(load, encode, deed, words):
    pool = await load("hostile")
    before = await do(pool, encode, FINE)
    with pytest.raises(EnvironmentFailure, match=words):
        await do(pool, encode, deed, index=9)
    assert pool.said("single 1") == [deed]
    assert (await do(pool, encode, FINE)).sample_metrics == before.sample_metrics
    assert not pool.is_stuck


async def test_a_synchronous_reward_that_never_returns_fails_alone_and_marks_its_process(load, encode, capfd):
    pool = await load("hostile", timeout_seconds=1.0)
    waiting = [asyncio.ensure_future(do(pool, encode, "wait 1.2")) for _ in range(3)]
    await asyncio.sleep(0.1)
    culprit = asyncio.ensure_future(do(pool, encode, "sleep 8"))
    queued = [asyncio.ensure_future(do(pool, encode, FINE)) for _ in range(5)]
    with pytest.raises(EnvironmentFailure, match="did not end within 1 seconds"):
        await culprit
    assert {reward.total_reward for reward in await asyncio.gather(*queued)} == {1.0}
    assert pool.is_stuck
    assert "in sleep" in capfd.readouterr().err, "the log has its stack"
    assert {type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)} == {EnvironmentFailure}


async def test_an_awaiting_reward_that_exceeds_its_deadline_is_cancelled(load, encode):
    pool = await load("hostile", timeout_seconds=0.6)
    with pytest.raises(EnvironmentFailure, match="did not end within"):
        await do(pool, encode, "wait 3600")
    assert not pool.is_stuck
    assert (await do(pool, encode, FINE)).total_reward == 1.0


async def test_waiting_rewards_wait_together(load, encode):
    pool = await load("hostile", timeout_seconds=5.0)
    rewards = await asyncio.gather(*(do(pool, encode, "wait 1") for _ in range(100)))  # 100 s one after the other
    assert len(rewards) == 100


async def test_a_reward_may_run_an_event_loop_of_its_own(load, encode):
    pool = await load("hostile")
    assert (await do(pool, encode, "run_a_loop")).total_reward == 1.0
    assert (await do(pool, encode, "wait 0.01")).total_reward == 1.0


@pytest.mark.parametrize("deed", ["fork_and_raise", "fork_and_return"])
async def test_a_copy_forked_by_user_code_ends_and_the_process_goes_on(load, encode, deed):
    pool = await load("hostile")
    pids = {(await do(pool, encode, what)).sample_metrics["pid"] for what in (deed, *[FINE] * 20)}
    assert pids == {os.getpid()}
