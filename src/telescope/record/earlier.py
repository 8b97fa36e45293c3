"""Reads the conversations of runs that earlier versions recorded: their texts are in `samples`, a prompt as rendered.

Owns what such a sample looks like in the tables of this version. Everything else reads one shape only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from telescope.record.tables import TABLES

Row = dict[str, Any]

_TEMPLATES = (
    (re.compile(r"<\|im_start\|>([a-z_]+)\n?"), "<|im_end|>"),
    (re.compile(r"<\|start_header_id\|>([a-z_]+)<\|end_header_id\|>\n{0,2}"), "<|eot_id|>"),
    (re.compile(r"<start_of_turn>([a-z_]+)\n?"), "<end_of_turn>"),
    (re.compile(r"<\|(system|user|assistant|observation)\|>\n?"), "<|endoftext|>"),
)
"""How chat templates begin and end a message."""
_BEGINNING = re.compile(r"<\|begin_of_text\|>|<bos>")
_ROLES = {"model": "assistant", "ipython": "tool", "observation": "tool"}


def prompt_messages(prompt: str) -> list[Row]:
    """Returns the messages of a rendered prompt. A prompt of no known chat template is one message.

    The last, empty message of a prompt, which asks the model to answer, is left out.
    """
    for opening, close in _TEMPLATES:
        before, *found = opening.split(prompt)
        if found:
            before = _BEGINNING.sub("", before)
            messages = [{"role": "prompt", "content": before}] if before.strip() else []
            for role, text in zip(*[iter(found)] * 2, strict=True):
                messages.append({"role": _ROLES.get(role, role), "content": text.partition(close)[0].strip()})
            last = messages[-1]
            asks = last["role"] == "assistant" and not re.sub(r"</?think>", "", last["content"]).strip()
            return messages[:-1] if asks else messages
    return [{"role": "prompt", "content": prompt}] if prompt else []


def upgrade(sample: Row) -> None:
    """Gives a sample with its `turns` and `tool_calls`, in order, the form of this version, if it is an earlier one."""
    _add_parents(sample["turns"])
    if sample["completion_text"] is None:
        return
    prompt = {message["content"] for message in sample["messages"]}
    turns: list[Row] = sample["turns"]
    num_prompt = next((place for place, turn in enumerate(turns) if turn["role"] == "assistant"), 0)
    sample["turns"] = [turn for place, turn in enumerate(turns) if place >= num_prompt or turn["text"] not in prompt]
    if not turns and sample["completion_text"]:  # dropped while the disk was full
        values = {name: sample[name] for name in ("attempt", "sample_id")}
        values |= {"turn": 0, "role": "assistant", "text": sample["completion_text"]}
        sample["turns"] = [dict.fromkeys(TABLES["turns"].column_names) | values]
    open_calls: Sequence[Row] = ()
    num_answers = 0
    for turn in sample["turns"]:
        if turn["role"] == "assistant":
            open_calls = [call for call in sample["tool_calls"] if call["turn"] == num_answers]
            num_answers += 1
        else:
            if len(bare := prompt_messages(turn["text"] or "")) == 1:
                turn["text"] = bare[0]["content"]
            for call in _answered(turn["text"] or "", open_calls):
                call["reply"] = turn["turn"]
            open_calls = [call for call in open_calls if call["reply"] is None]


def is_answer(turn: Row) -> bool:
    """Returns whether a row of `turns` is an answer of the model, not a message of a prompt with the role of one."""
    return bool(turn["role"] == "assistant" and turn["restarts"] is None)


def _add_parents(turns: Sequence[Row]) -> None:
    """Gives answers without a parent the one before, unless a conversation begins between them."""
    before, restarts = None, False
    for turn in turns:
        restarts |= bool(turn["restarts"])
        if is_answer(turn):
            if turn["parent"] is None and not restarts:
                turn["parent"] = before
            before, restarts = turn["turn"], False


def _answered(text: str, calls: Sequence[Row]) -> Sequence[Row]:
    """Returns the calls whose results a message has: one, or all of them in lines `Tool 1: ...`."""
    results = [(call["result"] or "").strip() for call in calls]
    message = text.strip()
    if len(calls) > 1 and message == "\n".join(f"Tool {i}: {result}" for i, result in enumerate(results, 1)):
        return calls
    return [call for call, result in zip(calls, results, strict=True) if result and result == message][:1]
