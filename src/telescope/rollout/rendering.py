"""Renders prompts and decodes completions with a tokenizer.

Used inside worker processes. Owns the rules about special tokens: text from a chat template already contains its own,
raw text gets the tokenizer's, and no prompt begins with two beginning-of-sequence tokens or ends with an
end-of-sequence token that the tokenizer added. Names of special tokens in the content of a message are text, not
tokens, so a page that a tool returns cannot begin a turn. For this, a `BREAK` is put into each name before the template
is rendered, and the text is tokenized in pieces, split at the breaks. `allow_special_tokens_in_content` turns the
breaks off.

`Dialogue` owns the joins between turns. The sampled ids of a completion are kept as they are. The template renders the
conversation up to the next prompt, and the text after the completion is tokenized separately and appended: the end of
the completion (if the model has not sampled it), the environment's messages, and the start of the next completion. So
the ids of earlier turns are never tokenized again from text, and a join adds no newline and no second
beginning-of-sequence token.

Each turn compares the conversation with what the template renders. A join that differs has a `Divergence`, which is
counted for the trajectory. The sampled ids are kept in all cases but the last:

- `whitespace`: the template trims or pads a completion.
- `end_token`: the model ended with another token than the template puts after a completion. Both stay.
- `prompt_start`: the template starts a completion differently in the history than in a prompt.
- `history`: the template changes earlier messages, mostly by removing reasoning.
- `history` with `restarts`: the environment changed earlier messages, or the template leaves the completion out.
  Nothing can be appended, so the whole next prompt is rendered, and the turns so far are a separate training sample.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telescope.config.chat_template import NO_TEMPLATE
from telescope.environments.base import ChatMessage, with_thinking_prefix
from telescope.environments.parsers import closing_tag, opening_tag, strip_think_tags
from telescope.environments.records import assistant_message
from telescope.environments.serialization import serialize_messages
from telescope.environments.tool_template import with_channels_as_fields
from telescope.environments.user_code import call_with_declared
from telescope.errors import UserError
from telescope.rollout.stops import ANSWER, QUESTION, REPLY, find_stops
from telescope.rollout.tool_results import ToolResults
from telescope.utils.text import num_equal

if TYPE_CHECKING:
    from telescope.config import TelescopeConfig

CONTINUATION_ANCHOR = "0"
"""Prefix for tokenizing a continuation: a character that merges with no text that a template writes next."""


BREAK = "\ufdd0"
"""Separates the first character of a special token's name from the others: a code point that no text may contain."""


@dataclass(slots=True, frozen=True)
class RendererSpec:
    """A tokenizer and the options of its chat template.

    `chat_template` replaces the tokenizer's own. `tokenizer_path` is a folder or a hub id. Other fields are named as in
    the configuration.
    """

    tokenizer_path: str
    chat_template: str | None = None
    enable_thinking: bool = False
    trust_remote_code: bool = False
    stop_token_ids: list[int] | None = None
    stop: list[str] = field(default_factory=list)
    allow_special_tokens_in_content: bool = False

    @classmethod
    def from_config(cls, config: TelescopeConfig, folder: Path | None = None) -> RendererSpec:
        """Returns the spec of a run's tokenizer, or of the tokenizer in a model's `folder`."""
        options = {field.name: getattr(config, field.name) for field in fields(cls) if field.name != "tokenizer_path"}
        return cls(str(folder or config.model), **options)


class TokenOutsideVocabularyError(ValueError):
    """A prompt has a token without an embedding in the model."""


class Renderer:
    """A tokenizer and the options of its chat template.

    `tokenizer` replaces the tokenizer at `spec.tokenizer_path`; then no file is read. Templates that show the date
    (Llama 3.2, gpt-oss) show that of `now`, so that a prompt is the same whenever it is rendered.
    """

    def __init__(self, spec: RendererSpec, tokenizer: Any = None, now: datetime | None = None) -> None:
        self.spec = spec
        self._clock = {"strftime_now": (now or datetime.now()).strftime}
        files: dict[str, Mapping[str, Any]] = {}
        if tokenizer is None:
            tokenizer, files = _load(spec)
        self.tokenizer: Any = tokenizer
        if spec.chat_template is not None:
            self.tokenizer.chat_template = spec.chat_template
        self.vocab_size: int | None = files.get("config.json", {}).get("vocab_size")
        """Number of the model's embeddings. None if unknown."""
        added = tokenizer.added_tokens_decoder
        self._added = {token_id: str(token) for token_id, token in added.items()}
        special = {token_id for token_id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        # Some tokenizers, such as DeepSeek's, do not flag all tokens that structure a conversation.
        shaped = {token_id for token_id, name in self._added.items() if re.fullmatch(r"<[|\uff5c].+[|\uff5c]>", name)}
        self._control_ids = special | shaped
        self._names = _pattern_of(map(self.name_of, self._control_ids))
        self._names_in_answers = _pattern_of(map(self.name_of, special))
        """A completion that is rendered again keeps tool calls in tokens that are not flagged as special."""
        self._results: ToolResults | None = None
        self.stops = find_stops(self, files)
        self._end_ids = self._control_ids | set(self.stops.token_ids)
        if tokenizer.chat_template:
            self._results = ToolResults(self)

    @property
    def eos_token(self) -> str:
        """Returns the token that ends a completion: the chat template's, else the tokenizer's."""
        ends = self.stops.token_ids
        return self.tokenizer.decode([ends[0]]) if ends else ""

    @cached_property
    def longest_token(self) -> int:
        """Returns the length of the longest token in characters. A text has at least its length over this in tokens."""
        return max(map(len, self.tokenizer.get_vocab()))

    @cached_property
    def shows_later_system_messages(self) -> bool:
        """Returns whether the chat template shows a system message that is not the first message."""
        try:
            return REPLY in self.chat_text([QUESTION, {"role": "system", "content": REPLY}, QUESTION])
        except Exception:  # a template is a program and may raise anything
            return False

    def has_embedding(self, token_id: int) -> bool:
        """Returns whether the model has the token. True if the model's vocabulary is unknown."""
        return self.vocab_size is None or token_id < self.vocab_size

    def name_of(self, token_id: int) -> str:
        """Returns the text of a token."""
        return self._added.get(token_id) or str(self.tokenizer.decode([token_id]))

    def control_ids(self, text: str) -> list[int]:
        """Returns the ids of the control tokens in a text, in order."""
        return [token_id for token_id in self._encode_text(text) if token_id in self._control_ids]

    def neutral(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Returns messages with a `BREAK` in the names of special tokens, unless the configuration allows the names."""
        if self.spec.allow_special_tokens_in_content:
            return list(messages)
        return [
            {key: value if key == "role" else _with_breaks(value, names) for key, value in message.items()}
            for message in messages
            for names in [self._names_in_answers if message.get("role") == "assistant" else self._names]
        ]

    def prompt_text(self, environment: Any, prompt: Any) -> str:
        """Returns a prompt's text from the environment's `format_prompt`."""
        tokenizer = self.tokenizer
        options: dict[str, Any] = {"enable_thinking": self.spec.enable_thinking}
        if environment.uses_chat_template:
            self._require_template()
            tokenizer = copy.copy(tokenizer)
            tokenizer.apply_chat_template = self._apply_chat_template
        if "enable_thinking" not in inspect.signature(environment.format_prompt).parameters:
            options = {"chat_template_kwargs": options}
        text = call_with_declared(environment.format_prompt, prompt, tokenizer, **options)
        if not isinstance(text, str):
            raise TypeError(f"format_prompt returned {type(text).__name__}, not a string")
        return text

    def _apply_chat_template(self, conversation: Any, *arguments: Any, tokenize: bool = True, **options: Any) -> Any:
        """Replaces the tokenizer's method in `format_prompt`. Puts breaks into text that it renders."""
        if not tokenize:
            conversation = self.neutral(serialize_messages(conversation, "build_messages"))
        options = {**self._clock, **options}
        return self.tokenizer.apply_chat_template(conversation, *arguments, tokenize=tokenize, **options)

    def chat_text(self, messages: Sequence[ChatMessage], tools: list[dict[str, Any]] | None = None) -> str:
        """Renders a conversation, with tool schemas, up to the start of the model's next completion.

        The text has breaks (`BREAK`).
        """
        self._require_template()
        return self.render(messages, tools, add_generation_prompt=True)

    def _require_template(self) -> None:
        if not self.tokenizer.chat_template:
            raise UserError(f"The tokenizer of {self.spec.tokenizer_path!r} {NO_TEMPLATE}")

    def render(
        self, messages: Sequence[ChatMessage], tools: list[dict[str, Any]] | None = None, *, add_generation_prompt: bool
    ) -> str:
        """Renders a conversation, with breaks (`BREAK`)."""

        def render(messages: Sequence[ChatMessage]) -> str:
            return self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=self.spec.enable_thinking,
                **self._clock,
                **({"tools": tools} if tools else {}),
            )

        shown = self.neutral(with_channels_as_fields(messages, str(self.tokenizer.chat_template)))
        return self._results.render(shown, render) if self._results else render(shown)

    def encode_continuation(self, text: str) -> list[int]:
        """Returns the token ids of a text that follows other text.

        Omits special tokens, and the space that some tokenizers add before a text.
        """
        return self._with_embeddings([token_id for piece in text.split(BREAK) for token_id in self._continued(piece)])

    def _continued(self, piece: str) -> list[int]:
        anchor, anchored = (self._encode_text(start) for start in (CONTINUATION_ANCHOR, CONTINUATION_ANCHOR + piece))
        return anchored[len(anchor) :] if anchored[: len(anchor)] == anchor else self._encode_text(piece)

    def _encode_text(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _with_embeddings(self, ids: list[int]) -> list[int]:
        """Returns the ids if the model has all of them."""
        missing = next((token_id for token_id in ids if not self.has_embedding(token_id)), None)
        if missing is not None:
            raise TokenOutsideVocabularyError(
                f"the prompt has the token {self.name_of(missing)!r} (id {missing}), for which the model "
                f"has no embedding (vocab_size {self.vocab_size})"
            )
        return ids

    def encode(self, text: str, *, from_template: bool) -> list[int]:
        """Returns a prompt's token ids. Raises `TokenOutsideVocabularyError`."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        written = from_template or (self.tokenizer.bos_token and text.startswith(self.tokenizer.bos_token))
        first, *rest = text.split(BREAK)
        ids = self._encode_text(first, add_special_tokens=not written)
        if not written and eos is not None and ids and ids[-1] == eos and not text.endswith(self.tokenizer.eos_token):
            ids.pop()  # some tokenizers append EOS to every text; a prompt must not have it
        while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            ids.pop(0)
        return self._with_embeddings([*ids, *(token_id for piece in rest for token_id in self._continued(piece))])

    def decode(self, token_ids: Sequence[int], *, cut_end_token: bool) -> str:
        """Returns a completion's text. `cut_end_token` removes the end token of a completion that the model ended."""
        texts = self.stops.texts if cut_end_token else ()
        if cut_end_token and token_ids and token_ids[-1] in self._end_ids:
            token_ids, texts = token_ids[:-1], ()
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text[: min((text.index(end) for end in texts if end in text), default=len(text))]


def _load(spec: RendererSpec) -> tuple[Any, dict[str, Mapping[str, Any]]]:
    """Loads a tokenizer, and the model's files that name its end tokens and its vocabulary size."""
    from telescope.rollout.tokenizer_files import load_tokenizer, model_folder, read_json  # `tokenizers` is of `train`

    name = spec.tokenizer_path
    try:
        folder = model_folder(name)
        files = {file: read_json(folder / file) for file in ("generation_config.json", "config.json")}
        tokenizer = load_tokenizer(name, folder, trust_remote_code=spec.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"The tokenizer of {name!r} cannot be loaded: {error}") from error
    return tokenizer, {file: values | (values.get("text_config") or {}) for file, values in files.items()}


def _pattern_of(names: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that matches the first character of each name, also of overlapping names."""
    rests: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        if len(name) > 1:
            rests[name[0]].append(re.escape(name[1:]))
    starts = [f"{re.escape(start)}(?={'|'.join(ends)})" for start, ends in rests.items()]
    return re.compile("|".join(starts) or "(?!)")


def _with_breaks(value: Any, names: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        # A template string would be looked up by a pattern that is slow to hash.
        return names.sub(lambda name: name[0] + BREAK, value)
    if isinstance(value, dict):
        return {key: _with_breaks(each, names) for key, each in value.items()}
    return [_with_breaks(each, names) for each in value] if isinstance(value, list) else value


def without_breaks(text: str) -> str:
    """Returns a rendered text without breaks, as the model reads it."""
    return text.replace(BREAK, "")


class Divergence(StrEnum):
    """How a conversation differs from the chat template's rendering. See the module docstring."""

    WHITESPACE = "whitespace"
    END_TOKEN = "end_token"
    PROMPT_START = "prompt_start"
    HISTORY = "history"


@dataclass(slots=True, frozen=True)
class Extension:
    """The token ids between a completion and the next one. With `restarts`, the whole next prompt."""

    token_ids: list[int]
    restarts: bool = False
    divergence: Divergence | None = None


@dataclass(eq=False)
class Dialogue:
    """One conversation. `interleaved` False renders every prompt from the start (`interleaved_rollouts: false`).

    With `thinking_prefix` every prompt ends with `<think>`; `opening` is this prefix, which belongs to the completion.
    """

    renderer: Renderer
    _: KW_ONLY
    interleaved: bool = True
    thinking_prefix: bool = False
    tools: list[dict[str, Any]] | None = None
    opening: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._kept: str | tuple[Dialogue, int, str] = ""
        """Text of the model's last prompt, or a dialogue, the length of their common beginning, and the rest."""
        self._turn: tuple[int, list[int]] = (0, [])
        """Where the last turn begins in the rendered text of the last prompt, and its token ids."""

    @property
    def opened(self) -> str:
        """Returns the tag that opens reasoning at the end of the last prompt, if there is one."""
        return opening_tag(self._shown)

    @property
    def _shown(self) -> str:
        """Returns the text of the model's last prompt."""
        kept, ends = self._kept, []
        while not isinstance(kept, str):
            longer, length, rest = kept
            ends.append((length, rest))
            kept = longer._kept
        for length, rest in reversed(ends):
            kept = kept[:length] + rest
        return kept

    def keep_in(self, longer: Dialogue) -> None:
        """Keeps its text as the beginning of a longer one, so that a conversation of many turns has its text once."""
        length = num_equal(self._shown, longer._shown)
        self._kept = longer, length, self._shown[length:]

    def branch(self) -> Dialogue:
        """Returns an independent copy, for another completion of the same prompt."""
        return copy.copy(self)  # a shallow copy is enough: fields are replaced, never modified

    def begin(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Starts the conversation. Returns the token ids of the first prompt."""
        self._messages = list(messages)
        text = self._text(self._messages)
        prompt = with_thinking_prefix(text) if self.thinking_prefix else text
        self.opening = prompt[len(text) :]
        self._kept = without_breaks(prompt)
        self._turn = (len(prompt), [])
        return self.renderer.encode(prompt, from_template=True)

    def extend(
        self, answer: str, answer_token_ids: Sequence[int], messages: Sequence[ChatMessage], *, ended: bool
    ) -> Extension:
        """Returns the token ids after the model's last completion in the next prompt.

        `answer` is that completion decoded without its end token, `answer_token_ids` are its sampled ids, `ended` is
        whether the model ended it. `messages` are the whole conversation of the next prompt. Raises errors of the
        template.
        """
        position = len(self._messages)
        spoken = [*self._messages, assistant_message(self.opening + answer)]
        self._messages = list(messages)
        if not self.interleaved:
            return self._restart(None)
        if self._messages[: position + 1] != spoken:
            return self._restart(Divergence.HISTORY)
        before, found, behind = self._around_answer(position)
        if not found:
            return self._restart(Divergence.HISTORY)
        divergence: Divergence | None = None
        unclosed = "" if ended else closing_tag(self.opening + answer, self.opened)
        token_ids = self.renderer.encode_continuation(unclosed + behind.removeprefix(unclosed))
        if ended and answer_token_ids:
            end = self.renderer.decode(answer_token_ids, cut_end_token=False)[len(answer) :]
            if token_ids[:1] == [answer_token_ids[-1]]:
                token_ids = token_ids[1:]
            elif end and behind.startswith(end):  # a stop text ended the completion
                token_ids = self.renderer.encode_continuation(behind[len(end) :])
            else:
                divergence = Divergence.END_TOKEN
        turn_ids = [*answer_token_ids, *token_ids]
        turn = len(before)
        written = before + answer + behind
        if (before := without_breaks(before)) != self._shown:
            turn -= max(0, len(before) - len(self._shown))  # text that the template writes only in the history
            sent = self._shown + answer + without_breaks(behind)
            # The completion's reasoning may equal what the template writes before one without reasoning.
            is_plain = _same(before, self._shown) or strip_think_tags(answer) == answer
            rendered = written if is_plain else self._text(self._messages) + self.opening
            if not _same(without_breaks(rendered), sent):
                is_start = self._shown.startswith(before.rstrip()) or before.startswith(self._shown.rstrip())
                divergence = Divergence.PROMPT_START if is_start else Divergence.HISTORY
            else:
                written = rendered
                # These texts may have equal tokens: some tokenizers merge a space into the first token.
                start, ids = self._turn
                is_other = without_breaks(rendered) != sent
                if is_other and self.renderer.encode_continuation(rendered[start:]) != [*ids, *turn_ids]:
                    divergence = divergence or Divergence.WHITESPACE
        self._kept, self._turn = without_breaks(written), (turn, turn_ids)
        return Extension(token_ids, divergence=divergence)

    def _text(self, messages: Sequence[ChatMessage]) -> str:
        return self.renderer.chat_text(messages, **({"tools": self.tools} if self.tools else {}))

    def _restart(self, divergence: Divergence | None) -> Extension:
        return Extension(self.begin(self._messages), restarts=True, divergence=divergence)

    def _around_answer(self, position: int) -> tuple[str, str, str]:
        """Returns the rendered text before the completion at `position`, its placeholder, and the text after it."""
        messages = list(self._messages)
        messages[position] = {**messages[position], "content": self.opening + ANSWER}
        before, found, behind = (self._text(messages) + self.opening).rpartition(ANSWER)
        return before, found, behind.removeprefix('"')  # with_channels_as_fields: the completion is a JSON string


def _same(text: str, other: str) -> bool:
    """Compares two texts, ignoring white space."""
    start = num_equal(text, other)
    # Long conversations mostly differ near their first difference, so the whole texts are rarely split.
    for stop in (start + 1_000, None):
        own, its = ("".join(each[start:stop].split()) for each in (text, other))
        if not (own.startswith(its) or its.startswith(own)):
            return False
    return own == its


def lost_message(
    renderer: Renderer, messages: Sequence[ChatMessage], tools: list[dict[str, Any]] | None = None
) -> str | None:
    """Returns the message that never reaches the model. None if all do. Raises errors of the template.

    Skips completions when there are `tools` or a result follows, because a template may write a call in another form.
    """
    marks = {
        i: f"0telescope{i}message0"
        for i, (message, following) in enumerate(zip(messages, [*messages[1:], {}], strict=True))
        if message.get("content")
        and not (message["role"] == "assistant" and (tools or following.get("role") == "tool"))
    }
    text = renderer.chat_text([{**m, "content": marks.get(i, m.get("content"))} for i, m in enumerate(messages)], tools)
    for i, mark in marks.items():
        if mark not in text:
            return f"the message of {messages[i]['role']!r} (message {i + 1} of {len(messages)})"
    return None
