"""Makes chat templates show tool results after completions that are raw text.

Gemma 4's template shows results only after `tool_calls`, which a recorded completion does not have. So the completion
is rendered as a call whose argument is a mark, and the text that the template writes around the mark is replaced by the
completion. DeepSeek's template opens only the first results of a conversation; later results get the text that it
writes before the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from telescope.environments.records import ChatMessage
from telescope.rollout.stops import ANSWER, QUESTION, REPLY, RESULT, SAID, call_with

if TYPE_CHECKING:
    from telescope.rollout.rendering import Renderer

MARK = "0telescope{}called0"
"""Placeholder for the call of the completion at a position."""


class ToolResults:
    """What a template needs to show results after raw completions. Most templates need nothing."""

    def __init__(self, renderer: Renderer) -> None:
        self._as_call, self._first, self._pattern = False, "", ""
        mark = MARK.format(r"(\d+)")
        try:
            text = renderer.render([QUESTION, SAID, RESULT, SAID, RESULT], add_generation_prompt=True)
            before, *behind = text.split(ANSWER)
            first, later = (each.partition(REPLY)[0] for each in behind)
            if REPLY in text:
                self._first = first
                if first != later:
                    self._pattern = f"{mark}(?:{re.escape(first)}|{re.escape(later)})"
                return
            opened, _, closed = renderer.render(
                [QUESTION, call_with(ANSWER, ANSWER), RESULT], add_generation_prompt=True
            ).partition(ANSWER)
        except Exception:  # a template is a program and may raise anything
            return
        closed, shown, _ = closed.partition(REPLY)
        ends = [token_id for token_id in renderer.control_ids(closed) if token_id in renderer.stops.token_ids]
        if shown and ends and opened.startswith(before):
            closed = closed.partition(renderer.name_of(ends[0]))[0]
            self._as_call = True
            self._pattern = f"{re.escape(opened[len(before) :])}{mark}{re.escape(closed)}"

    def render(self, messages: Sequence[ChatMessage], render: Callable[[Sequence[ChatMessage]], str]) -> str:
        if not self._pattern:
            return render(messages)
        marked, marks = list(messages), 0
        for i, message in enumerate(messages):
            before = messages[i - 1] if i else {}
            if message.get("role") != "tool":
                continue
            if self._as_call and not message.get("name"):
                marked[i] = {**message, "name": "unknown"}
            if before.get("role") == "assistant" and "tool_calls" not in before:
                mark, marks = MARK.format(i - 1), marks + 1
                marked[i - 1] = (
                    call_with(mark, mark) if self._as_call else {**before, "content": f"{before['content']}{mark}"}
                )

        def shown(found: re.Match[str]) -> str:
            return str(messages[int(found[1])]["content"]) if self._as_call else self._first

        text, replaced = re.subn(self._pattern, shown, render(marked))
        return text if replaced == marks else render(messages)
