"""OpenAI's `POST /v1/responses`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from telescope.environments.base import ChatMessage
from telescope.environments.context import Answer, Call
from telescope.rollout.dialects import (
    Body,
    Refusal,
    accept_only,
    assistant,
    sampling_of,
    text_of,
    token_logprobs,
    tool_call,
    tool_schema,
)
from telescope.rollout.dialects.chat import message_of


def read(body: Body, kept: dict[str, list[ChatMessage]]) -> Call:
    """Returns the call that a request asks for. `kept` has the conversations of the rollout's responses."""
    accept_only(
        body, background=(False,), conversation=(), prompt=(), top_logprobs=(0,), tool_choice=("auto", "none")
    )  # fmt: skip
    accept_only(body.get("text") or {}, format=({"type": "text"},))
    messages: list[ChatMessage] = []
    if previous := body.get("previous_response_id"):
        if previous not in kept:
            message = f"Previous response with id '{previous}' not found."
            raise Refusal(message, code="previous_response_not_found", param="previous_response_id")
        messages += kept[previous]
    items = body["input"]
    messages += _messages_of([{"role": "user", "content": items}] if isinstance(items, str) else items)
    if instructions := body.get("instructions"):
        messages.insert(0, {"role": "system", "content": text_of(instructions)})
    tools = [] if body.get("tool_choice") == "none" else body.get("tools") or []
    for tool in tools:
        accept_only(tool, type=("function",))
    schemas = [tool_schema(tool, "parameters") for tool in tools]
    return Call(messages=messages, tools=schemas, sampling=sampling_of(body, ("max_output_tokens",)))


def _messages_of(items: list[Body]) -> list[ChatMessage]:
    """Returns input items as messages. Reasoning, text and calls that follow each other are one message."""
    messages: list[ChatMessage] = []
    for item in items:
        kind = item.get("type", "message")
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text_of(item["output"])})
        elif kind == "message" and item["role"] != "assistant":
            messages.append(message_of(item))
        elif kind == "message":
            text = text_of(item["content"])
            if last and not last["content"] and "tool_calls" not in last:  # so far it is reasoning alone
                last["content"] = text
            else:
                messages.append(assistant(text))
        elif kind == "reasoning":
            texts = item.get("content") or item.get("summary") or ()
            messages.append(assistant("", "\n".join(part["text"] for part in texts)))
        elif kind == "function_call":
            if last is None:
                messages.append(last := assistant(""))
            call = tool_call(item["call_id"], item["name"], item["arguments"])
            last.setdefault("tool_calls", []).append(call)
        else:
            raise Refusal(f"An input item of type '{kind}' is not supported with this model.", param="input")
    return messages


def write(answer: Answer, call: Call, body: Body, kept: dict[str, list[ChatMessage]]) -> Body:
    """Returns the body of a response, and keeps its conversation for `previous_response_id`."""
    response_id = f"resp_{answer.id}"
    if body.get("store") is not False:
        history = [*call.messages[bool(body.get("instructions")) :], message_of(answer.message)]
        latest = next(reversed(kept.values()), ())
        for index, (before, now) in enumerate(zip(latest, history, strict=False)):
            if before != now:
                break
            history[index] = before  # an agent that sends all of its history each time costs its memory once
        kept[response_id] = history
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    output: list[Body] = []
    if answer.reasoning:
        part = {"type": "reasoning_text", "text": answer.reasoning}
        output.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": [part], "status": status})
    if answer.text or not answer.tool_calls:
        wanted = "message.output_text.logprobs" in (body.get("include") or ())
        part = {"type": "output_text", "text": answer.text, "annotations": []}
        part["logprobs"] = token_logprobs(answer) if wanted else []
        message = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": [part]}
        output.append({**message, "status": status})
    for index, tool in enumerate(answer.openai_tool_calls):
        item = {"type": "function_call", "id": f"fc_{answer.id}_{index}", "call_id": tool["id"], **tool["function"]}
        output.append({**item, "status": status})
    sampled = len(answer.token_ids)
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata"),
        "model": body["model"],
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [{"strict": None, "parameters": None, **tool} for tool in body.get("tools") or ()],
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt_tokens + sampled,
        },
    }


def stream(response: Body, body: Body) -> Iterator[tuple[str, Any]]:
    """Yields a response as events: their names and their data."""
    for number, event in enumerate(_events(response)):
        yield event["type"], {**event, "sequence_number": number}


def _events(response: Body) -> Iterator[Body]:
    opened = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": opened}
    yield {"type": "response.in_progress", "response": opened}
    for index, item in enumerate(response["output"]):
        place = {"item_id": item["id"], "output_index": index}
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        added = {**item, "status": "in_progress", **empty}
        yield {"type": "response.output_item.added", "output_index": index, "item": added}
        if item["type"] == "function_call":
            name, text = "response.function_call_arguments", item["arguments"]
            yield {"type": f"{name}.delta", **place, "delta": text}
            yield {"type": f"{name}.done", **place, "arguments": text, "name": item["name"]}
        for part in item.get("content", ()):
            name, place["content_index"] = f"response.{part['type']}", 0
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            cleared = {name: [] for name in logprobs}
            yield {"type": "response.content_part.added", **place, "part": {**part, **cleared, "text": ""}}
            yield {"type": f"{name}.delta", **place, **logprobs, "delta": part["text"]}
            yield {"type": f"{name}.done", **place, **logprobs, "text": part["text"]}
            yield {"type": "response.content_part.done", **place, "part": part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}
