"""The conversations of a sample: its turns as a tree, with the causes of forks in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from telescope.dashboard.tables import Row
from telescope.utils.text import pluralize

MAIN = "main"
"""Shown name of a rollout's own conversation."""

FORKS = {
    "retry": "retry", "branch": "branch", "edited_history": "history edited", "tools": "other tools",
    "compaction": "compaction",
}  # fmt: skip
"""Causes of forks in words (`rollout.joins`). Others are divergences from the chat template."""


def is_answer(turn: Row) -> bool:
    """Returns whether a row of `turns` is an answer of the model, not a message of a prompt with the role of one."""
    return bool(turn["role"] == "assistant" and turn["restarts"] is None)


def conversations(turns: Sequence[Row]) -> list[Row]:
    """Returns the conversations of a sample, each branch behind the conversation that it leaves (`Conversation`).

    The first answer of a branch extends an answer that another one extends too. Empty for a conversation between model
    and environment, which is one chain. Messages that a prompt has in common with an earlier one are not listed again.
    """
    if not turns or is_answer(turns[0]):
        return []
    roots: list[Row] = []
    owners: dict[int, tuple[Row, str]] = {}
    """Conversation of each answer, and its place there."""
    nodes: dict[tuple[int, str, str], int] = {}
    """Messages as a tree: node before, role and text of each."""
    at: dict[int | None, int] = {None: 0}
    """Node of each answer."""
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
            origin, where = owners.get(parent, (None, ""))
            depth = origin["depth"] + 1 if origin else int(has_main and turn["chat"] is not None)
            cause = next((row["divergence"] for row in replies if row["divergence"]), None) or ""
            own: Row = {"name": turn["chat"] or MAIN, "depth": depth, "turns": [], "below": []}
            own |= {"why": f"{FORKS.get(cause, cause.replace('_', ' '))}{where}"}
            own |= {"repeated": 0, "calls": 0, "tokens": 0, "trained": False}
            (origin["below"] if origin else roots).append(own)
        else:
            own, _ = owners[parent]
        node = at.get(parent, 0)
        for message in [*replies, turn]:
            key = node, message["role"] or "", (message["text"] or "").strip()
            is_repeated = begins and key in nodes and message is not turn
            node = nodes.setdefault(key, len(nodes) + 1)
            own["repeated"] += is_repeated
            own["turns"] += [] if is_repeated else [message["turn"]]
        own["calls"] += 1
        at[turn["turn"]] = node
        owners[turn["turn"]] = own, f" after call {own['calls']} of {own['name']}"
        own["tokens"] += turn["num_tokens"] or 0
        own["trained"] |= turn["trained"] is not False
        replies = []
    found, left = [], roots[::-1]
    while left:
        one = left.pop()
        left += one["below"][::-1]
        found.append({name: one[name] for name in ("name", "depth", "turns")} | {"about": _about(one)})
    return found


def _about(conversation: Row) -> str:
    """Returns in words why a conversation begins, its counts, and whether it is trained."""
    parts = [conversation["why"].strip()]
    parts += [f"{pluralize(conversation['repeated'], 'message')} as before"] * bool(conversation["repeated"])
    parts += [pluralize(conversation["calls"], "call"), f"{conversation['tokens']:,} answer tokens"]
    parts += ["not trained"] * (not conversation["trained"])
    return ", ".join(filter(None, parts))


def paths(turns: Sequence[Row]) -> list[list[Row]]:
    """Returns the answers of each sequence of tokens, from its beginning to an answer that no other extends.

    Where no parents are recorded, an answer extends the one before, unless a conversation begins between them.
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
    """Returns the answer that continues the conversation of each: the first that is no fork, or else the first."""
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
