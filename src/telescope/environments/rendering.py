"""Renders prompts and decodes completions with a Hugging Face tokenizer.

Used inside worker processes. Owns the rules about special tokens: text from a chat template already contains its own,
raw text gets the tokenizer's, and no prompt begins with two beginning-of-sequence tokens or ends with an
end-of-sequence token that the tokenizer added.

`Dialogue` owns the joins between turns. The sampled ids of an answer are kept as they are. The template renders the
conversation up to the next prompt, and the text behind the answer is tokenized separately and appended: the end of the
answer (if the model has not sampled it), the environment's messages, and the start of the next answer. So the ids of
earlier turns are never made from text again, and a join adds no newline and no second beginning-of-sequence token.

Each turn checks that the conversation so far is a prefix of what the template renders. If not, the join has a
`Divergence`, which is counted for the trajectory:

- `whitespace`: the template trims or pads an answer. The sampled ids are kept; the conversation differs in spaces.
- `end_token`: the model ended with another token than the template puts behind an answer. Both stay.
- `prompt_start` and `history`: the template starts an answer differently in the history than in a prompt, or changes
  earlier messages (mostly by removing reasoning); or the environment changes them. Nothing can be appended, so the
  whole next prompt is rendered (`restarts`), and the turns so far are a separate training sample.
  `why_not_extendable` detects at the start whether a template always does so.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from telescope.environments.base import ChatMessage, assistant_message, with_thinking_prefix
from telescope.environments.parsers import opens_reasoning
from telescope.environments.tool_template import with_channels_as_fields
from telescope.environments.worker_pool.messages import RendererSpec
from telescope.errors import UserError

CONTINUATION_ANCHOR = "0"
"""Prefix for tokenizing a continuation: a character that merges with nothing that a template writes next."""


class Renderer:
    """A tokenizer and the options of its chat template. The only place of this package that imports transformers."""

    def __init__(self, spec: RendererSpec) -> None:
        from transformers import AutoTokenizer

        self.spec = spec
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                spec.tokenizer_path, trust_remote_code=spec.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise UserError(f"The tokenizer of {spec.tokenizer_path!r} cannot be loaded: {error}") from error
        if spec.chat_template is not None:
            self.tokenizer.chat_template = spec.chat_template
        self._special_ids = frozenset(self.tokenizer.all_special_ids)

    @property
    def eos_token(self) -> str:
        return self.tokenizer.eos_token or ""

    def prompt_text(self, environment: Any, prompt: Any) -> str:
        """Returns the text of a prompt, from the environment's `format_prompt`."""
        if environment.uses_chat_template and not self.tokenizer.chat_template:
            raise UserError(
                f"The tokenizer of {self.spec.tokenizer_path!r} has no chat template. Set chat_template in the "
                "configuration, or use a chat model."
            )
        function = environment.format_prompt
        parameters = inspect.signature(function).parameters
        takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        options: dict[str, Any] = {}
        if takes_rest or "chat_template_kwargs" in parameters:
            options["chat_template_kwargs"] = {"enable_thinking": self.spec.enable_thinking}
        elif "enable_thinking" in parameters:
            options["enable_thinking"] = self.spec.enable_thinking
        text = function(prompt, self.tokenizer, **options)
        if not isinstance(text, str):
            raise TypeError(f"format_prompt returned {type(text).__name__}, not a string")
        return text

    def chat_text(self, messages: Sequence[ChatMessage], tools: list[dict[str, Any]] | None = None) -> str:
        """Renders a conversation, with the schemas of tools, up to the start of the model's next answer."""
        if not self.tokenizer.chat_template:
            raise UserError(
                f"The tokenizer of {self.spec.tokenizer_path!r} has no chat template. Set chat_template in the "
                "configuration, or use a chat model."
            )
        text: str = self.tokenizer.apply_chat_template(
            with_channels_as_fields(messages, str(self.tokenizer.chat_template)),
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=self.spec.enable_thinking,
            **({"tools": tools} if tools else {}),
        )
        return text

    def encode_continuation(self, text: str) -> list[int]:
        """Returns token ids of a text that follows other text.

        They contain no special tokens, and not the space that some tokenizers add before a text.
        """
        anchor, anchored = (self._encode_text(start) for start in (CONTINUATION_ANCHOR, CONTINUATION_ANCHOR + text))
        return anchored[len(anchor) :] if anchored[: len(anchor)] == anchor else self._encode_text(text)

    def _encode_text(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode(self, text: str, *, from_template: bool) -> list[int]:
        """Returns token ids of a prompt."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        written = from_template or (self.tokenizer.bos_token and text.startswith(self.tokenizer.bos_token))
        ids = list(self.tokenizer(text, add_special_tokens=not written)["input_ids"])
        if not written and eos is not None and ids and ids[-1] == eos and not text.endswith(self.eos_token):
            ids.pop()  # some tokenizers end every text with EOS; a prompt must not end
        while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            ids.pop(0)
        return ids

    def decode(self, token_ids: Sequence[int], *, cut_end_token: bool) -> str:
        """Returns the text of a completion. `cut_end_token` removes a special token at its end."""
        if token_ids and cut_end_token and token_ids[-1] in self._special_ids:
            token_ids = token_ids[:-1]
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


PLACEHOLDER = "0telescope0answer0"
"""Stands for the last answer while the template is rendered: text that no template trims, splits or parses."""


class Divergence(StrEnum):
    """How a conversation differs from the chat template's rendering. See the module docstring."""

    WHITESPACE = "whitespace"
    END_TOKEN = "end_token"
    PROMPT_START = "prompt_start"
    HISTORY = "history"


@dataclass(slots=True, frozen=True)
class Extension:
    """Token ids that follow an answer in the next prompt. With `restarts`, the whole next prompt."""

    token_ids: list[int]
    restarts: bool = False
    divergence: Divergence | None = None


class Dialogue:
    """One conversation. `interleaved` False renders every prompt from the start (`interleaved_rollouts: false`).

    With `thinking_prefix` every prompt ends with an opening `<think>`; `opening` is that part of the answer.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        interleaved: bool = True,
        thinking_prefix: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> None:
        self._renderer = renderer
        self._tools = tools
        self._interleaved = interleaved
        self._thinking_prefix = thinking_prefix
        self.opening = ""
        self._messages: list[ChatMessage] = []
        self._ids = array("i")
        """Token ids of the model's last prompt."""
        self._shown = ""
        """Text of the model's last prompt."""
        self._last_answer: tuple[str, str] | None = None
        """The answer before the prompt's end, and the text that followed it."""

    @property
    def reasoning_is_open(self) -> bool:
        """Returns whether the model's last prompt ended with a tag that opens reasoning."""
        return opens_reasoning(self._shown)

    def begin(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Starts the conversation. Returns the token ids of the first prompt."""
        self._messages = list(messages)
        text = self._text(self._messages)
        self._shown = with_thinking_prefix(text) if self._thinking_prefix else text
        self.opening = self._shown[len(text) :]
        self._last_answer = None
        ids = self._renderer.encode(self._shown, from_template=True)
        self._ids = array("i", ids)
        return ids

    def extend(
        self, answer: str, answer_token_ids: Sequence[int], messages: Sequence[ChatMessage], *, ended: bool
    ) -> Extension:
        """Returns what follows the model's last answer in the next prompt.

        `answer` is that answer decoded without its end token, `answer_token_ids` are the sampled ids, `ended` is
        whether the model ended it itself; `messages` are the whole conversation of the next prompt. Raises errors of
        the template.
        """
        position = len(self._messages)
        spoken = [*self._messages, assistant_message(self.opening + answer)]
        self._messages = list(messages)
        if not self._interleaved:
            return self._restart(None)
        if self._messages[: position + 1] != spoken:
            return self._restart(Divergence.HISTORY)
        before, behind = self._around_answer(position)
        if before != self._shown and not _same_but_for_edges(before, self._shown, self._last_answer):
            is_start = self._shown.startswith(before.rstrip())
            return self._restart(Divergence.PROMPT_START if is_start else Divergence.HISTORY)
        divergence: Divergence | None = None
        token_ids = self._renderer.encode_continuation(behind)
        if ended and answer_token_ids:
            if token_ids[:1] == [answer_token_ids[-1]]:
                token_ids = token_ids[1:]
            else:
                divergence = Divergence.END_TOKEN
        self._ids.extend(answer_token_ids)
        self._ids.extend(token_ids)
        written = before + answer + behind
        # Texts that differ in spaces may have equal tokens: some tokenizers merge a space into the first token.
        if before != self._shown and self._renderer.encode(written, from_template=True) != self._ids.tolist():
            divergence = divergence or Divergence.WHITESPACE
        self._shown, self._last_answer = written, (answer, behind)
        return Extension(token_ids, divergence=divergence)

    def _text(self, messages: Sequence[ChatMessage]) -> str:
        return self._renderer.chat_text(messages, **({"tools": self._tools} if self._tools else {}))

    def _restart(self, divergence: Divergence | None) -> Extension:
        return Extension(self.begin(self._messages), restarts=True, divergence=divergence)

    def _around_answer(self, position: int) -> tuple[str, str]:
        """Returns the template's text before and after the answer at `position`."""
        messages = list(self._messages)
        messages[position] = {**messages[position], "content": self.opening + PLACEHOLDER}
        before, _, behind = (self._text(messages) + self.opening).rpartition(PLACEHOLDER)
        return before, behind


def _same_but_for_edges(now: str, shown: str, last_answer: tuple[str, str] | None) -> bool:
    """Compares two texts, ignoring white space around the last answer."""
    now, shown = now.rstrip(), shown.rstrip()
    if now == shown:
        return True
    if last_answer is None:
        return False
    answer, behind = last_answer
    behind = behind.rstrip()
    if not now.endswith(behind):
        return False
    head = shown.removesuffix(behind).removesuffix(answer).rstrip()
    middle = now.removesuffix(behind)
    return middle.startswith(head) and middle.removeprefix(head).strip() == answer.strip()


def why_not_extendable(
    renderer: Renderer, *, reply_role: str = "user", tools: list[dict[str, Any]] | None = None, call: str = "One."
) -> str | None:
    """Returns why the chat template's conversations cannot be extended token by token. None if they can.

    Tries a conversation in which the model reasons in `<think>` tags before it answers or writes a `call` of one
    of the `tools`, and `reply_role` replies.
    Raises the template's error when it rejects such messages.
    """
    dialogue = Dialogue(renderer, tools=tools)
    messages: list[ChatMessage] = [{"role": "user", "content": "Choose a number."}]
    dialogue.begin(messages)
    for answer, reply in ((f"<think>\nOne.\n</think>\n\n{call}", "Another."), (call, "And another.")):
        messages = [*messages, {"role": "assistant", "content": answer}, {"role": reply_role, "content": reply}]
        extension = dialogue.extend(answer, [], messages, ended=False)
        if extension.divergence is Divergence.PROMPT_START:
            return "it starts an answer differently in the history than in a prompt"
        if extension.restarts:
            return "it rewrites earlier answers of a conversation (it removes reasoning from the history)"
    return None
