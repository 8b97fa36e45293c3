"""OpenAI's `POST /v1/chat/completions`."""

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


def read(body: Body, kept: dict[str, list[ChatMessage]]) -> Call:
    """Returns the call that a request asks for."""
    accept_only(
        body, n=(1,), logit_bias=({},), response_format=({"type": "text"},), tool_choice=("auto", "none"),
        functions=([],), function_call=(), audio=(), modalities=(["text"],), web_search_options=(), top_logprobs=(0,),
    )  # fmt: skip
    tools = [] if body.get("tool_choice") == "none" else body.get("tools") or []
    for tool in tools:
        accept_only(tool, type=("function",))
    return Call(
        messages=[message_of(message) for message in body["messages"]],
        tools=[tool_schema(tool["function"], "parameters") for tool in tools],
        sampling=sampling_of(body, ("max_completion_tokens", "max_tokens")),
    )


def message_of(message: Body) -> ChatMessage:
    """Returns a message of a request, or of `Answer.message`, in canonical form."""
    role, text = message["role"], text_of(message.get("content"))
    if role == "assistant":
        calls = message.get("tool_calls") or ()
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        return assistant(text, reasoning, (tool_call(call["id"], **_function_of(call)) for call in calls))
    if role == "tool":
        return {"role": "tool", "tool_call_id": message["tool_call_id"], "content": text}
    if role not in ("system", "developer", "user"):
        raise Refusal(f"Invalid value: '{role}'. Supported roles are 'system', 'user', 'assistant' and 'tool'.")
    return {"role": "user" if role == "user" else "system", "content": text}


def _function_of(call: Body) -> Body:
    return {name: call["function"][name] for name in ("name", "arguments")}


def write(answer: Answer, call: Call, body: Body, kept: dict[str, list[ChatMessage]]) -> Body:
    """Returns the body of a response."""
    message = {"content": None, "refusal": None, **answer.message}
    choice: Body = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
    if body.get("logprobs"):
        choice["logprobs"] = {"content": token_logprobs(answer), "refusal": None}
    sampled = len(answer.token_ids)
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body["model"],
        "choices": [choice],
        "usage": {
            "prompt_tokens": answer.num_prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": answer.num_prompt_tokens + sampled,
        },
    }


def stream(response: Body, body: Body) -> Iterator[tuple[str, Any]]:
    """Yields a response as events: their names, which this dialect leaves empty, and their data."""
    choice = response["choices"][0]
    message = choice["message"]
    shared = {**response, "object": "chat.completion.chunk"}
    usage = shared.pop("usage")
    deltas: list[Body] = [{"role": "assistant", "content": ""}]
    deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
    for index, call in enumerate(message.get("tool_calls", ())):
        deltas.append({"tool_calls": [{"index": index, **call}]})
    for delta in deltas:
        yield "", {**shared, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield "", {**shared, "choices": [{**choice, "delta": {}, "message": None}]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield "", {**shared, "choices": [], "usage": usage}
    yield "", "[DONE]"
