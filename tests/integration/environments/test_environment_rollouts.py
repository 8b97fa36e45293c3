"""Multi-turn rollouts: one process owns them from the first turn to the reward."""

import asyncio

import pytest

from telescope.environments.types import EnvironmentSpec
from telescope.errors import EnvironmentFailure, InfrastructureError

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def say(pool, encode, rollout, text, **options):
    return await pool.respond(rollout, encode(text), **options)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_conversation_continues_until_it_is_done_and_is_scored_once(load, encode, tokenizer, asynchronous):
    pool = await load(EnvironmentSpec("talk", {"asynchronous": asynchronous, "system_prompt": "Talk."}))
    assert (await pool.describe("talk")).is_multi_turn
    first = await pool.begin("r", "talk", 3)
    assert first.messages == [{"role": "system", "content": "Talk."}, {"role": "user", "content": "item 3"}]
    assert first.token_ids == (await pool.prepare("talk", 3)).token_ids
    second = await say(pool, encode, "r", "hello")
    assert not second.done and second.reward is None and second.completion_text == "hello"
    assert second.messages == [{"role": "user", "content": "3: hello"}]
    whole = [*first.messages, {"role": "assistant", "content": "hello"}, *second.messages]
    rendered = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    shown = [*first.token_ids, *encode("hello"), *second.append_token_ids]
    assert shown == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    last = await say(pool, encode, "r", "enough", logprobs=[-0.5] * len(encode("enough")))
    assert last.done and last.end_reason == "had enough" and last.messages == []
    assert last.reward.total_reward == 2.0
    metrics = last.reward.sample_metrics
    assert (metrics["prompt_tokens"], metrics["completion_tokens"]) == (len(shown), len(encode("enough")))
    assert metrics["logprobs"] == -0.5 * len(encode("enough"))
    assert last.reward.info_turns == [{"heard": ["hello", "enough"]}, {"item": "3"}]
    assert last.reward.sample_tags == {"eos": "<|im_end|>", "reason": "had enough"}


async def test_synchronous_code_may_run_an_event_loop_even_after_an_await(load, encode):
    pool = await load(EnvironmentSpec("talk", {"asynchronous": True}))
    await pool.begin("r", "talk", 0)
    assert (await say(pool, encode, "r", "run")).messages[0]["content"] == "0: run"


async def test_hundreds_of_concurrent_rollouts_have_separate_states(load, encode):
    """One environment object runs many rollouts of a process."""
    pool = await load(EnvironmentSpec("talk", {"asynchronous": True}))

    async def one(number):
        rollout = f"r{number}"
        await pool.begin(rollout, "talk", number % 50)
        heard = []
        for turn in range(3):
            heard.append(f"{number}.{turn}")
            advance = await say(pool, encode, rollout, heard[-1])
            assert advance.messages[0]["content"] == f"{number % 50}: {', '.join(heard)}"
        return (await say(pool, encode, rollout, "enough")).reward

    rewards = await asyncio.gather(*(one(number) for number in range(300)))
    assert [reward.golden_answers["answer"] for reward in rewards] == [str(n % 50) for n in range(300)]


async def test_rollouts_wait_concurrently(load, encode):
    pool = await load("talk", timeout_seconds=30.0)
    for number in range(100):
        await pool.begin(f"r{number}", "talk", 0)
    started = asyncio.get_running_loop().time()
    await asyncio.gather(*(say(pool, encode, f"r{number}", "wait 0.5") for number in range(100)))
    assert asyncio.get_running_loop().time() - started < 25.0  # sequential calls would take 50 seconds


async def test_an_answer_that_was_cut_off_is_the_last(load, encode):
    pool = await load("talk")
    await pool.begin("r", "talk", 0)
    advance = await pool.respond("r", encode("hel")[:-1], stop_reason="length")
    assert advance.done and advance.end_reason == "truncated"
    assert advance.reward.sample_metrics["truncated"] == 1.0


async def test_an_exhausted_context_scores_the_rollout_so_far(load, encode):
    pool = await load("talk")
    first = await pool.begin("r", "talk", 0)
    advance = await say(pool, encode, "r", "hello", max_context=10_000)
    assert not advance.done
    no_room = len(first.token_ids) + len(encode("hello")) + len(advance.append_token_ids) + 1
    advance = await say(pool, encode, "r", "there", max_context=no_room)
    assert (advance.done, advance.end_reason, advance.reward.total_reward) == (True, "context_exhausted", 2.0)


async def test_turns_are_limited_and_the_environment_may_stop_the_rollout(load, encode):
    pool = await load(EnvironmentSpec("talk", {"max_turns": 2}))
    for rollout, words, reason in (("a", ["x", "y"], "max_turns_reached"), ("b", ["stop at once"], "requested")):
        await pool.begin(rollout, "talk", 0)
        advance = [await say(pool, encode, rollout, word) for word in words][-1]
        assert (advance.done, advance.end_reason) == (True, reason)


async def test_a_rewritten_history_restarts_every_turn(load, encode):
    pool = await load("talk")
    first = await pool.begin("r", "talk", 0, interleaved=False)
    advance = await say(pool, encode, "r", "hello")
    assert advance.restarts and advance.append_token_ids[: len(first.token_ids)] == first.token_ids


@pytest.mark.parametrize(
    ("deed", "error", "words"),
    [
        ("raise", EnvironmentFailure, r"item 7, rollout 'r': respond failed: ValueError: no luck \(environment.py:"),
        ("malformed", EnvironmentFailure, "env_response returned the message str 'not a message'"),
        ("lose", InfrastructureError, "the sandbox is gone"),
        ("sleep 3600", EnvironmentFailure, "did not end within 1 seconds"),
        ("wait 3600", EnvironmentFailure, "did not end within 1 seconds"),
    ],
)
async def test_a_rollout_that_fails_is_over_with_the_reason_and_the_answer(load, encode, deed, error, words):
    pool = await load("talk", timeout_seconds=1.0)
    await pool.begin("r", "talk", 7)
    with pytest.raises(error, match=words):
        await say(pool, encode, "r", deed)
    assert pool.said("r") == [deed]
    await pool.begin("again", "talk", 7)
    assert (await say(pool, encode, "again", "enough")).done


async def test_end_rollout_is_called_for_a_cancelled_rollout_in_any_state(load, encode):
    pool = await load("talk")
    for number, rollout in enumerate(("idle", "waiting", "observer")):
        await pool.begin(rollout, "talk", number)
    waiting = asyncio.ensure_future(say(pool, encode, "waiting", "wait 3600"))
    await asyncio.sleep(0.2)
    pool.cancel("idle")
    pool.cancel("waiting")
    with pytest.raises(asyncio.CancelledError):
        await waiting

    async def ended():
        return (await say(pool, encode, "observer", "count")).messages[0]["content"].split()[1:]

    while sorted(found := await ended()) != ["0", "1"]:
        assert len(found) < 2


async def test_end_rollout_is_called_once_for_every_rollout(load, encode):
    pool = await load("talk")
    for number, rollout in enumerate(("scored", "failed", "observer")):
        await pool.begin(rollout, "talk", number)
    await say(pool, encode, "scored", "enough")
    with pytest.raises(EnvironmentFailure):
        await say(pool, encode, "failed", "raise")
    pool.cancel("scored")
    assert (await say(pool, encode, "observer", "count")).messages[0]["content"] == "ended 0 1"


async def test_a_rollout_that_was_cancelled_before_it_began_leaves_nothing(load, encode):
    pool = await load("talk")
    begins = [asyncio.ensure_future(pool.begin(f"r{number}", "talk", 0)) for number in range(200)]
    await asyncio.sleep(0)
    for number in range(200):
        pool.cancel(f"r{number}")
    assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*begins, return_exceptions=True))
    await pool.begin("r0", "talk", 0)
    ended = (await say(pool, encode, "r0", "count")).messages[0]["content"].split()[1:]
    assert ended == ["0"] * len(ended)


async def test_a_multi_turn_eval_runs_its_environment(load, encode):
    from telescope.evals import eval_spec

    pool = await load(eval_spec("talk", {"max_turns": 2}, key="eval/talk"))
    assert (await pool.describe("eval/talk")).is_multi_turn
    await pool.begin("r", "eval/talk", 5)
    await say(pool, encode, "r", "a", for_eval=True)
    advance = await say(pool, encode, "r", "b", for_eval=True)
    assert advance.done
    assert (advance.reward.total_reward, advance.reward.sample_metrics["reward"]) == (2.0, 2.0)


async def test_a_tool_eval_calls_its_tools_and_is_scored_by_its_metrics(load, encode):
    from telescope.evals import eval_spec

    kwargs = {"dataset": "generated", "num_samples": 3, "system_prompt": "Use the calculator."}
    pool = await load(eval_spec("calculator_agent", kwargs, key="eval"))
    first = await pool.begin("r", "eval", 0)
    assert first.messages[0]["role"] == "system" and "Use the calculator." in first.messages[0]["content"]
    assert first.token_ids == (await pool.prepare("eval", 0)).token_ids
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "6*7"}}</tool_call>'
    reply = await say(pool, encode, "r", call, for_eval=True)
    assert not reply.done and "42" in reply.messages[0]["content"]
    last = await say(pool, encode, "r", "<answer>none</answer>", for_eval=True)
    assert last.done
    assert last.reward.sample_metrics["correct"] == 0.0
    assert last.reward.sample_metrics["total_tool_calls"] == 1


def notes_of(path):
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


async def test_resources_are_prepared_once_for_all_processes_at_the_first_call(load, encode, tmp_path):
    notes = tmp_path / "notes"
    pool = await load(EnvironmentSpec("reserved", {"notes": str(notes)}))
    await pool.prepare("reserved", 0)
    assert notes_of(notes) == []
    advances = await asyncio.gather(*(pool.answer("reserved", i, encode("x"), "stop") for i in range(50)))
    assert {a.reward.sample_metrics["here"] for a in advances} == {1.0}
    assert len({a.reward.sample_metrics["pid"] for a in advances}) == 1
    assert notes_of(notes) == ["try", "prepared"]
    await pool.close()
    assert notes_of(notes) == ["try", "prepared", "closed"]


async def test_resources_may_be_prepared_at_the_start_and_have_the_time_of_a_start(load, encode, tmp_path):
    notes = tmp_path / "notes"
    spec = EnvironmentSpec("reserved", {"notes": str(notes), "seconds": 1.0})
    pool = await load(spec, timeout_seconds=0.5)
    await pool.prepare_resources("reserved")
    assert notes_of(notes) == ["try", "prepared"]
    assert (await pool.answer("reserved", 0, encode("x"), "stop")).reward.total_reward == 1.0


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (OSError("no sandboxes today"), "OSError: no sandboxes today"),
        (SystemExit(3), "user code raised SystemExit"),
        (asyncio.CancelledError(), "user code raised CancelledError"),
    ],
)
async def test_failed_resources_fail_the_waiting_calls_and_are_retried(load, encode, tmp_path, error, shown):
    notes = tmp_path / "notes"
    pool = await load(EnvironmentSpec("reserved", {"notes": str(notes), "error_at_first": error}))
    with pytest.raises(EnvironmentFailure, match=f"prepare_resources failed: .*{shown}"):
        await pool.answer("reserved", 0, encode("x"), "stop")
    assert (await pool.answer("reserved", 0, encode("x"), "stop")).reward.total_reward == 1.0


async def test_per_process_resources_are_prepared_by_each_process(load, encode, tmp_path):
    notes = tmp_path / "notes"
    pool = await load(EnvironmentSpec("reserved_by_each", {"notes": str(notes)}))
    assert notes_of(notes).count("prepared") == 1
    await asyncio.gather(*(pool.answer("reserved_by_each", i, encode("x"), "stop") for i in range(50)))


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_rollouts_that_are_open_when_the_pool_closes_are_ended(load, encode, tmp_path, asynchronous):
    """Resources of their states are released when a run is interrupted, too."""
    diary = tmp_path / "diary"
    pool = await load(EnvironmentSpec("talk", {"asynchronous": asynchronous, "diary": str(diary)}))
    for item in range(6):
        await pool.begin(f"r{item}", "talk", item)
    await say(pool, encode, "r0", "stop at once")
    pool.cancel("r1")  # right before the end, so that the process may not receive it
    waiting = asyncio.ensure_future(say(pool, encode, "r2", "wait 60"))
    await pool.close()
    waiting.cancel()
    assert sorted(diary.read_text().split()) == ["0", "1", "2", "3", "4", "5"]


async def test_an_error_in_end_rollout_leaves_no_other_rollout_open(load, monkeypatch):
    pool = await load("talk")
    environment = pool.by_key["talk"].environment
    ended = []

    async def end_rollout(state):
        ended.append(state.sample.answer)
        raise ValueError("no luck")

    for number, rollout in enumerate("ab"):
        await pool.begin(rollout, "talk", number)
    monkeypatch.setattr(environment, "end_rollout", end_rollout)
    await pool.close()
    assert ended == ["0", "1"]
