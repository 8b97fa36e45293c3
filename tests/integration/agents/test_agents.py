"""A rollout that a user writes trains exactly what was sampled, in one sequence per conversation."""

import asyncio
import json
from typing import Any

import pytest
from tests.integration.agents.conftest import Agent
from tests.processes import has_ended

from telescope.environments.base import RewardResult, Sample
from telescope.environments.context import Chat
from telescope.errors import InfrastructureError, UserError
from telescope.rollout.sample_rows import tool_call_rows

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def sampled_once(sample: Any, policy: Any) -> None:
    """Each sampled token is trained once, after exactly the ids of its prompt, with its logprob and version."""
    sequences = sample.sequences()
    trained = [ids for s in sequences for ids in s.token_ids_L[s.trained_L].tolist()]
    assert sorted(trained) == sorted(t for turn in sample.turns if turn.trained for t in turn.generation.token_ids_N)
    whole = [(s.token_ids_L.tolist(), s.engine_logprob_L.tolist(), s.version_L.tolist()) for s in sequences]
    for request, turn in zip(policy.requests, sample.turns, strict=True):
        made = [*request.prompt_token_ids, *turn.generation.token_ids_N.tolist()]
        start = len(request.prompt_token_ids)
        (found,) = {tuple(i for i, (ids, *_) in enumerate(whole) if ids[: len(made)] == made)}
        assert found, "the prompt and the answer are the beginning of a sequence"
        _, logprobs, versions = whole[found[0]]
        assert logprobs[start : len(made)] == pytest.approx(turn.generation.logprobs_N.tolist())
        assert versions[start : len(made)] == turn.generation.version_N.tolist()


class OneCall(Agent):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        answer = await context.generate([{"role": "user", "content": sample.prompt}])
        context.metric("length", len(answer.text))
        return RewardResult(float(answer.text == sample.answer), {"checked": 1.0})


async def test_one_call_is_a_turn_with_a_reward_and_metrics(bench: Any) -> None:
    made = await bench(OneCall, ["4"])
    sample = await made.run()
    assert sample.reward.total_reward == 1.0
    assert sample.reward.sample_metrics == {"agent/calls": 1, "length": 1.0, "checked": 1.0}
    assert [turn.text for turn in sample.turns] == ["4"]
    sampled_once(sample, made.policy)
    assert made.slots.num_leased == 0


class Conversation(Agent):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        messages = [{"role": "user", "content": sample.prompt}]
        for _ in range(3):
            answer = await context.generate(messages, tools=[ADD])
            # As SDKs send it back: without reasoning, with other spaces and ids.
            calls = [{**c, "id": "x", "function": {**c["function"], "arguments": '{"b":2,"a":2}'}}
                     for c in answer.openai_tool_calls]  # fmt: skip
            messages = [*messages, {"role": "assistant", "content": answer.text, "tool_calls": calls},
                        {"role": "tool", "tool_call_id": "x", "content": "4"}]  # fmt: skip
        return RewardResult(1.0)


async def test_calls_that_extend_each_other_are_one_sequence_without_a_fork(bench: Any) -> None:
    made = await bench(Conversation, [CALL, f"Again. {CALL}", "It is 4."])
    sample = await made.run()
    assert [turn.parent for turn in sample.turns] == [None, 0, 1]
    assert [turn.divergence for turn in sample.turns] == [None, None, None]
    assert len(sample.sequences()) == 1
    sampled_once(sample, made.policy)
    recorded = tool_call_rows(sample)
    assert [(row["turn"], row["name"], json.loads(row["arguments"]), row["result"]) for row in recorded] == [
        (0, "add", {"a": 2, "b": 2}, "4"), (1, "add", {"a": 2, "b": 2}, "4"),
    ]  # fmt: skip


@pytest.mark.parametrize(("written", "sent", "returned"), [
    ("null", "{}", "{}"), (json.dumps('{"a": 1}'), '{"a": 1}', '{"a": 1}'), ('"a"', "a", "a"),
    ("[1]", "[1]", '{"INVALID_JSON": "[1]"}'), ('"a"', "a", '{"INVALID_JSON": "a"}'),  # as Pydantic AI returns them
    ('{"a": 1.0, "b": 1e2, "c": NaN}', '{"a": 1.0, "b": 100.0, "c": NaN}', '{"a":1,"b":100,"c":null}'),  # JavaScript
])  # fmt: skip
async def test_arguments_in_another_encoding_do_not_fork_the_conversation(
    bench: Any, written: str, sent: str, returned: str
) -> None:
    class Caller(Agent):
        async def rollout(self, sample: Sample, context: Any) -> RewardResult:
            history: list[Any] = [{"role": "user", "content": sample.prompt}]
            create = context.openai().chat.completions.create
            message = (await create(model="policy", messages=history, tools=[ADD])).choices[0].message
            assert [call.function.arguments for call in message.tool_calls] == [sent]
            message.tool_calls[0].function.arguments = returned
            history += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4"}]
            await create(model="policy", messages=history, tools=[ADD])
            return RewardResult(1.0)

    made = await bench(Caller, [f'<tool_call>{{"name": "add", "arguments": {written}}}</tool_call>', "4"])
    sample = await made.run()
    assert [(turn.parent, turn.divergence) for turn in sample.turns] == [(None, None), (0, None)]
    assert sample.reward.sample_metrics["agent/tools_outside_template"] == 2, "this template shows no tools"
    sampled_once(sample, made.policy)


class Reminded(Agent):
    """Sends system messages where coding agents do: at the start, after the user's message, and after a result."""

    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        system = {"role": "system", "content": "Be brief."}
        history: list[Any] = [
            system,
            {**system, "role": "developer"},
            {"role": "user", "content": sample.prompt},
            system,
        ]
        answer = await context.generate(history)
        await context.generate([*history, answer.message, system, {"role": "user", "content": "Sure?"}])
        return RewardResult(1.0)


STRICT = "{% if loop.index0 and m.role == 'system' %}{{ raise_exception('system first') }}{% endif %}"


@pytest.mark.parametrize(("rule", "role"), [("", "system"), (STRICT, "user")])
async def test_a_template_that_refuses_later_system_messages_shows_them_as_the_users(
    bench: Any, rule: str, role: str
) -> None:
    made = await bench(Reminded, ["4", "Yes."])
    tokenizer = made.policy.renderer.tokenizer
    loop = "{% for m in messages %}"
    assert loop in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(loop, loop + rule)
    sample = await made.run()
    assert sample.failure_message is None
    assert [(turn.parent, turn.divergence) for turn in sample.turns] == [(None, None), (0, None)]
    assert [shown for shown, *_ in sample.turns[0].replies] == ["system", role, "user", role]
    assert [shown for shown, *_ in sample.turns[1].replies] == [role, "user"]
    sampled_once(sample, made.policy)


class Branches(Agent):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        start = [{"role": "user", "content": sample.prompt}]
        first = await context.generate(start)
        for more in ("Why?", "Sure?"):
            await context.generate([*start, first.message, {"role": "user", "content": more}])
        await context.generate(start)
        await context.generate([*start, {"role": "assistant", "content": "5"}, {"role": "user", "content": "No."}])
        await context.generate([{"role": "user", "content": "Something else."}])
        return RewardResult(1.0)


async def test_forks_are_sequences_of_their_own_with_their_cause(bench: Any) -> None:
    made = await bench(Branches, ["4", "Because.", "Yes.", "four", "Sorry.", "Else."])
    sample = await made.run()
    assert [turn.parent for turn in sample.turns] == [None, 0, 0, None, None, None]
    assert [turn.divergence for turn in sample.turns] == [None, None, "branch", "retry", "edited_history", None]
    assert [turn.renders_again for turn in sample.turns] == [False, False, False, True, True, False]
    assert len(sample.sequences()) == 5
    sampled_once(sample, made.policy)


class Chats(Agent):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        with context.chat("checker", reward=0.25) as checker:
            await asyncio.gather(
                context.generate([{"role": "user", "content": sample.prompt}]),
                checker.generate([{"role": "user", "content": sample.prompt}]),
            )
        await context.generate([{"role": "user", "content": "Unused."}], train=False)
        return RewardResult(1.0)


async def test_chats_have_their_own_sequences_and_rewards(bench: Any) -> None:
    made = await bench(Chats, lambda prompt: "4")
    sample = await made.run()
    assert sample.chat_rewards == {"checker": 0.25}
    trained = sorted((s.chat, s.num_trained > 0) for s in sample.sequences())
    assert trained == [("", False), ("", True), ("checker", True)]


class ChatsOfTokens(Agent):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        answer = await context.generate([1, 2])
        with context.chat("checker", reward=0.25) as checker:
            verdict = await checker.generate([1, 2, *answer.token_ids, 3])
            await checker.generate([1, 2, *answer.token_ids, 3, *verdict.token_ids, 4])
        return RewardResult(1.0)


async def test_a_chat_that_shows_tokens_of_another_does_not_train_them(bench: Any) -> None:
    made = await bench(ChatsOfTokens, ["4", "yes", "no"])
    sample = await made.run()
    assert [(turn.chat, turn.parent) for turn in sample.turns] == [("", None), ("checker", None), ("checker", 1)]
    answer, *verdicts = [turn.generation.token_ids_N.tolist() for turn in sample.turns]
    trained = [(s.chat, s.token_ids_L[s.trained_L].tolist()) for s in sample.sequences()]
    assert trained == [("", answer), ("checker", [*verdicts[0], *verdicts[1]])]
    sampled_once(sample, made.policy)


async def test_an_engine_that_fails_begins_the_rollout_again(bench: Any) -> None:
    made = await bench(Conversation, [CALL, InfrastructureError("gone"), "No more.", "It is 4."])
    sample = await made.run(max_infrastructure_retries=3)
    assert sample.reward.total_reward == 1.0
    assert sample.num_infrastructure_retries == 1


class Swallows(Agent):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        try:
            await context.generate([{"role": "user", "content": sample.prompt}])
        except Exception:
            return RewardResult(0.0)
        return RewardResult(1.0)


async def test_an_engine_failure_is_never_a_reward(bench: Any) -> None:
    made = await bench(Swallows, [InfrastructureError("gone")] * 9)
    sample = await made.run(max_infrastructure_retries=2)
    assert (sample.reward, sample.failure_kind) == (None, "infrastructure")


class Silent(Agent):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        return RewardResult(1.0)


async def test_a_rollout_without_an_answer_masks_its_sample(bench: Any) -> None:
    sample = await (await bench(Silent, ["4"])).run()
    assert (sample.reward, sample.failure_kind) == (None, "environment")
    assert "without an answer" in sample.failure_message


async def test_a_cancelled_rollout_ends_at_once(bench: Any) -> None:
    made = await bench(OneCall, ["4"])
    asked = asyncio.Event()

    async def hang() -> None:
        asked.set()
        await asyncio.sleep(60)

    made.policy.before = hang
    rollout = made.rollout()
    running = asyncio.ensure_future(rollout.run())
    await asyncio.wait_for(asked.wait(), 5)
    assert rollout.cancel() == [(0, made.policy.requests[0].request_id)]
    sample = await asyncio.wait_for(running, 5)
    assert (sample.cancelled, sample.reward, made.slots.num_leased) == (True, None, 0)


class Compacts(Agent):
    by = "summary"
    tools = ({"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}},)

    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": sample.prompt}]
        for number in range(3):
            answer = await context.generate(messages, self.tools)
            messages = [*messages, answer.message, {"role": "user", "content": f"Next {number}."}]
        messages = await context.compact(messages, keep=2, by=self.by)
        await context.generate(messages)
        return RewardResult(1.0, sample_tags={"roles": " ".join(m["role"] for m in messages)})


class Drops(Compacts):
    by = "drop"


async def test_a_summary_is_trained_and_begins_a_new_sequence(bench: Any) -> None:
    made = await bench(Compacts, ["one", "two", "three", "I counted to three.", "four"])
    sample = await made.run()
    assert sample.reward.sample_tags["roles"] == "system user assistant user"
    assert [turn.parent for turn in sample.turns] == [None, 0, 1, 2, None]
    assert [turn.divergence for turn in sample.turns] == [None] * 4 + ["compaction"]
    first, second = sample.sequences()
    assert "I counted to three." in made.policy.renderer.decode(first.token_ids_L[first.trained_L], cut_end_token=False)
    assert "I counted to three." in made.policy.prompts[-1] and "two" not in made.policy.prompts[-1]
    assert second.num_trained == len(sample.turns[-1].generation.token_ids_N)
    sampled_once(sample, made.policy)


async def test_a_history_may_be_dropped(bench: Any) -> None:
    made = await bench(Drops, ["one", "two", "three", "four"])
    sample = await made.run()
    assert [turn.divergence for turn in sample.turns] == [None] * 3 + ["compaction"]
    assert "three" in made.policy.prompts[-1] and "two" not in made.policy.prompts[-1]


async def test_the_result_of_a_dropped_call_is_dropped_with_it() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}
    result, question = {"role": "tool", "tool_call_id": "x", "content": "4"}, {"role": "user", "content": "2 + 2?"}
    chat = Chat(None)
    messages = [question, call, result, {"role": "assistant", "content": "It is 4."}]
    assert await chat.compact(messages, keep=2, by="drop") == [question, messages[-1]]
    assert await chat.compact(messages, keep=3, by="drop") == messages, "nothing is between"
    assert await chat.compact(messages, keep=0, by="drop") == [question]


class Process(Agent):
    command = ("sh", "-c", "echo $OPENAI_BASE_URL; sleep 60 > /dev/null 2>&1 & echo $!; cat")

    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        await context.generate([{"role": "user", "content": sample.prompt}])
        ended = await context.run(self.command, stdin="hello")
        url, child, said = ended.stdout.split()
        return RewardResult(1.0, sample_tags={"url": url, "child": child, "said": said})


async def test_a_process_of_an_agent_ends_with_all_that_it_started(bench: Any) -> None:
    made = await bench(Process, ["4"])
    tags = (await made.run()).reward.sample_tags
    assert (tags["url"].startswith("http://127.0.0.1:"), tags["said"]) == (True, "hello")
    assert await asyncio.to_thread(has_ended, int(tags["child"])), "its child lives on"


class InSandbox(Agent):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        answer = await context.generate([{"role": "user", "content": sample.prompt}])
        sandbox = await context.sandbox()
        await sandbox.write("/tmp/answer", answer.text)
        with pytest.raises(UserError, match="run got \\['cat', 'a'\\]: give the text of a shell command"):
            await sandbox.run(["cat", "a"])
        result = await sandbox.run("echo $OPENAI_BASE_URL $ROUNDS; cat /tmp/answer", env=context.env() | {"ROUNDS": 2})
        url, rounds, said = result.stdout.split()
        return RewardResult(
            float((said, rounds) == (sample.answer, "2")), sample_tags={"url": url, "id": sandbox.handle.id}
        )


@pytest.mark.sandbox
async def test_a_sandbox_of_an_agent_ends_with_its_rollout(bench: Any) -> None:
    made = await bench(InSandbox, ["4"])
    sample = await made.run()
    assert sample.reward.total_reward == 1.0
    assert sample.reward.sample_tags["url"] == "http://127.0.0.1:8000/v1", "where the sandbox shows the endpoint"
    (environment,) = made.environments._agents
    (pool,) = environment.__dict__["_pools"].values()
    assert sample.reward.sample_tags["id"] not in {handle.id for handle in pool.result().all_sandboxes}
