"""The APIs that agents use at the endpoint: OpenAI's chat/completions and responses, Anthropic's messages.

A dialect reads a request body as a `Call`, or raises `Refusal`, and writes an `Answer` as a response body, which it
splits into events for a stream. Bodies are plain dicts, because importing the SDKs' models takes seconds and building
one takes longer than the rest of a call. Messages of a call are in the canonical form of `messages`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from telescope.environments.context import Answer, Call
from telescope.environments.records import ChatMessage
from telescope.rollout.messages import UNREADABLE, message_of, parsed, text_of, tool_call
from telescope.utils.text import listed

Body = dict[str, Any]

PASSED_ON = ("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
             "repetition_penalty", "tool_choice", "parallel_tool_calls", "response_format",
             "chat_template_kwargs", "reasoning_effort")  # fmt: skip
"""Parameters that are accepted, ignored and counted: the run's are used, and no tool call or format can be forced."""
REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "use_beam_search": (False,), "logit_bias": (), "logits_processors": (),
    "bad_words": (), "allowed_token_ids": (), "stop_token_ids": (), "min_tokens": (0,), "ignore_eos": (False,),
    "length_penalty": (1,), "include_stop_str_in_output": (False,), "structured_outputs": (), "guided_json": (),
    "guided_regex": (), "guided_choice": (), "guided_grammar": (), "chat_template": (), "echo": (False,),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "truncate_prompt_tokens": (-1,),
}  # fmt: skip
"""Parameters of OpenAI and vLLM that would change the completion, with the values that do not, besides empty ones. An
SDK adds them to any API (`extra_body`)."""
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "stop_sequences")
"""Parameters that bound a completion. Each API has some of them, and would ignore the others."""
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_CHOICES = ("auto", "none", {"type": "auto"}, {"type": "none"}, {"type": "text"})


class Refusal(Exception):
    """A request that gets an error response."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def _accept_only(body: Mapping[str, Any], **accepted: tuple[Any, ...]) -> None:
    """Refuses a request with other values of these fields, which would change the completion. Accepts empty ones."""
    for name, values in accepted.items():
        if (value := body.get(name)) not in (*_EMPTY, *values):
            message = f"Unsupported value: '{name}' does not support {json.dumps(value)[:200]} with this model."
            message += f" Only {json.dumps(values[0])} is supported." if values else ""
            raise Refusal(message, code="unsupported_value", param=name)


def _tools_of(body: Body, kind: str = "function", parameters: str = "parameters", inside: str = "") -> list[Body]:
    """Returns a request's tools in the form of OpenAI's chat API."""
    tools = []
    for tool in body.get("tools") or ():
        _accept_only(tool, type=(kind,))
        tool = tool[inside] if inside else tool
        function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get(parameters)}
        given = {name: value for name, value in function.items() if value is not None}
        tools.append({"type": "function", "function": given})
    return [] if body.get("tool_choice") in ("none", {"type": "none"}) else tools


def sampling_of(body: Mapping[str, Any], *limits: str, stop: str = "stop") -> Body:
    """Returns `Call.sampling` from the fields of a request that limit tokens or name stop texts."""
    _accept_only(body, **REFUSED)
    own = (*limits, stop)
    if other := next((name for name in LIMITS if name not in own and body.get(name) not in _EMPTY), None):
        text = f"Unsupported parameter: '{other}' is not supported with this API. It has {listed(own)}."
        raise Refusal(text, param=other)
    given = {name: body[name] for name in PASSED_ON if body.get(name) is not None}
    # `parallel_tool_calls: true` is the default. Not in _CHOICES, because 1 == True.
    sampling = {name: value for name, value in given.items() if value is not True and value not in _CHOICES}
    for name in limits:
        if (limit := body.get(name)) is not None:
            if type(limit) is not int or limit < 1:
                raise Refusal(f"Invalid '{name}': expected a positive integer, but got {limit!r:.50}.", param=name)
            sampling.setdefault("max_tokens", limit)
    if stops := body.get(stop):
        sampling["stop"] = [stops] if isinstance(stops, str) else stops
        if not isinstance(sampling["stop"], list) or not all(text and isinstance(text, str) for text in stops):
            raise Refusal(f"Invalid '{stop}': expected texts that are not empty.", param=stop)
    return sampling


def _logprobs_of(answer: Answer) -> list[Body]:
    """Returns the logprobs of the sampled tokens, named by their ids."""
    pairs = zip(answer.token_ids, answer.logprobs, strict=False)
    return [{"token": f"token_id:{token}", "logprob": value, "bytes": [], "top_logprobs": []} for token, value in pairs]


def _usage_of(answer: Answer, prompt: str, sampled: str) -> Body:
    given, made = answer.num_prompt_tokens, len(answer.token_ids)
    return {prompt: given, sampled: made, "total_tokens": given + made}


class ChatCompletions:
    """Implements `POST /v1/chat/completions`."""

    end = b"data: [DONE]\n\n"
    """The end of a stream."""

    def read(self, body: Body) -> Call:
        _accept_only(
            body, functions=(), function_call=(), audio=(), modalities=(["text"],), web_search_options=(),
            top_logprobs=(0,),
        )  # fmt: skip
        if not isinstance(body.get("stream_options"), dict | None):
            raise Refusal("Invalid type for 'stream_options': expected an object.", param="stream_options")
        sampling = sampling_of(body, "max_completion_tokens", "max_tokens")
        tools = _tools_of(body, inside="function")
        return Call(messages=[message_of(message) for message in body["messages"]], tools=tools, sampling=sampling)

    def write(self, answer: Answer, call: Call, body: Body) -> Body:
        choice: Body = {"index": 0, "finish_reason": answer.finish_reason, "logprobs": None}
        choice["message"] = {"refusal": None, **answer.message}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": _logprobs_of(answer), "refusal": None}
        usage = _usage_of(answer, "prompt_tokens", "completion_tokens")
        shared = {"object": "chat.completion", "created": int(time.time()), "model": body["model"]}
        return {"id": f"chatcmpl-{answer.id}", **shared, "choices": [choice], "usage": usage}

    def events(self, response: Body, body: Body) -> Iterator[Body]:
        choice = response["choices"][0]
        message = choice.pop("message")
        shared = {**response, "object": "chat.completion.chunk"}
        usage = shared.pop("usage")
        deltas: list[Body] = [{"role": "assistant", "content": ""}]
        deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
        for index, call in enumerate(message.get("tool_calls", ())):
            deltas.append({"tool_calls": [{"index": index, **call}]})
        for delta in deltas:
            yield {**shared, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield {**shared, "choices": [{**choice, "delta": {}}]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield {**shared, "choices": [], "usage": usage}


class Responses:
    """Implements `POST /v1/responses` of one rollout. Keeps conversations and items, to which ids may refer."""

    end = b""

    def __init__(self) -> None:
        self._kept: dict[str, list[ChatMessage]] = {}
        self._items: dict[str, Body] = {}

    def read(self, body: Body) -> Call:
        _accept_only(body, background=(False,), conversation=(), prompt=(), top_logprobs=(0,))
        messages: list[ChatMessage] = []
        if instructions := body.get("instructions"):
            messages.append({"role": "system", "content": text_of(instructions)})
        if previous := body.get("previous_response_id"):
            if previous not in self._kept:
                message = f"Previous response with id '{previous}' not found."
                raise Refusal(message, code="previous_response_not_found", param="previous_response_id")
            messages += self._kept[previous]
        items = body["input"]
        messages += self._messages_of([{"role": "user", "content": items}] if isinstance(items, str) else items)
        effort = (body.get("reasoning") or {}).get("effort") or body.get("reasoning_effort")
        given = {**body, "response_format": (body.get("text") or {}).get("format"), "reasoning_effort": effort}
        return Call(messages=messages, tools=_tools_of(body), sampling=sampling_of(given, "max_output_tokens"))

    def _messages_of(self, items: list[Body]) -> list[ChatMessage]:
        """Returns input items as messages. Consecutive reasoning, text and calls become one message."""
        messages: list[ChatMessage] = []
        last: ChatMessage | None = None  # the model's message, to which the next item may belong
        for item in items:
            if item.get("type") == "item_reference":
                if item["id"] not in self._items:
                    raise Refusal(f"Item with id '{item['id']}' not found.", param="input")
                item = self._items[item["id"]]
            kind = item.get("type", "message")
            if kind == "function_call_output":
                message = message_of({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
            elif kind == "reasoning":
                texts = item.get("content") or item.get("summary") or ()
                message = message_of({"role": "assistant", "reasoning": "\n".join(part["text"] for part in texts)})
            elif kind == "message":
                message = message_of(item)
                if last and message["role"] == "assistant" and not (last["content"] or "tool_calls" in last):
                    last["content"] = message["content"]
                    continue
            elif kind == "function_call":
                call = tool_call(item["call_id"], item["name"], item["arguments"])
                if last:
                    last.setdefault("tool_calls", []).append(call)
                    continue
                message = message_of({"role": "assistant", "tool_calls": [call]})
            else:
                raise Refusal(f"An input item of type '{kind}' is not supported with this model.", param="input")
            messages.append(message)
            last = message if message["role"] == "assistant" else None
        return messages

    def write(self, answer: Answer, call: Call, body: Body) -> Body:
        """Returns the response body, and stores its conversation."""
        response_id = f"resp_{answer.id}"
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        output: list[Body] = []
        if answer.reasoning:
            part: Body = {"type": "reasoning_text", "text": answer.reasoning}
            output.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": [part]})
        if answer.text or not answer.tool_calls:
            part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
            if "message.output_text.logprobs" in (body.get("include") or ()):
                part["logprobs"] = _logprobs_of(answer)
            output.append({"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": [part]})
        for index, tool in enumerate(answer.openai_tool_calls):
            item = {"type": "function_call", "id": f"fc_{answer.id}_{index}", "call_id": tool["id"]}
            output.append({**item, **tool["function"]})
        if body.get("store") is not False:
            history = [*call.messages[bool(body.get("instructions")) :], message_of(answer.message)]
            for index, (before, now) in enumerate(zip(next(reversed(self._kept.values()), ()), history, strict=False)):
                if before != now:
                    break
                history[index] = before  # stores a history once, even if an agent sends all of it each time
            self._kept[response_id] = history
            self._items |= {item["id"]: item for item in output}
        usage: Body = _usage_of(answer, "input_tokens", "output_tokens")
        usage["input_tokens_details"] = {"cached_tokens": 0, "cache_write_tokens": 0}
        usage["output_tokens_details"] = {"reasoning_tokens": 0}
        return {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": body["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [{**item, "status": status} for item in output],
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": body.get("previous_response_id"),
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "usage": usage,
        }

    def events(self, response: Body, body: Body) -> Iterator[Body]:
        for number, event in enumerate(self._events(response)):
            yield {**event, "sequence_number": number}

    def _events(self, response: Body) -> Iterator[Body]:
        opened = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        yield {"type": "response.created", "response": opened}
        yield {"type": "response.in_progress", "response": opened}
        for index, item in enumerate(response["output"]):
            place = {"item_id": item["id"], "output_index": index}
            is_call = item["type"] == "function_call"
            added = {**item, "status": "in_progress", **({"arguments": ""} if is_call else {"content": []})}
            yield {"type": "response.output_item.added", "output_index": index, "item": added}
            if is_call:
                kind, text = "response.function_call_arguments", item["arguments"]
                yield {"type": f"{kind}.delta", **place, "delta": text}
                yield {"type": f"{kind}.done", **place, "arguments": text, "name": item["name"]}
            else:
                part = item["content"][0]
                place["content_index"] = 0
                logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
                yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
                yield {"type": f"response.{part['type']}.delta", **place, **logprobs, "delta": part["text"]}
                yield {"type": f"response.{part['type']}.done", **place, **logprobs, "text": part["text"]}
                yield {"type": "response.content_part.done", **place, "part": part}
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        yield {"type": f"response.{response['status']}", "response": response}


class Messages:
    """Implements `POST /v1/messages`, and its token count."""

    end = b""

    def read(self, body: Body) -> Call:
        if body.get("thread"):  # the SDK then sends the whole history
            raise Refusal("Threads are not supported.", code="thread_unsupported_request", param="thread")
        _accept_only(body, container=(), mcp_servers=(), compaction=())
        messages: list[ChatMessage] = []
        if system := text_of(body.get("system")):
            messages.append({"role": "system", "content": system})
        for message in body["messages"]:
            messages += self._messages_of(message["role"], message["content"])
        if messages and messages[-1]["role"] == "assistant":
            raise Refusal("This model does not support assistant message prefill. End with a user message.")
        config = body.get("output_config") or {}
        effort = config.get("effort") or body.get("reasoning_effort")
        given = {**body, "response_format": config.get("format"), "reasoning_effort": effort}
        sampling = sampling_of(given, "max_tokens", stop="stop_sequences")
        return Call(messages=messages, tools=_tools_of(body, "custom", "input_schema"), sampling=sampling)

    def _messages_of(self, role: str, content: Any) -> Iterator[ChatMessage]:
        """Splits a message: each tool result becomes a message of its own, before the user's text."""
        texts: list[Body] = []
        calls: list[Body] = []
        reasoning, has_results = [], False
        blocks: list[Body] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for block in blocks:
            if block["type"] == "tool_result":
                has_results = True
                result = {"role": "tool", "tool_call_id": block["tool_use_id"], "content": block.get("content")}
                yield message_of(result)
            elif block["type"] == "tool_use":
                calls.append(tool_call(block["id"], block["name"], block["input"]))
            elif block["type"] == "thinking":
                reasoning.append(block["thinking"])
            elif block["type"] != "redacted_thinking":
                texts.append(block)
        if role == "assistant" or texts or not has_results:
            message = {"role": role, "content": texts, "reasoning": "\n".join(reasoning), "tool_calls": calls}
            yield message_of(message)

    def write(self, answer: Answer, call: Call, body: Body) -> Body:
        content: list[Body] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": answer.id})
        if answer.text:
            content.append({"type": "text", "text": answer.text})
        for tool in answer.openai_tool_calls:
            given = parsed(tool["function"]["arguments"])
            given = given if isinstance(given, dict) else {UNREADABLE: given}
            content.append({"type": "tool_use", "id": tool["id"], "name": tool["function"]["name"], "input": given})
        reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
        reason = reasons.get(answer.finish_reason, "stop_sequence" if answer.stop_text else "end_turn")
        usage = {"input_tokens": answer.num_prompt_tokens, "output_tokens": len(answer.token_ids)}
        response = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": body["model"]}
        stop_text = answer.stop_text if reason == "stop_sequence" else None
        return {**response, "content": content, "stop_reason": reason, "stop_sequence": stop_text, "usage": usage}

    def events(self, response: Body, body: Body) -> Iterator[Body]:
        usage = {**response["usage"], "output_tokens": 0}
        yield {"type": "message_start", "message": {**response, "content": [], "stop_reason": None, "usage": usage}}
        for index, block in enumerate(response["content"]):
            deltas = {"text": block.get("text"), "thinking": block.get("thinking"), "signature": block.get("signature")}
            deltas = {name: text for name, text in deltas.items() if text is not None}
            empty: Body = dict.fromkeys(deltas, "")
            kinds = [(f"{name}_delta", name, text) for name, text in deltas.items()]
            if block["type"] == "tool_use":
                empty = {"input": {}}
                kinds = [("input_json_delta", "partial_json", json.dumps(block["input"]))]
            yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
            for kind, name, text in kinds:
                yield {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: text}}
            yield {"type": "content_block_stop", "index": index}
        ended = {name: response[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ended, "usage": response["usage"]}
        yield {"type": "message_stop"}


Dialect = ChatCompletions | Responses | Messages


def new_dialects() -> dict[str, Dialect]:
    """Returns a rollout's dialects by route."""
    return {"chat/completions": ChatCompletions(), "responses": Responses(), "messages": Messages()}
