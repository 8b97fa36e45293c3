"""Anthropic's `POST /v1/messages` and its token counting."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from telescope.environments.base import ChatMessage
from telescope.environments.context import Answer, Call
from telescope.rollout.dialects import (
    Body,
    Refusal,
    accept_only,
    arguments_of,
    assistant,
    sampling_of,
    text_of,
    tool_call,
    tool_schema,
)

STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
UNREADABLE = "unreadable_arguments"
"""The key under which `input`, an object in this dialect, holds arguments that are none."""


def read(body: Body, kept: dict[str, list[ChatMessage]]) -> Call:
    """Returns the call that a request asks for."""
    accept_only(body, container=(), mcp_servers=([],))
    accept_only(body.get("output_config") or {}, format=())
    choice = (body.get("tool_choice") or {}).get("type")
    accept_only({"tool_choice": choice}, tool_choice=("auto", "none"))
    tools = [] if choice == "none" else body.get("tools") or []
    for tool in tools:
        accept_only(tool, type=("custom",))
    messages: list[ChatMessage] = []
    if system := text_of(body.get("system")):
        messages.append({"role": "system", "content": system})
    for message in body["messages"]:
        messages += _messages_of(message["role"], message["content"])
    if messages and messages[-1]["role"] == "assistant":
        raise Refusal("This model does not support assistant message prefill. End with a user message.")
    schemas = [tool_schema(tool, "input_schema") for tool in tools]
    return Call(messages=messages, tools=schemas, sampling=sampling_of(body, ("max_tokens",), "stop_sequences"))


def _messages_of(role: str, content: Any) -> list[ChatMessage]:
    """Returns one message as several: each tool result is a message of its own, before the user's text."""
    if role not in ("user", "assistant", "system"):
        raise Refusal(f"messages: unexpected role '{role}'. Allowed are 'user' and 'assistant'.")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    reasoning = "\n".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    calls = [block for block in blocks if block["type"] == "tool_use"]
    results = [block for block in blocks if block["type"] == "tool_result"]
    others = ("thinking", "redacted_thinking", "tool_use", "tool_result")
    texts = [block for block in blocks if block["type"] not in others]
    if role == "assistant":
        used = (tool_call(block["id"], block["name"], _arguments_of(block["input"])) for block in calls)
        return [assistant(text_of(texts), reasoning, used)]
    messages: list[ChatMessage] = [
        {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text_of(block.get("content"))}
        for block in results
    ]
    return [*messages, {"role": role, "content": text_of(texts)}] if texts or not results else messages


def _arguments_of(given: Body) -> Any:
    return given[UNREADABLE] if given.keys() == {UNREADABLE} else given


def write(answer: Answer, call: Call, body: Body, kept: dict[str, list[ChatMessage]]) -> Body:
    """Returns the body of a response."""
    content: list[Body] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": answer.id})
    if answer.text:
        content.append({"type": "text", "text": answer.text})
    for tool in answer.openai_tool_calls:
        given = arguments_of(tool["function"]["arguments"])
        given = given if isinstance(given, dict) else {UNREADABLE: given}
        content.append({"type": "tool_use", "id": tool["id"], "name": tool["function"]["name"], "input": given})
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": content,
        "stop_reason": STOP_REASONS[answer.finish_reason],
        "stop_sequence": None,
        "usage": {"input_tokens": answer.num_prompt_tokens, "output_tokens": len(answer.token_ids)},
    }


def stream(response: Body, body: Body) -> Iterator[tuple[str, Any]]:
    """Yields a response as events: their names and their data."""
    for event in _events(response):
        yield event["type"], event


def _events(response: Body) -> Iterator[Body]:
    usage = {**response["usage"], "output_tokens": 0}
    yield {"type": "message_start", "message": {**response, "content": [], "stop_reason": None, "usage": usage}}
    for index, block in enumerate(response["content"]):
        place = {"index": index}
        if block["type"] == "tool_use":
            empty: Body = {"input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        elif block["type"] == "thinking":
            empty = {"thinking": "", "signature": ""}
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        else:
            empty = {"text": ""}
            deltas = [{"type": "text_delta", "text": block["text"]}]
        yield {"type": "content_block_start", **place, "content_block": {**block, **empty}}
        for delta in deltas:
            yield {"type": "content_block_delta", **place, "delta": delta}
        yield {"type": "content_block_stop", **place}
    ended = {name: response[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ended, "usage": response["usage"]}
    yield {"type": "message_stop"}
