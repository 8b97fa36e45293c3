"""Shows tools to a model through its chat template, in the form that it was trained on.

A template takes tools if it writes their schemas into the prompt, and if `tool_calls` can read the calls that it
writes. Both are tried with one tool. With any other template, the environment's system message shows the tools.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from telescope.environments.records import ChatMessage, assistant_message
from telescope.environments.tool_calls import parse_calls
from telescope.utils.text import num_equal

_SENTINEL = "0telescope0"
_PARAMETERS = {"PARAMETER": {"type": "string", "description": "a text"}}
_FUNCTION = {
    "name": "NAME",
    "description": _SENTINEL,
    "parameters": {"type": "object", "properties": _PARAMETERS, "required": ["PARAMETER"]},
}
_CALL = {"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}
_ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>|\Z)", re.DOTALL)
_FINAL = "<|channel|>final<|message|>"


@dataclass(slots=True, frozen=True)
class ToolTemplate:
    """How a chat template handles tools: the `form` of a call, and whether it has a role for results."""

    form: str
    takes_results: bool


def tool_template(tokenizer: Any) -> ToolTemplate | None:
    """Returns how the tokenizer's chat template handles tools. None if tools cannot go through it."""
    return _tried(tokenizer, str(tokenizer.chat_template)) if getattr(tokenizer, "chat_template", None) else None


@lru_cache(maxsize=4)
def _tried(tokenizer: Any, template: str) -> ToolTemplate | None:
    def render(*messages: ChatMessage, prompts: bool = True) -> str:
        return tokenizer.apply_chat_template(
            with_channels_as_fields(messages, template),
            tools=[{"type": "function", "function": _FUNCTION}],
            tokenize=False,
            add_generation_prompt=prompts,
        )

    question = {"role": "user", "content": "0"}
    functions = [{"id": "call00000", "type": "function", "function": _CALL}]
    called: ChatMessage = {"role": "assistant", "content": "", "tool_calls": functions}
    try:
        prompt = render(question)
        whole = render(question, called, prompts=False)
        written = whole[num_equal(prompt, whole) :]
        calls = parse_calls(written, "xml", {"NAME": _PARAMETERS})
    except Exception:  # a template is a program and may raise anything
        return None
    if _SENTINEL not in prompt or [(call.name, call.arguments) for call in calls] != [tuple(_CALL.values())]:
        return None
    form = calls[0].raw_text
    try:
        result = {"role": "tool", "name": "NAME", "content": _SENTINEL * 2}
        shown = (render(question, each, result) for each in (assistant_message(form), called))  # see `ToolResults`
        takes_results = any(_SENTINEL * 2 in each for each in shown)
    except Exception:
        takes_results = False
    return ToolTemplate(form, takes_results)


def with_channels_as_fields(messages: Sequence[ChatMessage], template: str) -> list[ChatMessage]:
    """Converts a conversation for the chat template of gpt-oss. Returns it unchanged for others.

    gpt-oss's template refuses completions as the model writes them, and requires separate fields for reasoning and
    calls.
    """
    if "<|channel|>" not in template:
        return list(messages)
    converted = []
    for message, following in zip(messages, [*messages[1:], {}], strict=True):
        text = message.get("content")
        if message.get("role") == "assistant" and isinstance(text, str) and "tool_calls" not in message:
            message = {"role": "assistant", "thinking": "".join(_ANALYSIS.findall(text))}
            if following.get("role") == "tool":  # an unreadable call gets a reply too
                call = next(iter(parse_calls(text, "xml")), None)
                name = (call and call.name) or following.get("name", "unknown")
                arguments = call.arguments if call and call.error is None else text
                message["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
            else:
                message["content"] = _ANALYSIS.sub("", text).rpartition(_FINAL)[2]
        converted.append(message)
    return converted
