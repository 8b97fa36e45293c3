"""Returns the conversations of a sample as a tree of its turns, with the causes of forks in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from telescope.dashboard.tables import Row
from telescope.utils.text import pluralize

MAIN = "main"
"""Displayed name of a rollout's main conversation."""

FORKS = {
    "retry": "retry", "branch": "branch", "edited_history": "history edited", "tools": "other tools",
    "compaction": "compaction",
}  # fmt: skip
"""Causes of forks in words (`rollout.joins`). All others are divergences from the chat template."""


def is_answer(turn: Row) -> bool:
    """Returns whether a row of `turns` is a completion, not a prompt's message with the role `assistant`."""
    return bool(turn["role"] == "assistant" and turn["restarts"] is None)


@dataclass
class _Conversation:
    """A conversation that is being read. `cause` is why it begins."""

    name: str
    depth: int
    cause: str
    turns: list[int] = field(default_factory=list)
    """Rows of `turns` that this conversation shows."""
    branches: list[_Conversation] = field(default_factory=list)
    """Conversations that branch off."""
    num_repeated: int = 0
    num_calls: int = 0
    num_tokens: int = 0
    trained: bool = False

    def row(self) -> Row:
        """Returns the conversation in the form that the pages read. `about` has its cause and its counts in words."""
        parts = [self.cause]
        parts += [f"{pluralize(self.num_repeated, 'message')} as before"] * bool(self.num_repeated)
        parts += [pluralize(self.num_calls, "call"), f"{self.num_tokens:,} answer tokens"]
        parts += ["not trained"] * (not self.trained)
        return {"name": self.name, "depth": self.depth, "turns": self.turns, "about": ", ".join(filter(None, parts))}


def conversations(turns: Sequence[Row]) -> list[Row]:
    """Returns the conversations of a sample, each branch after the conversation that it leaves (`Conversation`).

    The first completion of a branch extends a completion that another one extends too. Empty for a conversation between
    model and environment, which is one chain. Omits messages that a prompt shares with an earlier prompt of its chat.
    """
    if not turns or is_answer(turns[0]):
        return []
    roots: list[_Conversation] = []
    owners: dict[int, tuple[_Conversation, int]] = {}
    """Conversation of each completion, and its number there."""
    nodes: dict[tuple[int, str, str], int] = {}
    """Messages as a tree for each chat. A key has the previous node, the role and the text."""
    node_of: dict[int, int] = {}
    """Node of each completion."""
    continued = _continued(turns)
    has_main = any(turn["chat"] is None for turn in turns)
    replies: list[Row] = []
    for turn in turns:
        if not is_answer(turn):
            replies.append(turn)
            continue
        parent = turn["parent"]
        begins = parent not in owners or continued[parent] != turn["turn"]
        if begins:
            cause = next((row["divergence"] for row in replies if row["divergence"]), None) or ""
            cause, depth, siblings = FORKS.get(cause, cause.replace("_", " ")), 0, roots
            if parent in owners:
                origin, number = owners[parent]
                cause, depth = f"{cause} after call {number} of {origin.name}".strip(), origin.depth + 1
                siblings = origin.branches
            elif has_main and turn["chat"] is not None:
                depth = 1
            conversation = _Conversation(turn["chat"] or MAIN, depth, cause)
            siblings.append(conversation)
        else:
            conversation, _ = owners[parent]
        node = node_of.get(parent) or nodes.setdefault((0, "", turn["chat"] or ""), len(nodes) + 1)
        for message in [*replies, turn]:
            key = node, message["role"] or "", (message["text"] or "").strip()
            if begins and key in nodes and message is not turn:
                conversation.num_repeated += 1
            else:
                conversation.turns.append(message["turn"])
            node = nodes.setdefault(key, len(nodes) + 1)
        conversation.num_calls += 1
        conversation.num_tokens += turn["num_tokens"] or 0
        conversation.trained |= turn["trained"] is not False
        node_of[turn["turn"]], owners[turn["turn"]] = node, (conversation, conversation.num_calls)
        replies = []
    rows, left = [], roots[::-1]
    while left:  # not recursive, because an agent may branch a thousand times
        conversation = left.pop()
        rows.append(conversation.row())
        left += conversation.branches[::-1]
    return rows


def paths(turns: Sequence[Row]) -> list[list[Row]]:
    """Returns the completions of each token sequence, from its beginning to a completion that no other extends.

    If no parents are recorded, a completion extends the previous one, unless a conversation begins between them.
    """
    parents: dict[int, int | None] = {}
    answers: dict[int, Row] = {}
    before, restarts = None, False
    for turn in turns:
        restarts |= bool(turn["restarts"])
        if is_answer(turn):
            answers[turn["turn"]] = turn
            parents[turn["turn"]] = before if turn["parent"] is None and not restarts else turn["parent"]
            before, restarts = turn["turn"], False
    made = []
    for leaf in sorted(parents.keys() - parents.values()):
        path = [leaf]
        while (parent := parents[path[-1]]) in parents and parent < path[-1]:
            path.append(parent)
        made.append([answers[place] for place in reversed(path)])
    return made


def _continued(turns: Sequence[Row]) -> dict[int, int]:
    """Returns the completion that continues each completion: the first that is no fork, or else the first."""
    children: dict[int, list[tuple[bool, int]]] = defaultdict(list)
    is_fork = False
    for turn in turns:
        if is_answer(turn):
            if turn["parent"] is not None:
                children[turn["parent"]].append((is_fork, turn["turn"]))
            is_fork = False
        else:
            is_fork |= turn["divergence"] in FORKS
    return {parent: min(each)[1] for parent, each in children.items()}
