"""Tools in real worker processes: their errors reach only the model."""

import asyncio
import json
from functools import partial

import pytest

from telescope.environments.types import EnvironmentSpec
from telescope.errors import EnvironmentFailure, InfrastructureError

pytestmark = pytest.mark.asyncio(loop_scope="session")


def call(name, *arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_tools_that_hang_are_observations_and_their_process_continues(load, encode):
    pool = await load("tooled", timeout_seconds=20.0)
    for number in range(20):
        await pool.begin(f"r{number}", "tooled", 0)
    answers = [call("spin"), call("doze", 60), call("doze", 0.01), call("run_a_loop")] * 5
    advances = await asyncio.gather(*(pool.respond(f"r{i}", encode(text)) for i, text in enumerate(answers)))
    expected = [
        "[spin] Error: spin did not end within 0.3 seconds.",
        "[doze] Error: doze did not end within 0.3 seconds.",
        "[doze] slept",
        "[run_a_loop] ran",
    ]
    assert [advance.messages[0]["content"] for advance in advances] == expected * 5
    assert [(c["name"], c["error"] is None) for c in advances[3].tool_calls] == [("run_a_loop", True)]
    last = await pool.respond("r0", encode("That is all."))
    assert last.tool_calls == [], "calls are those of one answer"
    assert (last.done, last.end_reason, last.reward.sample_metrics["tool_error_count"]) == (True, "final_answer", 1.0)
    assert not pool.is_stuck


@pytest.mark.parametrize("tool", ["look_up", "fetch"])
async def test_a_call_that_masks_its_sample_is_recorded_with_the_reason(load, encode, tool):
    pool = await load("tooled")
    await pool.begin("r", "tooled", 0)
    await pool.respond("r", encode(call("run_a_loop")))
    with pytest.raises(InfrastructureError):
        await pool.respond("r", encode(call(tool, "moon")))
    assert pool.called("r") == [(0, "run_a_loop", None), (1, tool, "the service has no connection for moon")]


@pytest.mark.parametrize("hangs", [False, True])
async def test_calls_are_recorded_if_the_environment_fails_after_them(load, encode, hangs):
    pool = await load("tooled", timeout_seconds=2.0)
    pool.environments.by_key["tooled"].environment.is_done = partial(fail_after_calls, hangs)
    await pool.begin("r", "tooled", 0)
    with pytest.raises(EnvironmentFailure):
        await pool.respond("r", encode(call("run_a_loop")))
    assert pool.called("r") == [(0, "run_a_loop", None)]


async def fail_after_calls(hangs, state):
    await asyncio.sleep(60.0 if hangs else 0.0)
    raise ValueError("it fails")


async def test_the_calculator_runs_to_its_reward(load, encode):
    kwargs = {"prompt_style": "short", "min_operations": 2}
    pool = await load(EnvironmentSpec("calculator_agent", kwargs))

    async def play(item):
        rollout = f"r{item}"
        text = (await pool.begin(rollout, "calculator_agent", item)).messages[0]["content"]
        signs = [i for i, character in enumerate(text) if character in "+-*"]
        first, rest = text[: signs[1]], text[signs[1] :]
        middle = (await pool.respond(rollout, encode(f"<call>{first}</call>"))).messages[0]["content"]
        value = (await pool.respond(rollout, encode(f"<call>{middle}{rest}</call>"))).messages[0]["content"]
        return (await pool.respond(rollout, encode(f"<answer>{value}</answer>"))).reward.total_reward

    assert await asyncio.gather(*(play(item) for item in range(100))) == [1.0] * 100


async def test_a_game_of_wordle_runs_to_its_end(load, encode):
    pool = await load(EnvironmentSpec("wordle", {"max_turns": 3}))
    await pool.begin("r", "wordle", 0)
    replies = [await pool.respond("r", encode(text)) for text in ("[slate]", "no guess", "[crane] [stone]")]
    assert [reply.done for reply in replies] == [False, False, True]
    assert replies[2].end_reason == "max_turns_reached"
    assert replies[2].reward.sample_metrics["num_invalid"] == 2.0


@pytest.mark.sandbox
async def test_a_rollout_that_finds_no_free_sandbox_names_the_size_of_the_pool(load, encode):
    """The time limit of the call would fail the environment, and advise to raise the limit."""
    pool = await load(EnvironmentSpec("terminal_tasks", {"pool_size": 1}), timeout_seconds=5.0)
    for rollout in ("r0", "r1"):
        await pool.begin(rollout, "terminal_tasks", 0)
    answer = encode(call("shell", "ls"))
    await pool.respond("r0", answer)
    with pytest.raises(InfrastructureError, match=r"within 4\.5 s: 1 of 1 are in use\. Raise pool_size"):
        await pool.respond("r1", answer)
