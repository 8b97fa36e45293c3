"""Finds what ends a completion: token ids, or a text for a chat template without special tokens.

The template is asked first, because a tokenizer's `eos_token` may be another token: the base models of Qwen 2.5 end a
document with `<|endoftext|>`, while their template ends a turn with `<|im_end|>`. A completion is rendered, and the
first special token after it ends completions, as does the last one after a tool call. If a template writes nothing
after the last completion (GLM), the token after one in the history is used. Text before that token, or without such a
token, ends a completion too, because a tokenizer may lack the tokens of a template. The end tokens that the model's
files name are added.

Some templates refuse a conversation without a system message, others one with it, so both are tried.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from telescope.environments.records import ChatMessage
from telescope.errors import UserError

if TYPE_CHECKING:
    from telescope.rollout.rendering import Renderer

ANSWER = "0telescope0answer0"
"""Placeholder for a completion while the template is rendered: text that no template trims, splits or parses."""
REPLY = "0telescope0reply0"
"""Placeholder for the message after it."""
QUESTION = {"role": "user", "content": "Why?"}
SAID = {"role": "assistant", "content": ANSWER}
RESULT = {"role": "tool", "name": "look_up", "tool_call_id": "call00000", "content": REPLY}


@dataclass(frozen=True, slots=True)
class Stops:
    """The ends of a completion. `description` names each end and its source."""

    token_ids: Sequence[int] = ()
    texts: Sequence[str] = ()
    description: str = ""


NO_STOPS = Stops()


def call_with(word: str, call_id: str = "call00000") -> ChatMessage:
    """Returns a completion that calls a tool with this argument."""
    function = {"name": "look_up", "arguments": {"word": word}}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def find_stops(renderer: Renderer, files: Mapping[str, Mapping[str, Any]]) -> Stops:
    """Returns the stops of the template, of the configuration and of the model's `files`, in this order."""
    spec, tokenizer = renderer.spec, renderer.tokenizer
    sources: dict[int | str, dict[str, None]] = {}

    def add(ends: Iterable[int | str], source: str) -> None:
        for end in ends:
            sources.setdefault(end, {})[source] = None

    problem = ""
    if spec.stop_token_ids is None and tokenizer.chat_template:
        ends, problem = _ends_of_template(renderer)
        add(ends, "chat template")
    for token_id in spec.stop_token_ids or ():
        if not renderer.has_embedding(token_id):
            raise UserError(f"stop_token_ids has {token_id}, but the model has {renderer.vocab_size} tokens.")
    add(spec.stop_token_ids or (), "stop_token_ids")
    add(spec.stop, "stop")
    if tokenizer.eos_token_id is not None:
        add([tokenizer.eos_token_id], "tokenizer")
    for name, values in files.items():
        listed = values.get("eos_token_id")
        add(listed if isinstance(listed, list) else [] if listed is None else [listed], name)
    sources = {end: found for end, found in sources.items() if isinstance(end, str) or renderer.has_embedding(end)}
    shown = [
        f"{json.dumps(end, ensure_ascii=False) if isinstance(end, str) else f'{renderer.name_of(end)}, id {end},'} "
        f"from {' and '.join(found)}"
        for end, found in sources.items()
    ]
    if problem:
        shown = [*(shown or ["only its length"]), f"no end of a turn was found in the chat template: {problem}"]
    return Stops(
        [end for end in sources if isinstance(end, int)],
        [end for end in sources if isinstance(end, str)],
        "; ".join(shown),
    )


def _ends_of_template(renderer: Renderer) -> tuple[list[int | str], str]:
    """Returns the ends of a completion in the template, or why none was found."""
    call = call_with(ANSWER)
    problems: list[str] = []

    def behind(*messages: dict[str, Any]) -> str:
        try:
            text: str = renderer.render(messages, add_generation_prompt=False)
        except Exception as error:  # a template may raise any exception
            problems.append(" ".join(str(error).split()) or type(error).__name__)
            return ""
        return text.rpartition(ANSWER)[2] if ANSWER in text else ""

    for start in ([QUESTION], [{"role": "system", "content": "Answer."}, QUESTION]):
        last = behind(*start, SAID)
        following = behind(*start, SAID, {"role": "user", "content": REPLY}).partition(REPLY)[0]
        end = renderer.control_ids(last)[:1] or renderer.control_ids(following)[:1]
        text = last if last.strip() else following
        text = (text.partition(renderer.name_of(end[0]))[0] if end else text).rstrip()
        with_result = behind(*start, call, RESULT).partition(REPLY)[0]
        end_of_call = renderer.control_ids(behind(*start, call))[-1:] or renderer.control_ids(with_result)[:1]
        ends: list[int | str] = [*([text] if text else []), *end, *end_of_call]
        if ends:
            return ends, ""
    return [], f"{problems[0] if problems else 'it writes nothing behind an answer'}. Set stop_token_ids or stop"
