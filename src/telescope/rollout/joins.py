"""Joins the calls of a rollout into conversations, so that recorded tokens are never tokenized again from text.

A call sends a whole conversation. It extends the longest recorded conversation whose messages it begins with: its
prompt is the recorded token ids, followed by the new messages, rendered. Messages are compared in a canonical form
(role, text, tool calls with parsed arguments), because an SDK may send a completion back with other ids, spaces or
fields than it received. Reasoning is not compared, since most SDKs do not send it back. A call that extends no
conversation begins one. If a recorded conversation has the same start, the call is a fork, and its cause is recorded:

- `retry`: the same prompt again
- `branch`: another continuation of a completion that was already continued
- `edited_history`: the call changed or left out a message of a recorded conversation
- `tools`: the call offers other tools, which the template shows at the start
- `compaction`: the caller shortened the history and says so

A join that differs from the chat template has the name of its divergence as cause (`rendering.Divergence`). It is not a
fork: the recorded ids are kept, unless every prompt is rendered from the start.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from telescope.environments.context import Call
from telescope.environments.records import ChatMessage, assistant_message
from telescope.errors import UserError
from telescope.rollout.messages import template_messages
from telescope.rollout.rendering import Dialogue, Renderer

RETRY, BRANCH, EDITED_HISTORY, TOOLS = "retry", "branch", "edited_history", "tools"


Identity = tuple[str, str, Hashable]
"""Identifies a message in any form in which an SDK sends it: role, text, and tool calls."""


@dataclass(slots=True, eq=False)
class _Node:
    """A message in its conversation. `answer` is set for a recorded completion of the policy."""

    children: dict[Identity, _Node] = field(default_factory=dict)
    answer: _Answer | None = None
    was_prompt: bool = False
    """Whether a call ended with this message."""


@dataclass(slots=True, frozen=True)
class _Answer:
    """A recorded completion: its turn, its prompt without the whole token ids, and the sampled tokens."""

    turn: int
    prompt: Prompt
    token_ids: Sequence[int]
    text: str
    ended: bool

    def all_token_ids(self) -> list[int]:
        """Returns the token ids of its conversation up to its end."""
        parts: list[Sequence[int]] = []
        answer: _Answer | None = self
        while answer is not None:
            parts += [answer.token_ids, answer.prompt.added_token_ids]
            answer = answer.prompt.before
        token_ids: list[int] = []
        for part in reversed(parts):
            token_ids += part
        return token_ids


@dataclass(slots=True, frozen=True)
class Prompt:
    """The prompt of a call, and how it joins the recorded calls."""

    token_ids: list[int]
    added_token_ids: list[int]
    """The tokens after the completion of turn `parent`, or the whole prompt without a parent."""
    parent: int | None
    cause: str | None
    """Why it forks, or how its join differs from the chat template."""
    messages: list[ChatMessage]
    """The rendered messages. Recorded completions are as they were sampled."""
    new_messages: list[ChatMessage]
    """The messages after the parent's completion."""
    dialogue: Dialogue
    node: _Node
    """The newest recorded message: that of the call, or before it is recorded the last one that was known."""
    unknown: list[Identity] = field(default_factory=list)
    """The messages that were not recorded before."""
    _: KW_ONLY
    before: _Answer | None = None
    """The completion that it extends."""
    renders_again: bool = False
    """Whether it has no parent, but repeats or changes messages of a recorded conversation."""


class Joins:
    """The conversations of one rollout. With `interleaved` False every prompt is rendered from the start."""

    def __init__(self, renderer: Renderer, *, interleaved: bool = True) -> None:
        self._renderer = renderer
        self._interleaved = interleaved
        self._roots: dict[str, dict[str, _Node]] = {}
        """The roots of conversations, by chat and tools."""
        self._by_ids: defaultdict[str, list[tuple[list[int], int]]] = defaultdict(list)
        """By chat, the token ids of prompt and completion of each call made with token ids, and its turn."""

    def prompt(self, call: Call) -> Prompt:
        """Returns the prompt of a call, and records it. Raises what the chat template raises."""
        prompt = self._join(call)
        node = prompt.node
        for message in prompt.unknown:
            node = node.children.setdefault(message, _Node())
        node.was_prompt = True
        if prompt.before is not None:
            prompt.before.prompt.dialogue.keep_in(prompt.dialogue)
        return replace(prompt, node=node)

    def count(self, call: Call) -> int:
        """Returns the number of tokens of the prompt of a call. Records nothing."""
        return len(self._join(call).token_ids)

    def _join(self, call: Call) -> Prompt:
        if call.token_ids is not None:
            return self._prompt_of_ids(call.chat, list(call.token_ids))
        if not call.messages:
            raise UserError("it has no messages")
        tools = [dict(tool) for tool in call.tools]
        of_chat, key = self._roots.setdefault(call.chat, {}), json.dumps(tools, sort_keys=True)
        messages = self._messages(call)
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
        new, unknown = messages[depth:], path[matched:]
        if parent is None:
            dialogue = Dialogue(self._renderer, interleaved=self._interleaved, tools=tools or None)
            ids = dialogue.begin(new)
            return Prompt(ids, ids, None, cause, new, new, dialogue, node, unknown, renders_again=cause is not None)
        before = parent.prompt
        messages = [*before.messages, assistant_message(before.dialogue.opening + parent.text), *new]
        dialogue = before.dialogue.branch()
        added = dialogue.extend(parent.text, parent.token_ids, messages, ended=parent.ended)
        cause, ids = cause or added.divergence, added.token_ids
        if added.restarts:
            return Prompt(ids, ids, None, cause, messages, messages, dialogue, node, unknown, renders_again=True)
        whole = [*parent.all_token_ids(), *ids]
        return Prompt(whole, ids, parent.turn, cause, messages, new, dialogue, node, unknown, before=parent)

    def _messages(self, call: Call) -> list[ChatMessage]:
        """Returns the messages for the template. If it shows no later system messages, they become the user's."""
        messages = template_messages(call.messages)
        for message in messages[1:]:
            if message["role"] == "system" and not self._renderer.shows_later_system_messages:
                message["role"] = "user"
        return messages

    def record(
        self, call: Call, prompt: Prompt, message: ChatMessage, turn: int, token_ids: Sequence[int], text: str, *,
        ended: bool,
    ) -> None:  # fmt: skip
        """Records the completion of a call: the `message` that the caller gets, its turn, and the sampled tokens.

        `text` is the whole completion without the end token. `ended`: the model ended it.
        """
        if not prompt.messages:
            self._by_ids[call.chat].append(([*prompt.token_ids, *token_ids], turn))
            return
        node = prompt.node.children.setdefault(_identity(template_messages([message])[0]), _Node())
        # Without the whole ids, whose memory would grow with the square of the number of calls.
        node.answer = _Answer(turn, replace(prompt, token_ids=[]), token_ids, text, ended)

    def _prompt_of_ids(self, chat: str, ids: list[int]) -> Prompt:
        for each in ids:
            if not (isinstance(each, int) and each >= 0 and self._renderer.has_embedding(each)):
                raise UserError(f"the model has no token {each!r}")
        longest_first = sorted(self._by_ids[chat], key=lambda known: (len(known[0]), known[1]), reverse=True)
        known = ((len(before), turn) for before, turn in longest_first if ids[: len(before)] == before)
        length, parent = next(known, (0, None))
        text = self._renderer.decode(ids[length:], cut_end_token=False)
        shown = [{"role": "prompt", "content": text}]
        return Prompt(ids, ids[length:], parent, None, [], shown, Dialogue(self._renderer), _Node())

    def _cause(self, node: _Node, depth: int, known: list[Identity], new: list[Identity]) -> str | None:
        """Returns why a call forks. The `known` messages end at `node`. The call extends the completion at `depth`."""
        if not new:
            return RETRY if node.was_prompt else None
        if depth == len(known) and not node.children:
            return None
        if new[0][0] == "assistant" or (not depth and any(role != "system" for role, *_ in known)):
            return EDITED_HISTORY
        return BRANCH if depth else None


def _identity(message: ChatMessage) -> Identity:
    return message["role"], message["content"].strip(), _hashable(message.get("tool_calls") or ())


def _hashable(value: Any) -> Hashable:
    """Returns a JSON value as agents may send it back: JavaScript has one type of number, and JSON null for NaN."""
    if isinstance(value, Mapping):
        return frozenset([(str(key), _hashable(each)) for key, each in value.items()])
    if isinstance(value, list | tuple):
        return tuple([_hashable(each) for each in value])
    if isinstance(value, bool):
        return bool, value  # Python's True equals 1
    if isinstance(value, int | float):
        number = float(str(value))  # inf for an integer that is too large
        return number if math.isfinite(number) else None
    return value
