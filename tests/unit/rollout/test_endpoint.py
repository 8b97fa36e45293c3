"""The endpoint of a rollout worker answers the SDKs of OpenAI and Anthropic, and raw requests."""

import json
import os
from dataclasses import replace
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tests.unit.rollout.endpoint_policy import ANSWER, PARAMETERS, USER, Policy, ask_chat, ask_messages, ask_responses

from telescope.environments.context import Answer
from telescope.environments.tool_calls import ToolCall
from telescope.rollout.endpoint import Endpoint
from telescope.rollout.messages import message_of


async def chat_turns(policy: Policy, stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "weather", "description": "Now", "parameters": PARAMETERS}}
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, USER]
    options = {"tools": [tool], "max_completion_tokens": 50, "stop": "END"}
    message = (await ask_chat(policy, stream, messages=messages, **options))["choices"][0]["message"]
    # As agents return it: parts, arguments written in another way, fields of their own.
    message |= {"content": [{"type": "text", "text": message["content"]}], "annotations": None}
    call, broken = message["tool_calls"]
    call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    results = [{"role": "tool", "tool_call_id": each["id"], "content": "21"} for each in (call, broken)]
    messages += [message, *results, {"role": "user", "content": [{"type": "text", "text": "Sure?"}]}]
    await ask_chat(policy, stream, messages=messages, **options)


def response_tool() -> dict[str, Any]:
    return {"type": "function", "name": "weather", "description": "Now", "parameters": PARAMETERS, "strict": True}


def outputs(response: dict[str, Any]) -> list[Any]:
    calls = [item["call_id"] for item in response["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": each, "output": "21"} for each in calls]
    return [*results, {"role": "user", "content": "Sure?"}]


async def responses_turns(policy: Policy, stream: bool) -> None:
    options = {"tools": [response_tool()], "max_output_tokens": 50, "instructions": "Be brief."}
    first = await ask_responses(policy, stream, **options)
    items = [{"role": "user", "content": [{"type": "input_text", "text": USER["content"]}]}, *first["output"]]
    await ask_responses(policy, stream, input=[*items, *outputs(first)], **options)


async def responses_by_id(policy: Policy, stream: bool) -> None:
    options = {"tools": [response_tool()], "max_output_tokens": 50, "instructions": "Be brief."}
    first = await ask_responses(policy, stream, **options)
    await ask_responses(policy, stream, input=outputs(first), previous_response_id=first["id"], **options)


async def responses_by_reference(policy: Policy, stream: bool) -> None:
    """As the AI SDK of Vercel does: text and reasoning by their ids, calls in full."""
    options = {"tools": [response_tool()], "max_output_tokens": 50, "instructions": "Be brief."}
    first = await ask_responses(policy, stream, **options)
    items = [
        item if item["type"] == "function_call" else {"type": "item_reference", "id": item["id"]}
        for item in first["output"]
    ]
    items = [{"role": "user", "content": USER["content"]}, *items, *outputs(first)]
    await ask_responses(policy, stream, input=items, **options)


async def messages_turns(policy: Policy, stream: bool) -> None:
    tool = {"name": "weather", "description": "Now", "input_schema": PARAMETERS}
    options = {"tools": [tool], "system": [{"type": "text", "text": "Be brief."}], "stop_sequences": ["END"]}
    options |= {"tool_choice": {"type": "auto"}}
    content = (await ask_messages(policy, stream, **options))["content"]
    calls = [block["id"] for block in content if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": each, "content": [{"type": "text", "text": "21"}]} for each in calls
    ]
    messages = [USER, {"role": "assistant", "content": content}]
    messages += [{"role": "user", "content": [*results, {"type": "text", "text": "Sure?"}]}]
    await ask_messages(policy, stream, messages=messages, **options)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "turns", [chat_turns, responses_turns, responses_by_id, responses_by_reference, messages_turns]
)
async def test_a_history_is_the_same_call_in_every_dialect(policy, turns, stream):
    await turns(policy, stream)
    first, second = policy.calls
    ids = ["call_a1_0", "call_a1_1"]
    functions = [{"name": "weather", "arguments": {"city": "Zürich"}}, {"name": "clock", "arguments": "clock("}]
    assert second.messages == [
        {"role": "system", "content": "Be brief."}, USER,
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "Which city?",
            "tool_calls": [
                {"id": id, "type": "function", "function": function}
                for id, function in zip(ids, functions, strict=True)
            ],
        },
        *({"role": "tool", "tool_call_id": id, "content": "21"} for id in ids), {"role": "user", "content": "Sure?"},
    ]  # fmt: skip
    assert first.messages == second.messages[:2]
    assert message_of(ANSWER.message) == second.messages[2]
    function = {"name": "weather", "description": "Now", "parameters": PARAMETERS}
    assert first.tools == [{"type": "function", "function": function}]
    stop = {"stop": ["END"]} if turns in (chat_turns, messages_turns) else {}
    assert first.sampling == {"max_tokens": 50, **stop}


@pytest.mark.parametrize("ask", [ask_chat, ask_responses, ask_messages])
@pytest.mark.parametrize("answer", [ANSWER, Answer("", id="a2"), Answer("Cut", "", (), "length", [1], [0.0], id="a3")])
async def test_a_stream_ends_in_what_the_whole_response_says(policy, ask, answer):
    policy.answer = answer
    options = {"stream_options": {"include_usage": True}} if ask is ask_chat else {}

    def plain(value: Any) -> Any:  # without what the helpers of the SDKs add, and the time
        if isinstance(value, dict):
            ignored = ("created", "created_at", "object", "parsed", "parsed_arguments", "parsed_output", "index")
            return {key: plain(each) for key, each in value.items() if each is not None and key not in ignored}
        return [plain(each) for each in value] if isinstance(value, list) else value

    async def asked(stream: bool) -> Any:
        try:
            return plain(await ask(policy, stream, **(options if stream else {})))
        except openai.LengthFinishReasonError as error:  # the helper raises it, with the completion
            return plain(error.completion.to_dict())

    assert await asked(True) == await asked(False)


@pytest.mark.parametrize(("route", "whole", "event"), [
    ("chat/completions", ChatCompletion, ChatCompletionChunk), ("responses", Response, ResponseStreamEvent),
    ("messages", "Message", "RawMessageStreamEvent"),
])  # fmt: skip
async def test_bodies_are_valid_by_the_types_of_the_sdks(policy, route, whole, event):
    if route == "messages":
        from anthropic import types

        whole, event = getattr(types, whole), getattr(types, event)
    tool = {**response_tool(), "function": {"name": "weather"}, "type": "custom" if route == "messages" else "function"}
    body = {"messages": [USER], "input": "Hi", "tools": [tool], "logprobs": True}
    body |= {"include": ["message.output_text.logprobs"]}
    response = (await policy.post(route, body))[1]
    TypeAdapter(whole).validate_python(response)
    text = (await policy.post(route, {**body, "stream": True}))[1]
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    for data in events:
        if data != "[DONE]":
            TypeAdapter(event).validate_json(data)
    assert len(events) > 6


async def test_logprobs_are_returned_to_who_asks(policy):
    for stream in (False, True):
        choice = (await ask_chat(policy, stream, logprobs=True))["choices"][0]
        tokens = [(each["token"], each["logprob"]) for each in choice["logprobs"]["content"]]
        assert tokens == [("token_id:5", -0.5), ("token_id:6", -0.25)]
    assert "logprobs" not in {k: v for k, v in (await ask_chat(policy, False))["choices"][0].items() if v}


async def test_conversations_are_named_by_path_or_header(policy):
    headers = {"X-Session-Id": "worker", "x-parent-session-id": "main"}
    await policy.openai("a b/c").chat.completions.create(model="policy", messages=[USER])
    await policy.anthropic(default_headers=headers).messages.create(model="policy", max_tokens=9, messages=[USER])
    await policy.anthropic("named", default_headers=headers).messages.create(
        model="policy", max_tokens=9, messages=[USER]
    )
    assert [call.chat for call in policy.calls] == ["a b/c", "main/worker", "main/named"]


async def test_models_are_listed_and_tokens_counted_without_a_call(policy):
    listed = [model.id async for model in policy.openai().models.list()]
    assert listed == [model.id async for model in policy.anthropic().models.list()] == ["policy", "org/model"]
    for name in listed:
        assert (await policy.openai().models.retrieve(name)).id == name
        assert (await policy.anthropic().models.retrieve(name)).id == name
    with pytest.raises(openai.NotFoundError, match=r"The model `gpt-6` does not exist .* There is: policy, org/model"):
        await policy.openai().models.retrieve("gpt-6")
    counted = await policy.anthropic().messages.count_tokens(model="policy", messages=[USER], system="Be brief.")
    assert counted.input_tokens == 20
    assert not policy.calls


async def test_an_agent_in_a_sandbox_uses_the_unix_socket(tmp_path):
    server = Endpoint(["policy"])
    await server.start(tmp_path / "socket")
    policy = Policy(server)
    assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o600
    connector = aiohttp.UnixConnector(str(tmp_path / "socket"))
    async with aiohttp.ClientSession(connector=connector) as session:
        url = "http://127.0.0.1:8000/chat/worker/v1"  # of a relay inside of the sandbox
        headers = {"x-api-key": policy.key}
        async with session.post(f"{url}/chat/completions", json={"messages": [USER]}, headers=headers) as response:
            assert response.status == 200
    await server.stop()


async def test_agents_reach_the_endpoint_behind_a_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "intern, 10.0.0.1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    server = Endpoint(["policy"])
    await server.start()
    assert [model.id async for model in Policy(server).openai().models.list()] == ["policy"]
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "intern,10.0.0.1,127.0.0.1"
    await server.stop()


IMAGE = [{"type": "image_url", "image_url": {"url": "data:,"}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a"}}
REFUSED = {
    "n": ("chat/completions", {"n": 4}, "'n' does not support 4"),
    "logit_bias": ("chat/completions", {"logit_bias": {"5": 1}}, "'logit_bias'"),
    "form": ("chat/completions", {"guided_json": {"type": "object"}}, "'guided_json'"),
    "n elsewhere": ("responses", {"n": 2}, "'n' does not support 2"),
    "bias of messages": ("messages", {"logit_bias": {"5": 1}}, "'logit_bias'"),
    "grammar of responses": ("responses", {"structured_outputs": {"regex": "a"}}, "'structured_outputs'"),
    "words": ("chat/completions", {"bad_words": ["no"]}, "'bad_words'"),
    "minimum": ("chat/completions", {"min_tokens": 5}, "'min_tokens' does not support 5"),
    "limit of another API": ("responses", {"max_tokens": 5}, "'max_tokens' is not supported with this API"),
    "stop of another API": ("messages", {"stop": ["a"]}, "It has max_tokens, stop_sequences"),
    "prefix": ("chat/completions", {"continue_final_message": True}, "'continue_final_message'"),
    "image": ("chat/completions", {"messages": [{"role": "user", "content": IMAGE}]}, "reads text only"),
    "role": ("chat/completions", {"messages": [{"role": "robot", "content": ""}]}, "'robot'"),
    "no messages": ("chat/completions", {"messages": None}, "Invalid type"),
    "no role": ("chat/completions", {"messages": [{"content": ""}]}, "has the role None"),
    "stream": ("chat/completions", {"stream": True, "stream_options": 5}, "'stream_options'"),
    "nothing to count": ("messages/count_tokens", {"messages": []}, "malformed: IndexError: the template"),
    "limit": ("chat/completions", {"max_tokens": 0}, "expected a positive integer"),
    "stop": ("chat/completions", {"stop": [""]}, "'stop'"),
    "background": ("responses", {"background": True}, "'background'"),
    "search": ("responses", {"tools": [{"type": "web_search"}]}, "'type' does not support"),
    "item": ("responses", {"input": [{"type": "item_reference", "id": "1"}]}, "'1' not found"),
    "file": ("responses", {"input": [{"type": "input_file"}]}, "'input_file'"),
    "input image": ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "text only"),
    "previous": ("responses", {"previous_response_id": "resp_9"}, "'resp_9' not found"),
    "server tool": ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'type' does not support"),
    "document": ("messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "text only"),
    "prefill": ("messages", {"messages": [USER, {"role": "assistant", "content": "It is"}]}, "prefill"),
    "thread": ("messages", {"thread": {"type": "create"}}, "Threads are not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_would_change_the_answer_is_refused(policy, name):
    route, body, text = REFUSED[name]
    status, error, response = await policy.post(route, {"messages": [USER], "input": "Hi", **body})
    assert status == 400
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert text in error["error"]["message"]
    assert response.headers["x-should-retry"] == "false"
    assert not policy.calls


async def test_harmless_fields_are_accepted(policy):
    ignored = {"seed": 3, "temperature": 0.2, "min_p": 0.1, "chat_template_kwargs": {"enable_thinking": True}}
    extra = {"n": 1, "user": "me", "logit_bias": {}, "metadata": {}, "store": True}
    extra |= {"stop_sequences": [], "guided_json": "", "bad_words": [], "max_output_tokens": None, "functions": []}
    extra |= {"parallel_tool_calls": True, "response_format": {"type": "text"}, **ignored}
    tool = {"type": "function", "function": {"name": "weather"}}
    for choice in ("auto", "none", "required"):
        body = {"messages": [USER], "tools": [tool], "tool_choice": choice, **extra}
        assert (await policy.post(body=body))[0] == 200
    assert [call.tools for call in policy.calls] == [[tool], [], [tool]]
    assert [call.sampling for call in policy.calls] == [ignored, ignored, {**ignored, "tool_choice": "required"}]


EFFORT = {"reasoning_effort": "high"}
SERIAL = {"parallel_tool_calls": False}


@pytest.mark.parametrize(("route", "fields", "sampling"), [
    ("chat/completions", EFFORT, EFFORT), ("responses", {"reasoning": {"effort": "high"}}, EFFORT),
    ("messages", {"output_config": {"effort": "high"}}, EFFORT),
    ("chat/completions", SERIAL, SERIAL), ("responses", SERIAL, SERIAL),
    ("chat/completions", {"response_format": SCHEMA}, {"response_format": SCHEMA}),
    ("responses", {"text": {"format": SCHEMA}}, {"response_format": SCHEMA}),
    ("messages", {"output_config": {"format": SCHEMA}}, {"response_format": SCHEMA}),
])  # fmt: skip
async def test_what_is_not_forced_is_passed_on_to_be_counted(policy, route, fields, sampling):
    assert (await policy.post(route, {"messages": [USER], "input": "Hi", **fields}))[0] == 200
    assert policy.calls[0].sampling == sampling


async def test_the_tool_runner_of_anthropic_sends_its_whole_history(policy):
    from anthropic import beta_async_tool

    @beta_async_tool
    async def weather(city: str) -> str:
        """Returns degrees."""
        policy.answer = Answer("It is 21.", id="a2")
        return "21"

    policy.answer = replace(ANSWER, tool_calls=ANSWER.tool_calls[:1])
    runner = policy.anthropic().beta.messages.tool_runner(
        model="policy", max_tokens=9, messages=[USER], tools=[weather]
    )
    message = await runner.until_done()
    assert message.content[0].text == "It is 21."
    assert [each["role"] for each in policy.calls[1].messages] == ["user", "assistant", "tool"]


async def test_half_a_surrogate_pair_comes_back_as_it_was_sampled(policy):
    policy.answer = Answer("", "", [ToolCall("say", {"text": "\ud800"})], "tool_calls", id="a1")
    message = (await policy.post())[1]["choices"][0]["message"]
    await policy.post(body={"messages": [USER, message]})
    assert policy.calls[1].messages[1]["tool_calls"][0]["function"]["arguments"] == {"text": "\ud800"}
