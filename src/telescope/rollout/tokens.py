"""Token ids and chat templates without transformers.

A `Tokenizer` encodes with the library `tokenizers` and renders chat templates with jinja2. Ids and texts equal those of
transformers, which takes a hundred times as long to load. It is loaded only when user code asks a `Tokenizer` for more
than it has; the log names the attribute and the line of code.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from telescope.config.chat_template import compile_template

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
RENDER_OPTIONS = ("continue_final_message", "padding", "truncation", "max_length", "return_tensors",
                  "return_assistant_tokens_mask", "tokenizer_kwargs")  # fmt: skip
"""Options of `apply_chat_template` that only transformers implements."""

_compiled = lru_cache(maxsize=16)(compile_template)


def added_token(token: Any, **fields: Any) -> AddedToken:
    """Returns a token from its text or fields in a file."""
    written = {"content": token, "special": True} if isinstance(token, str) else token
    return AddedToken(**{key: value for key, value in written.items() if key != "__type"} | fields)


class Encoding(dict[str, Any]):
    """Token ids and attention mask, as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class Tokenizer:
    """A tokenizer with the part of transformers' interface that prompt code uses.

    It has ids, texts, templates and special tokens. For anything else the transformers tokenizer is loaded. Its
    vocabulary is a copy: tokens added there are not added here.
    """

    def __init__(
        self, name: str, raw: tokenizers.Tokenizer, settings: Mapping[str, Any], with_transformers: Callable[[], Any]
    ) -> None:
        self.name_or_path = name
        self.backend_tokenizer = raw
        self.chat_template: str | dict[str, str] | None = settings.get("chat_template")
        self.clean_up_tokenization_spaces: bool = settings.get("clean_up_tokenization_spaces", False)
        extra = settings["extra_special_tokens"]
        by_name = extra if isinstance(extra, Mapping) else {}
        written = sorted(settings.items(), key=lambda item: isinstance(item[1], str))  # tokens are added in this order
        named = {
            **dict.fromkeys(SPECIAL_TOKENS),
            "pad_token": (raw.padding or {}).get("pad_token"),
            **dict(written),
            **by_name,
        }
        tokens = {
            key: added_token(value, special=True)
            for key, value in named.items()
            if key.endswith("_token") and isinstance(value, str | Mapping)
        }
        self._attributes = [*dict.fromkeys((*SPECIAL_TOKENS, *tokens))]
        for key in self._attributes:
            setattr(self, key, tokens[key].content if key in tokens else None)
        extras = [] if by_name else [added_token(token) for token in extra]
        self.extra_special_tokens = [token.content for token in extras]
        self._add_missing(settings.get("added_tokens_decoder", {}), [*tokens.values(), *extras])
        raw.no_padding()
        raw.no_truncation()
        raw.encode_special_tokens = settings.get("split_special_tokens", False)
        self._with_transformers = with_transformers
        self._loaded: list[Any] = []
        """The transformers tokenizer, once it is loaded. A list, because copies of this object share it."""

    def _add_missing(self, declared: Mapping[str, Any], special: Sequence[AddedToken]) -> None:
        """Adds the tokens of tokenizer_config.json that tokenizer.json lacks."""
        written = self.added_tokens_decoder.values()
        names, versions = {token.content for token in written}, {repr(token) for token in written}
        listed = [added_token(token) for _, token in sorted(declared.items(), key=lambda item: int(item[0]))]
        listed = [token for token in listed if repr(token) not in versions]
        for token in listed:
            token.special = token.special or token.content in self.special_tokens_map.values()
        names |= {token.content for token in listed}
        self.backend_tokenizer.add_tokens([*listed, *(token for token in special if token.content not in names)])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name.removesuffix("_id") in self._attributes:
            token = getattr(self, name.removesuffix("_id"))
            return None if token is None else self.convert_tokens_to_ids(token)
        return getattr(self._transformers(name), name)

    def _transformers(self, asked: str) -> Any:
        """Returns the transformers tokenizer. Loads it on first use and logs which attribute and line asked for it."""
        if not self._loaded:
            frame = sys._getframe(1)
            while frame.f_code.co_filename == __file__ and frame.f_back:
                frame = frame.f_back
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            logger.warning(
                f"{frame.f_code.co_name} ({place}) asks the tokenizer for {asked}, which only transformers has: "
                "loading it takes seconds and 350 MiB in each process."
            )
            self._loaded.append(self._with_transformers())
        for name in ("chat_template", *self._attributes):
            setattr(self._loaded[0], name, getattr(self, name))
        return self._loaded[0]

    def __call__(self, text: str | Sequence[str], *rest: Any, add_special_tokens: bool = True, **options: Any) -> Any:
        """Returns token ids and attention mask of a text, or of each of several texts."""
        if rest or options:
            full = self._transformers("more than ids and attention mask of a text")
            return full(text, *rest, add_special_tokens=add_special_tokens, **options)
        if isinstance(text, str):
            ids = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        each = [self(one, add_special_tokens=add_special_tokens) for one in text]
        return Encoding({key: [one[key] for one in each] for key in ("input_ids", "attention_mask")})

    def encode(self, text: str, *rest: Any, **options: Any) -> Any:
        return self(text, *rest, **options)["input_ids"]

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **_: Any,
    ) -> Any:
        """Returns the text of token ids, or a list of texts for several lists."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if isinstance(ids, Mapping):
            return self.decode(ids["input_ids"], skip_special_tokens, clean_up_tokenization_spaces)
        if isinstance(ids, int):
            ids = [ids]
        if len(ids) and isinstance(ids[0], list | tuple):
            return [self.decode(each, skip_special_tokens, clean_up_tokenization_spaces) for each in ids]
        clean_up = clean_up_tokenization_spaces
        cleans = self.clean_up_tokenization_spaces if clean_up is None else clean_up
        if cleans and not isinstance(self.backend_tokenizer.model, models.BPE):  # transformers ignores it for BPE
            return self._transformers("texts without spaces before punctuation").decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=True
            )
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        *,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        """Renders one or more conversations. Returns text, token ids (`tokenize`), or ids with the mask."""
        functions = [tool for tool in tools or () if not isinstance(tool, dict)]
        if functions or any(variables.get(name) for name in RENDER_OPTIONS):
            full = self._transformers("apply_chat_template with functions as tools or other options than variables")
            return full.apply_chat_template(
                conversation, tools, documents, chat_template, add_generation_prompt,
                tokenize=tokenize, return_dict=return_dict, **variables,
            )  # fmt: skip
        if not conversation:
            raise ValueError("A conversation without a message cannot be rendered.")
        variables = self.special_tokens_map | {k: value for k, value in variables.items() if k not in RENDER_OPTIONS}
        variables |= {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
        template = _compiled(self.get_chat_template(chat_template, tools))
        several = not isinstance(conversation[0], Mapping)
        texts = [template.render(variables, messages=each) for each in (conversation if several else [conversation])]
        if not tokenize:
            return texts if several else texts[0]
        encoding = self(texts if several else texts[0], add_special_tokens=False)
        return encoding if return_dict else encoding["input_ids"]

    def get_chat_template(self, chat_template: str | None = None, tools: Sequence[Any] | None = None) -> str:
        """Returns the given template, or the template of that name, or the tokenizer's."""
        named = self.chat_template if isinstance(self.chat_template, dict) else {"default": self.chat_template}
        name = chat_template or ("tool_use" if tools is not None and "tool_use" in named else "default")
        template = named.get(name) if name in named else chat_template
        if template is None:
            raise ValueError(f"The tokenizer has no chat template {name!r}. Set chat_template.")
        return template

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Returns the id of a token, or of each of several. An unknown token has the id of `unk_token`."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id = self.backend_tokenizer.token_to_id(tokens)
        return self.unk_token_id if token_id is None and tokens != self.unk_token else token_id

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Returns special tokens by name."""
        return {key: token for key in self._attributes if (token := getattr(self, key)) is not None}

    @property
    def all_special_tokens(self) -> list[str]:
        """Returns special tokens, named or not."""
        return [*dict.fromkeys((*self.special_tokens_map.values(), *self.extra_special_tokens))]

    @property
    def all_special_ids(self) -> list[int]:
        """Returns the ids of `all_special_tokens`."""
        return list(self.convert_tokens_to_ids(self.all_special_tokens))

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Returns by id the tokens added to the model's own vocabulary, and how they match text."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def vocab_size(self) -> int:
        """Returns the size of the vocabulary without added tokens."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()
