"""Token ids and chat templates without transformers.

A `Tokenizer` makes ids with the library `tokenizers` and renders chat templates with jinja2. Ids and texts equal those
of transformers, which takes a hundred times as long to load. transformers itself is loaded only

- by `load_tokenizer`, for a model whose tokenizer.json it would not use as it is written (`_defaults_of_class`);
- when user code asks a `Tokenizer` for more than it has. The log names what was asked for, and the line of code.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from telescope.config.chat_template import compile_template

logger = logging.getLogger(__name__)

FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tekken.json",
    "chat_template.jinja", "additional_chat_templates/*.jinja", "config.json", "generation_config.json",
)  # fmt: skip
"""Files of a model that are read here or by a renderer."""

PLAIN_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")
"""Values of `tokenizer_class`, without "Fast", for which transformers uses tokenizer.json as it is written."""
PLAIN_MODELS = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "ernie4_5", "ernie4_5_moe", "flex_olmo", "glm", "glm4", "glm4_moe",
    "glm4_moe_lite", "granite", "granitemoe", "granitemoehybrid", "internlm2", "jamba", "minicpm3", "minimax_m2",
    "ministral", "ministral3", "mistral", "mistral3", "mixtral", "nemotron", "olmo2", "olmo3", "phi3", "phimoe",
    "stablelm",
)  # fmt: skip
"""Values of `model_type` for which it does so whatever the class."""
CLASS_OF_MODEL = {"qwen2": "Qwen2Tokenizer", "hyperclovax_vision_v2": "GPT2Tokenizer"} | dict.fromkeys(
    ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"), "Qwen3_5Tokenizer"
)
"""Values of `model_type` whose class transformers takes whatever `tokenizer_class` says."""
_QWEN_DEFAULTS = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
REBUILT_CLASSES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "Qwen2Tokenizer": ("5270ea7905b4daee", _QWEN_DEFAULTS),
    "Qwen3_5Tokenizer": ("0adadf31de7f2bbc", _QWEN_DEFAULTS),
    "GemmaTokenizer": (
        "a05cabf72554a1bc",
        {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
    ),
}
"""Classes that transformers builds from a vocabulary alone: `pipeline_digest` of the rest, default special tokens."""

BPE_OPTIONS = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
               "ignore_merges")  # fmt: skip
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
UNLIMITED = int(1e30)
"""`model_max_length` of a tokenizer that names none, as in transformers."""
MARKS_BEHIND_SPACES = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""What `clean_up_tokenization_spaces` writes without spaces, in this order."""
RENDER_OPTIONS = ("continue_final_message", "padding", "truncation", "max_length", "return_tensors",
                  "return_assistant_tokens_mask", "tokenizer_kwargs")  # fmt: skip
"""Options of `apply_chat_template`, besides the template's variables, that are left to transformers."""

_compiled = lru_cache(maxsize=16)(compile_template)


def load_tokenizer(name: str, folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Returns a model's tokenizer: a `Tokenizer`, or that of transformers where ids could differ.

    `name` is a folder or hub id, `folder` its `model_folder`. Raises `OSError` or `ValueError`.
    """
    settings = _settings(folder)
    raw = defaults = None
    if (folder / "tokenizer.json").is_file() and "auto_map" not in settings:
        try:
            raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"tokenizer.json: {error}") from error
        defaults = _defaults_of_class(raw, settings, folder)
    if raw is None or defaults is None:
        logger.info(f"The tokenizer of {name} needs transformers, which takes seconds and 350 MiB in each process.")
        return _with_transformers(name, trust_remote_code)
    tokenizer = Tokenizer(name, raw, {**defaults, **settings}, trust_remote_code=trust_remote_code)
    if defaults:  # such a class flags what has a name, whatever the files say
        named = set(tokenizer.all_special_tokens)
        raw.add_special_tokens([token for token in tokenizer.added_tokens_decoder.values() if token.content in named])
    return tokenizer


def model_folder(name: str) -> Path:
    """Returns a folder with the `FILES` of a model, from the hub if it is an id. Raises `OSError` or `ValueError`."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=list(FILES)))


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a file. Empty if there is no such file."""
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _with_transformers(name: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def _settings(folder: Path) -> dict[str, Any]:
    """Returns what the files beside tokenizer.json say. `chat_template` is a text, or texts by name."""
    settings = read_json(folder / "tokenizer_config.json")
    older = {} if "added_tokens_decoder" in settings else read_json(folder / "special_tokens_map.json")
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    settings |= older
    settings["extra_special_tokens"] = extra or older.get("additional_special_tokens") or []
    if isinstance(template := settings.get("chat_template"), list):
        settings["chat_template"] = {each["name"]: each["template"] for each in template}
    files = {file.stem: file for file in folder.glob("additional_chat_templates/*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        templates = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
        settings["chat_template"] = templates["default"] if [*templates] == ["default"] else templates
    return settings


def _defaults_of_class(
    raw: tokenizers.Tokenizer, settings: Mapping[str, Any], folder: Path
) -> Mapping[str, str] | None:
    """Returns the default special tokens of the class that transformers takes. None if it could give other ids.

    Most classes of transformers ignore the normalizer, pre-tokenizer and decoder in tokenizer.json and have their own.
    """
    model_type = str(read_json(folder / "config.json").get("model_type"))
    name = CLASS_OF_MODEL.get(model_type, str(settings.get("tokenizer_class")).removesuffix("Fast"))
    unlisted = {} if "added_tokens_decoder" in settings else read_json(folder / "added_tokens.json")
    if (
        (folder / "tekken.json").exists()
        or any(settings.get(key) for key in ("fast_tokenizer_files", "fix_mistral_regex"))
        or any(raw.token_to_id(token) != token_id for token, token_id in unlisted.items())
    ):
        return None
    if model_type in PLAIN_MODELS or name in PLAIN_CLASSES:
        return {}
    digest, defaults = REBUILT_CLASSES.get(name, (None, {}))
    declared = {
        int(token_id): repr(_added(token)) for token_id, token in settings.get("added_tokens_decoder", {}).items()
    }
    written = {token_id: repr(token) for token_id, token in raw.get_added_tokens_decoder().items()}
    same = pipeline_digest(raw) == digest and declared in ({}, written) and not settings.get("add_prefix_space")
    return defaults if same else None


def pipeline_digest(raw: tokenizers.Tokenizer) -> str:
    """Returns a digest of what decides ids and texts besides the vocabulary."""
    parts = (raw.normalizer, raw.pre_tokenizer, raw.decoder)
    steps = [None if part is None else json.loads(part.__getstate__()) for part in parts]
    if steps[2] and steps[2]["type"] == "ByteLevel":
        steps[2] = "ByteLevel"  # its options concern only what is encoded
    options = [getattr(raw.model, name, None) or None for name in BPE_OPTIONS]
    text = json.dumps([type(raw.model).__name__, steps, options]).replace(', "trim_offsets": true', "")
    return hashlib.sha256(text.replace(', "trim_offsets": false', "").encode()).hexdigest()[:16]


def _added(token: Any, **fields: Any) -> AddedToken:
    """Returns a token from the text or the fields that a file has of it."""
    written = {"content": token, "special": True} if isinstance(token, str) else token
    return AddedToken(**{key: value for key, value in written.items() if key != "__type"} | fields)


class Encoding(dict[str, Any]):
    """Token ids and attention mask, as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class Tokenizer:
    """A tokenizer with what code about prompts uses of one of transformers: ids, texts, templates, special tokens.

    For anything else the transformers tokenizer is loaded. Its vocabulary is a copy: what is added there is not added
    here.
    """

    is_fast = True

    def __init__(
        self, name: str, raw: tokenizers.Tokenizer, settings: Mapping[str, Any], *, trust_remote_code: bool = False
    ) -> None:
        self.name_or_path = name
        self.backend_tokenizer = raw
        self.chat_template: str | dict[str, str] | None = settings.get("chat_template")
        self.model_max_length: int = settings.get("model_max_length") or UNLIMITED
        self.padding_side: str = settings.get("padding_side", "right")
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
            key: _added(value, special=True)
            for key, value in named.items()
            if key.endswith("_token") and isinstance(value, str | Mapping)
        }
        self._attributes = [*dict.fromkeys((*SPECIAL_TOKENS, *tokens))]
        for key in self._attributes:
            setattr(self, key, tokens[key].content if key in tokens else None)
        extras = [] if by_name else [_added(token) for token in extra]
        self.extra_special_tokens = [token.content for token in extras]
        self._add_missing(settings.get("added_tokens_decoder", {}), [*tokens.values(), *extras])
        raw.no_padding()
        raw.no_truncation()
        raw.encode_special_tokens = settings.get("split_special_tokens", False)
        self._trust_remote_code = trust_remote_code
        self._loaded: list[Any] = []
        """The transformers tokenizer, once it is loaded. A list, because copies of this object share it."""

    def _add_missing(self, declared: Mapping[str, Any], special: Sequence[AddedToken]) -> None:
        """Adds tokens that tokenizer_config.json has and tokenizer.json lacks."""
        written = self.added_tokens_decoder.values()
        names, versions = {token.content for token in written}, {repr(token) for token in written}
        listed = [_added(token) for _, token in sorted(declared.items(), key=lambda item: int(item[0]))]
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
        """Returns the transformers tokenizer. The first time it is loaded, and the log says for what and for whom."""
        if not self._loaded:
            frame = sys._getframe(1)
            while frame.f_code.co_filename == __file__ and frame.f_back:
                frame = frame.f_back
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            logger.warning(
                f"{frame.f_code.co_name} ({place}) asks the tokenizer for {asked}, which only transformers has: "
                "loading it takes seconds and 350 MiB in each process."
            )
            self._loaded.append(_with_transformers(self.name_or_path, self._trust_remote_code))
        for name in ("chat_template", *self._attributes):
            setattr(self._loaded[0], name, getattr(self, name))
        return self._loaded[0]

    def __call__(self, text: str | Sequence[str], *rest: Any, add_special_tokens: bool = True, **options: Any) -> Any:
        """Returns token ids and attention mask of a text, or of each of several."""
        if rest or options:
            full = self._transformers("more than ids and attention mask of a text")
            return full(text, *rest, add_special_tokens=add_special_tokens, **options)
        if isinstance(text, str):
            ids = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        each = [self(one, add_special_tokens=add_special_tokens) for one in text]
        return Encoding({key: [one[key] for one in each] for key in ("input_ids", "attention_mask")})

    def encode(self, text: str, *rest: Any, **options: Any) -> Any:
        """Returns the token ids of a text."""
        return self(text, *rest, **options)["input_ids"]

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[str]:
        """Returns the tokens of a text as the vocabulary has them."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).tokens)

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **_: Any,
    ) -> Any:
        """Returns the text of token ids, or each text of several lists."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if isinstance(ids, Mapping):
            return self.decode(ids["input_ids"], skip_special_tokens, clean_up_tokenization_spaces)
        if isinstance(ids, int):
            ids = [ids]
        if len(ids) and isinstance(ids[0], list | tuple):
            return [self.decode(each, skip_special_tokens, clean_up_tokenization_spaces) for each in ids]
        text: str = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        clean_up = clean_up_tokenization_spaces
        if self.clean_up_tokenization_spaces if clean_up is None else clean_up:
            # transformers leaves texts of BPE alone, whatever its option says: this would change them.
            is_bpe = isinstance(self.backend_tokenizer.model, tokenizers.models.BPE)
            for mark in () if is_bpe else MARKS_BEHIND_SPACES:
                text = text.replace(mark, mark.strip())
        return text

    def batch_decode(self, sequences: Any, *arguments: Any, **options: Any) -> list[str]:
        """Returns the text of each list of token ids."""
        texts = self.decode(sequences, *arguments, **options)
        return [texts] if isinstance(texts, str) else texts

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
        """Renders a conversation or several. Returns the text, its token ids (`tokenize`), or these with the mask."""
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
        """Returns the template for a conversation: the given one, or the one of its name, or the tokenizer's."""
        named = self.chat_template if isinstance(self.chat_template, dict) else {"default": self.chat_template}
        name = chat_template or ("tool_use" if tools is not None and "tool_use" in named else "default")
        template = named.get(name) if name in named else chat_template
        if template is None:
            raise ValueError(f"The tokenizer has no chat template {name!r}. Set chat_template.")
        return template

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Returns the id of a token, or of each of several; that of `unk_token` for what is none."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id = self.backend_tokenizer.token_to_id(tokens)
        return self.unk_token_id if token_id is None and tokens != self.unk_token else token_id

    def convert_ids_to_tokens(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> Any:
        """Returns the token of an id, or of each of several."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        skipped = self.all_special_ids if skip_special_tokens else ()
        return [self.backend_tokenizer.id_to_token(int(token_id)) for token_id in ids if token_id not in skipped]

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Special tokens by name."""
        return {key: token for key in self._attributes if (token := getattr(self, key)) is not None}

    @property
    def all_special_tokens(self) -> list[str]:
        """Special tokens with and without a name."""
        return [*dict.fromkeys((*self.special_tokens_map.values(), *self.extra_special_tokens))]

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of `all_special_tokens`."""
        return list(self.convert_tokens_to_ids(self.all_special_tokens))

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Tokens beside those of the model's own vocabulary, and how they are found in a text."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, without those that were added to it."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def get_vocab(self) -> dict[str, int]:
        """Returns the id of each token."""
        return self.backend_tokenizer.get_vocab()

    def get_added_vocab(self) -> dict[str, int]:
        """Returns the id of each token in `added_tokens_decoder`."""
        return {token.content: token_id for token_id, token in sorted(self.added_tokens_decoder.items())}
