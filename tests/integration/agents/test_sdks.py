"""Agents that know nothing of Telescope run unchanged: SDKs, a framework, and programs, also in a sandbox."""

import asyncio
import json
import os
import sys
from typing import Any

import pytest
from tests.integration.agents.conftest import Agent
from tests.integration.agents.test_agents import ADD, CALL, sampled_once

from telescope.environments.base import RewardResult, Sample
from telescope.environments.context import RolloutContext
from telescope.environments.terminal_tasks.environment import TerminalTasksEnvironment
from telescope.environments.terminal_tasks.tasks import own_tasks
from telescope.environments.tool_env import SANDBOX_KEY

QUESTION = {"role": "user", "content": "What is 2 + 2?"}


class Chat(Agent):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        messages: list[Any] = [QUESTION]
        while True:
            response = await context.openai().chat.completions.create(model="policy", messages=messages, tools=[ADD])
            message = response.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return RewardResult(float(message.content == "It is 4."))
            for call in message.tool_calls:
                result = sum(json.loads(call.function.arguments).values())
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


class Responses(Agent):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        tool = {"type": "function", "strict": False, **ADD["function"]}  # type: ignore[dict-item]
        items: list[Any] = [QUESTION]
        while True:
            response = await context.openai().responses.create(model="policy", input=items, tools=[tool], store=False)
            items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return RewardResult(float(response.output_text == "It is 4."))
            for call in calls:
                result = sum(json.loads(call.arguments).values())
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": str(result)})


class Messages(Agent):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        tool = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
        messages: list[Any] = [QUESTION]
        while True:
            request = {"model": "policy", "messages": messages, "tools": [tool]}
            counted = await context.anthropic().messages.count_tokens(**request)
            async with context.anthropic().messages.stream(max_tokens=200, **request) as stream:
                message = await stream.get_final_message()
            assert message.usage.input_tokens == counted.input_tokens
            messages.append({"role": "assistant", "content": message.content})
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                return RewardResult(float(message.content[-1].text == "It is 4."))
            results = [(call.id, str(sum(call.input.values()))) for call in calls]
            content = [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in results]
            messages.append({"role": "user", "content": content})


async def stops_over_chat(context: Any, history: list[Any]) -> tuple[str, Any]:
    response = await context.openai().chat.completions.create(model="policy", messages=history, stop="\nObservation:")
    return response.choices[0].message.content, response.choices[0].finish_reason


async def stops_over_messages(context: Any, history: list[Any]) -> tuple[str, Any]:
    message = await context.anthropic().messages.create(
        model="policy", max_tokens=99, messages=history, stop_sequences=["no", "\nObservation:"]
    )
    return message.content[0].text, (message.stop_reason, message.stop_sequence)


async def stops_in_generate(context: Any, history: list[Any]) -> tuple[str, Any]:
    answer = await context.generate(history, sampling={"stop": ["\nObservation:"]})
    return answer.text, (answer.finish_reason, answer.stop_text)


@pytest.mark.parametrize(("ask", "ends"), [
    (stops_over_chat, ["stop", "stop"]), (stops_in_generate, [("stop", "\nObservation:"), ("stop", None)]),
    (stops_over_messages, [("stop_sequence", "\nObservation:"), ("end_turn", None)]),
])  # fmt: skip
async def test_a_stop_text_is_trained_but_not_part_of_the_answer(bench: Any, ask: Any, ends: list[Any]) -> None:
    class Stopping(Agent):
        async def rollout(self, sample: Sample, context: Any) -> RewardResult:
            first, reason = await ask(context, [QUESTION])
            following = [{"role": "assistant", "content": first}, {"role": "user", "content": "Observation: 4"}]
            second, last_reason = await ask(context, [QUESTION, *following])
            assert ([first, second], [reason, last_reason]) == (["Action: add", "It is 4."], ends)
            return RewardResult(1.0)

    made = await bench(Stopping, ["Action: add\nObservation:", "It is 4."])
    sample = await made.run()
    assert sample.failure_message is None
    assert [(turn.text, turn.parent) for turn in sample.turns] == [("Action: add\nObservation:", None), ("It is 4.", 0)]
    sampled_once(sample, made.policy)


class Framework(Agent):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        import smolagents

        @smolagents.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers.

            Args:
                a: the first
                b: the second
            """
            return a + b

        model = smolagents.OpenAIModel("policy", api_base=context.base_url, api_key=context.api_key)
        agent = smolagents.ToolCallingAgent([add], model, verbosity_level=0)
        said = await asyncio.to_thread(agent.run, str(sample.prompt))
        return RewardResult(float(said == "It is 4."))


FINAL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "It is 4."}}</tool_call>'


@pytest.mark.parametrize(
    ("cls", "last", "joins"),
    [
        *((cls, "It is 4.", [(None, None), (0, None), (1, None)]) for cls in (Chat, Responses, Messages)),
        # It sends its calls and their results back as texts of its own, so each call is a sequence.
        (Framework, FINAL, [(None, None), (None, "edited_history"), (None, "edited_history")]),
    ],
)
async def test_an_agent_over_an_sdk_trains_what_was_sampled(bench: Any, cls: type, last: str, joins: Any) -> None:
    made = await bench(cls, [CALL, f"Again. {CALL}", last])
    sample = await made.run(max_context=16384)
    assert sample.failure_message is None
    assert sample.reward.total_reward == 1.0
    assert [(turn.parent, turn.divergence) for turn in sample.turns] == joins
    sampled_once(sample, made.policy)


class Patient(Agent):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        limits = {limit for sdk in (context.openai(), context.anthropic()) for limit in sdk.timeout.as_dict().values()}
        await context.generate([QUESTION])
        return RewardResult(float(limits == {None}))


async def test_only_the_rollouts_time_limit_ends_a_call(bench: Any) -> None:
    # The SDKs' own 5 seconds for a connection ended calls while the event loop was blocked by other work.
    sample = await (await bench(Patient, ["It is 4."])).run()
    assert (sample.failure_message, sample.reward.total_reward) == (None, 1.0)


class EitherSDK(Chat):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        if self.name == "messages":
            await context.anthropic().messages.create(model="policy", messages=[QUESTION], max_tokens=9)
        return await super().rollout(sample, context)


async def test_an_agent_of_two_sdks_needs_only_the_one_that_it_uses(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "anthropic"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "anthropic", None)
    sample = await (await bench(EitherSDK, ["It is 4."])).run()
    assert (sample.failure_message, sample.reward and sample.reward.total_reward) == (None, 1.0)


SHELL_AGENT = r"""
import json, os, subprocess, sys, urllib.request

SHELL = {"type": "function", "function": {"name": "shell", "description": "Runs a command.", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages, "tools": [SHELL]}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        print(message["content"])
        break
    for call in message["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
"""


def shell(command: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'shell', 'arguments': {'command': command}})}</tool_call>"


class Process(Agent):
    async def rollout(self, sample: Sample, context: RolloutContext) -> RewardResult:
        done = await context.run([sys.executable, "-c", SHELL_AGENT, "What is 2 + 2?"])
        return RewardResult(float(done.stdout.strip() == "It is 4."), sample_tags={"stderr": done.stderr})


async def test_a_program_calls_the_policy(bench: Any) -> None:
    made = await bench(Process, [shell("echo $((2 + 2))"), "It is 4."])
    sample = await made.run()
    assert (sample.reward.total_reward, sample.reward.sample_tags["stderr"]) == (1.0, "")
    assert sample.turns[1].replies == [("tool", "4\n")]
    sampled_once(sample, made.policy)


@pytest.mark.parametrize(
    ("cls", "last"), [(Chat, "It is 4."), (Messages, "It is 4."), (Framework, FINAL), (Process, "It is 4.")]
)
async def test_an_agent_behind_a_proxy_reaches_the_endpoint(
    bench: Any, cls: type, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"http_proxy": "http://127.0.0.1:9", "no_proxy": "a.com", "NO_PROXY": "b.com"}.items():
        monkeypatch.setenv(name, value)
    sample = await (await bench(cls, [last])).run(max_context=16384)
    assert (sample.failure_message, sample.reward.total_reward) == (None, 1.0)
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "a.com,b.com,127.0.0.1"


class Terminal(TerminalTasksEnvironment):
    """The shipped tasks, worked on by a program inside of the sandbox."""

    async def rollout(self, sample: Sample, context: RolloutContext) -> RewardResult:
        state, sandbox = self.create_initial_state(sample), await context.sandbox()
        state.custom[SANDBOX_KEY] = sandbox.handle
        await self.set_up_sandbox(sandbox.handle, state)
        await sandbox.write("/tmp/agent.py", SHELL_AGENT)
        cwd = self.working_dir_of(state)
        done = await sandbox.run("python3 /tmp/agent.py 'Do the task.'", env=context.env(), cwd=cwd)
        assert done.exit_code == 0, done.stderr
        return await self.compute_reward(state)


@pytest.mark.sandbox
async def test_a_program_in_a_sandbox_without_network_solves_a_task(bench: Any) -> None:
    (solution,) = own_tasks()[0].solution.values()
    made = await bench(Terminal, [shell(solution.decode()), "Done."], pool_size=1)
    sample = await made.run()
    assert sample.failure_message is None
    assert sample.reward.total_reward == 1.0
    sampled_once(sample, made.policy)
    assert not made.environment.sandboxes.in_use_sandboxes
