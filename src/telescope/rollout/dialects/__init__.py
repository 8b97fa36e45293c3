"""The APIs that agents speak to the endpoint: `chat` and `responses` of OpenAI, `messages` of Anthropic.

A dialect is a module with `read` (a request's body to a `Call`), `write` (an `Answer` to a response's body) and `stream`
(that body as events). Bodies are plain dicts: the models of the SDKs would cost a worker seconds and 100 MiB.

The messages of a call have one canonical form, so that a history is equal in all dialects however an agent returns it:
`content` is text, arguments of tool calls are parsed JSON, and roles are `system`, `user`, `assistant` and `tool`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from telescope.environments.base import ChatMessage
from telescope.environments.context import Answer

Body = dict[str, Any]

SAMPLING = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
"""Parameters that are passed on as they are. The run's own are used; a difference is counted, not refused."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def accept_only(body: Mapping[str, Any], **accepted: tuple[Any, ...]) -> None:
    """Refuses other values of fields that would change the answer, but are not supported."""
    for name, values in accepted.items():
        if (value := body.get(name)) is not None and value not in values:
            only = f" Only {json.dumps(values[0])} is supported." if values else ""
            shown = json.dumps(value)[:200]
            message = f"Unsupported value: '{name}' does not support {shown} with this model.{only}"
            raise Refusal(message, code="unsupported_value", param=name)


def sampling_of(body: Body, limits: Iterable[str], stop: str = "stop") -> Body:
    """Returns `Call.sampling`. `limits` are the names of a maximum of tokens, `stop` is that of texts that end it."""
    sampling = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    for name in limits:
        if (limit := body.get(name)) is not None:
            if type(limit) is not int or limit < 1:
                raise Refusal(f"Invalid '{name}': expected a positive integer, but got {limit!r:.50}.", param=name)
            sampling.setdefault("max_tokens", limit)
    if stops := body.get(stop):
        sampling["stop"] = [stops] if isinstance(stops, str) else stops
        if not isinstance(sampling["stop"], list) or not all(text and type(text) is str for text in sampling["stop"]):
            raise Refusal(f"Invalid '{stop}': expected texts that are not empty.", param=stop)
    return sampling


def text_of(content: Any) -> str:
    """Returns the text of a message's content: text, parts of text, or nothing."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part["type"] not in _TEXT_PARTS:
            raise Refusal(f"This model reads text only: a part of type '{part['type']}' is not supported.")
    return "\n".join(part[_TEXT_PARTS[part["type"]]] for part in content)


def arguments_of(text: Any) -> Any:
    """Returns the arguments of a tool call as a JSON value. Text that is none stays text."""
    try:
        return json.loads(text or "{}") if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text


def tool_call(call_id: str, name: str, arguments: Any) -> Body:
    """Returns a canonical tool call."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments_of(arguments)}}


def assistant(text: str, reasoning: str = "", calls: Iterable[Body] = ()) -> ChatMessage:
    """Returns a canonical message of the model. `calls` are canonical."""
    message: ChatMessage = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls := list(calls):
        message["tool_calls"] = calls
    return message


def tool_schema(tool: Body, parameters: str) -> Body:
    """Returns a tool as OpenAI's chat API has it. `parameters` is the name of the field with its JSON schema."""
    function = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool.get(parameters) or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def token_logprobs(answer: Answer) -> list[Body]:
    """Returns the logprobs of sampled tokens, which are named by their ids."""
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return [{"token": f"token_id:{token}", "logprob": value, "bytes": [], "top_logprobs": []} for token, value in pairs]
