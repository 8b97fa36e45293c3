"""Prompts to token ids and completions to text, with a Hugging Face tokenizer.

Used inside worker processes. Owns the rules about special tokens: a text that a chat template made already holds its
own, a raw text gets the tokenizer's, and no prompt begins with two beginning-of-sequence tokens or ends with an
end-of-sequence token that nobody wrote.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from telescope.environments.base import ChatMessage
from telescope.environments.records import RendererSpec
from telescope.errors import UserError

CONTINUATION_ANCHOR = "0"
"""What a continuation is tokenised behind: a character that merges with nothing which a template writes next."""


class Renderer:
    """A tokenizer and the options for its chat template. transformers is imported here and nowhere else."""

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
        """The text of a prompt, made by the environment's `format_prompt`, which may be the user's own."""
        if environment.uses_chat_template and not self.tokenizer.chat_template:
            raise UserError(
                f"The tokenizer of {self.spec.tokenizer_path!r} has no chat template. Set chat_template in the "
                "configuration, or use a model that was tuned for chat."
            )
        function = environment.format_prompt
        parameters = inspect.signature(function).parameters
        takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        options = {}
        if takes_rest or "enable_thinking" in parameters:
            options["enable_thinking"] = self.spec.enable_thinking
        text = function(prompt, self.tokenizer, **options)
        if not isinstance(text, str):
            raise TypeError(f"format_prompt returned {type(text).__name__}, not a string")
        return text

    def chat_text(self, messages: Sequence[ChatMessage]) -> str:
        """A conversation as the chat template writes it, up to the start of the model's next answer."""
        if not self.tokenizer.chat_template:
            raise UserError(
                f"The tokenizer of {self.spec.tokenizer_path!r} has no chat template. Set chat_template in the "
                "configuration, or use a model that was tuned for chat."
            )
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, enable_thinking=self.spec.enable_thinking
        )
        return text

    def encode_continuation(self, text: str) -> list[int]:
        """Token ids of a text that follows other text: without special tokens of its own, and without the space that
        some tokenizers put before a text."""
        anchor, anchored = (self._encode_plain(start) for start in (CONTINUATION_ANCHOR, CONTINUATION_ANCHOR + text))
        return anchored[len(anchor) :] if anchored[: len(anchor)] == anchor else self._encode_plain(text)

    def _encode_plain(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode(self, text: str, *, from_template: bool) -> list[int]:
        """Token ids of a prompt."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        written = from_template or (self.tokenizer.bos_token and text.startswith(self.tokenizer.bos_token))
        ids = list(self.tokenizer(text, add_special_tokens=not written)["input_ids"])
        if not written and eos is not None and ids and ids[-1] == eos and not text.endswith(self.eos_token):
            ids.pop()  # some tokenizers close every text, and a prompt is not closed
        while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            ids.pop(0)
        return ids

    def decode(self, token_ids: Sequence[int], *, cut_end_token: bool) -> str:
        """Text of a completion, without the special token that closes it when `cut_end_token`."""
        if token_ids and cut_end_token and token_ids[-1] in self._special_ids:
            token_ids = token_ids[:-1]
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
