"""Brings messages into one canonical form, so that histories compare equal however an agent sends them back.

`content` is text, arguments of tool calls are parsed JSON, and roles are `system`, `user`, `assistant` and `tool`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from telescope.environments.records import ChatMessage
from telescope.errors import UserError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
UNREADABLE = "INVALID_JSON"
"""Key for arguments of a tool call that are no object, where they must be one. Pydantic AI uses it, too."""


def message_of(message: Mapping[str, Any]) -> ChatMessage:
    """Returns a message of OpenAI's chat API in canonical form. Raises `UserError`, `KeyError` or `TypeError`."""
    role = message.get("role")
    if role not in _ROLES:
        raise UserError(f"a message has the role {role!r}: use system, user, assistant or tool")
    made: ChatMessage = {"role": _ROLES[role], "content": text_of(message.get("content"))}
    made |= {key: message[key] for key in ("name", "tool_call_id", "reasoning_content") if message.get(key)}
    if reasoning := message.get("reasoning"):
        made.setdefault("reasoning_content", reasoning)
    if calls := message.get("tool_calls"):
        functions = [(call.get("id"), call["function"]) for call in calls]
        made["tool_calls"] = [tool_call(i, each["name"], each.get("arguments")) for i, each in functions]
    return made


def tool_call(call_id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """Returns a tool call in canonical form."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed(arguments)}}


def parsed(arguments: Any) -> Any:
    """Returns the JSON value in the arguments of a tool call, also if it is encoded twice, or under `UNREADABLE`.

    Text that is not JSON is returned as it is. Parsing a result again does not change it.
    """
    with contextlib.suppress(ValueError, RecursionError):
        while arguments:
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            elif isinstance(arguments, dict) and arguments.keys() == {UNREADABLE}:
                arguments = arguments[UNREADABLE]
            else:
                break
    return arguments or {}


def text_of(content: Any) -> str:
    """Returns the text of content, which is a text, a list of parts or None. Raises `UserError` for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise UserError(f"the content of a message is {content!r:.80}: write a text, for example with json.dumps")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind not in _TEXTS:
            raise UserError(f"the policy reads text only, and a message has a part of type {kind!r}")
        texts.append(str(part[_TEXTS[kind]]))
    return "\n".join(texts)


def template_messages(messages: Iterable[Mapping[str, Any]]) -> list[ChatMessage]:
    """Returns messages for chat templates: canonical, without ids, and results with the tool's name."""
    names: dict[Any, str] = {}
    converted = []
    for message in map(message_of, messages):
        for call in message.get("tool_calls", ()):
            names[call.pop("id")] = call["function"]["name"]
        if message["role"] == "tool" and (name := names.get(message.get("tool_call_id"))):
            message.setdefault("name", name)
        converted.append(message)
    return converted
