"""Parses a completion for an agent into text, reasoning and tool calls, in the formats of released models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from telescope.environments.parsers import REASONING_TAGS, UnfinishedReasoning, answer_text
from telescope.environments.tool_calls import NAMESPACE, Parameters, ToolCall, split_answer
from telescope.errors import UserError
from telescope.rollout.messages import parsed

_CLOSED = ("}", "]", ")", "</function>", "</tool_call>", "invoke>", "<tool_call|>")
"""Endings of a complete call."""
_AROUND_CALLS = re.compile(
    rf"</?{NAMESPACE}(?:tool|function)_calls?>|\[TOOL_CALLS\]|```(?:json)?\s*```"
    r"|```\s*(?=<\uff5ctool)|\[[\s,;]*\]|```tool_code(?:\s*print\(\s*\))*\s*```"
)
"""Markup around calls that remains after they are removed."""
_CONTROL = re.compile(
    r"<\|start\|>\w*|<\|channel\|>\s*\w+|<\|turn>\w*|<[|\uff5c][^<>\s]{1,60}[|\uff5c]>|<\|\w{1,40}>|<\w{1,40}\|>"
)
"""Tokens that structure a conversation, with the names that follow them."""


class ParsedAnswer(NamedTuple):
    """A parsed completion without special tokens. A call with an `error` has unreadable arguments."""

    text: str
    reasoning: str
    tool_calls: list[ToolCall]


def parse_answer(text: str, *, opened: str, tools: Sequence[Mapping[str, Any]], is_cut: bool) -> ParsedAnswer:
    """Parses a decoded completion without its end token.

    `opened` is the tag at the end of the prompt (`parsers.opening_tag`). `tools` are OpenAI schemas; without any,
    nothing is read as a call. If the completion `is_cut`, a call at its end counts only if it is complete. Raises
    only what `parameters_of` raises.
    """
    answer = answer_text(text, opened)
    if isinstance(answer, UnfinishedReasoning):
        tag = next((tag for tag in REASONING_TAGS if text.lstrip().startswith(tag)), "")
        return ParsedAnswer("", _cleaned(text.lstrip().removeprefix(tag)), [])
    rest, reasoning, calls = split_answer(answer, parameters_of(tools))
    calls = [call for call in calls if call.name] if tools else []
    for call in calls:
        call.arguments = call.arguments if call.error else parsed(call.arguments)
    last = calls[-1].raw_text.rstrip() if calls else ""
    if is_cut and calls and (calls[-1].error or (rest.rstrip().endswith(last) and not last.endswith(_CLOSED))):
        calls.pop()
    for call in calls:
        rest = rest.replace(call.raw_text, "", 1)
    return ParsedAnswer(_cleaned(_AROUND_CALLS.sub("", rest) if calls else rest), _cleaned(reasoning), calls)


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Parameters]:
    """Returns the schemas of the parameters of OpenAI tools by tool. Raises `UserError` for malformed ones."""
    found: dict[str, Parameters] = {}
    for tool in tools:
        function = tool.get("function", tool)
        schema = function.get("parameters") or {}
        properties = (schema.get("properties") or {}) if isinstance(schema, Mapping) else schema
        if not isinstance(properties, Mapping):
            raise UserError(f"the tool {function.get('name')!r} has the parameters {schema!r:.80}: write a JSON schema")
        found[str(function.get("name"))] = properties
    return found


def _cleaned(text: str) -> str:
    return _CONTROL.sub("", text).strip()
