"""Joins the calls of a rollout to conversations, so that no recorded token is ever made from text again.

A call sends a whole conversation. It belongs to the recorded one that it extends: the longest whose messages it begins
with. Its prompt is then the recorded token ids and what is new, rendered. Messages are compared in a canonical form
(role, text, tool calls with parsed arguments), because an SDK sends an answer back with other ids, spaces or fields
than it received; reasoning is not compared, since most do not send it back. A call that extends none begins a
conversation. Where another recorded one has the same start, that is a fork, and its cause is recorded:

- `retry`: the same prompt again
- `branch`: another continuation of an answer that has been continued
- `edited_history`: the call changed or left out a message of a recorded conversation
- `tools`: it offers other tools, which the template shows at the start
- `compaction`: the caller has shortened the history, and says so

A join that differs from the chat template has the name of its divergence as cause (`rendering.Divergence`). It is no
fork: the recorded ids stay, unless every prompt is rendered from the start.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from telescope.environments.base import ChatMessage, assistant_message
from telescope.environments.context import Call
from telescope.errors import UserError
from telescope.rollout.messages import template_messages
from telescope.rollout.rendering import Dialogue, Renderer

RETRY, BRANCH, EDITED_HISTORY, TOOLS = "retry", "branch", "edited_history", "tools"


Identity = tuple[str, str, str]
"""What identifies a message, whatever the form in which an SDK sends it: role, text, and tool calls as JSON."""


@dataclass(slots=True, eq=False)
class _Node:
    """A message in its conversation. `answer` is set for a recorded answer of the policy."""

    children: dict[Identity, _Node] = field(default_factory=dict)
    answer: _Answer | None = None
    was_prompt: bool = False
    """A call ended with this message."""


@dataclass(slots=True, frozen=True)
class _Answer:
    """A recorded answer: its turn, its prompt, and what was sampled."""

    turn: int
    prompt: Prompt
    token_ids: Sequence[int]
    text: str
    ended: bool


@dataclass(slots=True, frozen=True)
class Prompt:
    """The prompt of a call, and how it joins what is recorded."""

    token_ids: list[int]
    added_token_ids: list[int]
    """Its end, behind the answer of the turn `parent`; all of it without one."""
    parent: int | None
    cause: str | None
    """Why it forks, or how its join differs from the chat template."""
    messages: list[ChatMessage]
    """As rendered: recorded answers are as they were sampled."""
    new_messages: list[ChatMessage]
    """Those behind the answer of the parent."""
    dialogue: Dialogue
    node: _Node


class Joins:
    """The conversations of one rollout. With `interleaved` False every prompt is rendered from the start."""

    def __init__(self, renderer: Renderer, *, interleaved: bool = True) -> None:
        self._renderer = renderer
        self._interleaved = interleaved
        self._roots: dict[str, dict[str, _Node]] = {}
        """By chat and tools, the start of its conversations."""
        self._by_ids: list[tuple[list[int], int]] = []
        """Prompt and answer of each call by token ids, and its turn."""

    def prompt(self, call: Call) -> Prompt:
        """Returns the prompt of a call. Raises what the chat template raises."""
        if call.token_ids is not None:
            return self._prompt_of_ids(list(call.token_ids))
        if not call.messages:
            raise UserError("it has no messages")
        tools = [dict(tool) for tool in call.tools]
        of_chat, key = self._roots.setdefault(call.chat, {}), json.dumps(tools, sort_keys=True)
        messages = template_messages(call.messages)
        path = [_identity(message) for message in messages]
        node = of_chat.setdefault(key, _Node())
        parent, depth, matched = None, 0, 0
        for message in path:
            if message not in node.children:
                break
            node, matched = node.children[message], matched + 1
            if node.answer is not None:
                parent, depth = node.answer, matched
        cause = self._cause(node, depth, path[:matched], path[matched:])
        if not matched and any(path[0] in root.children for root in of_chat.values()):
            cause = TOOLS
        if parent is None:
            cause = call.cause or cause
        for message in path[matched:]:
            node = node.children.setdefault(message, _Node())
        node.was_prompt = True
        new = messages[depth:]
        if parent is None:
            dialogue = Dialogue(self._renderer, interleaved=self._interleaved, tools=tools or None)
            ids = dialogue.begin(new)
            return Prompt(ids, ids, None, cause, new, new, dialogue, node)
        before = parent.prompt
        messages = [*before.messages, assistant_message(before.dialogue.opening + parent.text), *new]
        dialogue = before.dialogue.branch()
        added = dialogue.extend(parent.text, parent.token_ids, messages, ended=parent.ended)
        cause, ids = cause or added.divergence, added.token_ids
        if added.restarts:
            return Prompt(ids, ids, None, cause, messages, messages, dialogue, node)
        whole = [*before.token_ids, *parent.token_ids, *ids]
        return Prompt(whole, ids, parent.turn, cause, messages, new, dialogue, node)

    def count(self, call: Call) -> int:
        """Returns the number of tokens of a call's messages, rendered anew. Records nothing."""
        dialogue = Dialogue(self._renderer, tools=[dict(tool) for tool in call.tools] or None)
        return len(dialogue.begin(template_messages(call.messages)))

    def record(
        self, prompt: Prompt, message: ChatMessage, turn: int, token_ids: Sequence[int], text: str, *, ended: bool
    ) -> None:
        """Records the answer to a prompt: the `message` that the caller gets, its turn, and what was sampled.

        `text` is all of it without the end token, and `ended` whether the model ended it.
        """
        if not prompt.messages:
            self._by_ids.append(([*prompt.token_ids, *token_ids], turn))
            return
        node = prompt.node.children.setdefault(_identity(template_messages([message])[0]), _Node())
        node.answer = _Answer(turn, prompt, token_ids, text, ended)

    def _prompt_of_ids(self, ids: list[int]) -> Prompt:
        for each in ids:
            if not (isinstance(each, int) and each >= 0 and self._renderer.has_embedding(each)):
                raise UserError(f"the model has no token {each!r}")
        known = [(len(before), turn) for before, turn in self._by_ids if ids[: len(before)] == before]
        length, parent = max(known, default=(0, None))
        text = self._renderer.decode(ids[length:], cut_end_token=False)
        shown = [{"role": "prompt", "content": text}]
        return Prompt(ids, ids[length:], parent, None, [], shown, Dialogue(self._renderer), _Node())

    def _cause(self, node: _Node, depth: int, known: list[Identity], new: list[Identity]) -> str | None:
        """Returns why a call forks. It extends an answer at `depth` of the `known` messages, which end at `node`."""
        if not new:
            return RETRY if node.was_prompt else None
        if depth == len(known) and not node.children:
            return None
        if new[0][0] == "assistant" or (not depth and any(role != "system" for role, *_ in known)):
            return EDITED_HISTORY
        return BRANCH if depth else None


def _identity(message: ChatMessage) -> Identity:
    """Returns what identifies a message of a chat template."""
    calls = message.get("tool_calls")
    return message["role"], message["content"].strip(), json.dumps(calls, sort_keys=True) if calls else ""
