"""Reads a model's tokenizer so that it gives the same ids as transformers.

For some models transformers uses tokenizer.json unchanged. For most it uses only the vocabulary, merges and
post-processor, and builds the rest according to the tokenizer's class: `_rebuild`. If a class of pieces with spaces
(Llama 2) is declared for a byte-level tokenizer.json, as DeepSeek does, transformers would lose text unless it knows
the model; the file is right and is used unchanged.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from telescope.config.model_source import is_local_path
from telescope.rollout.tokens import Tokenizer, added_token
from telescope.utils.text import user_path

logger = logging.getLogger(__name__)

FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tekken.json",
    "chat_template.jinja", "additional_chat_templates/*.jinja", "config.json", "generation_config.json",
)  # fmt: skip
"""Files of a model that are read here or by a renderer."""

PLAIN_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")
"""Values of `tokenizer_class`, without "Fast", for which transformers uses tokenizer.json unchanged."""
PLAIN_MODELS = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "ernie4_5", "ernie4_5_moe", "flex_olmo", "glm", "glm4", "glm4_moe",
    "glm4_moe_lite", "granite", "granitemoe", "granitemoehybrid", "internlm2", "jamba", "minicpm3", "minimax_m2",
    "ministral", "ministral3", "mistral", "mistral3", "mixtral", "nemotron", "olmo2", "olmo3", "phi3", "phimoe",
    "stablelm",
)  # fmt: skip
"""Values of `model_type` for which transformers does so, whatever the class."""
CLASS_OF_MODEL = {"qwen2": "Qwen2Tokenizer", "hyperclovax_vision_v2": "GPT2Tokenizer"} | dict.fromkeys(
    ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"), "Qwen3_5Tokenizer"
)
"""Values of `model_type` whose class transformers uses, whatever `tokenizer_class` says."""
END = "<|endoftext|>"
DEFAULT_TOKENS: Mapping[str, Mapping[str, str]] = {
    "Qwen2Tokenizer": {"unk": END, "eos": END, "pad": END},
    "Qwen3_5Tokenizer": {"unk": END, "eos": END, "pad": END},
    "GPT2Tokenizer": {"unk": END, "bos": END, "eos": END},
    "GPTNeoXTokenizer": {"unk": END, "bos": END, "eos": END, "pad": "<|padding|>"},
    "GemmaTokenizer": {name: f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
    "LlamaTokenizer": {"unk": "<unk>", "bos": "<s>", "eos": "</s>"},
    "CohereTokenizer": {name: f"<{name.upper()}>" for name in ("unk", "pad", "cls", "sep")}
    | {"bos": "<BOS_TOKEN>", "eos": "<|END_OF_TURN_TOKEN|>", "mask": "<MASK_TOKEN>"},
}
"""Default special tokens of a class, if tokenizer_config.json names none."""
PIECES = ("GemmaTokenizer", "LlamaTokenizer")
"""Classes whose vocabulary has text pieces with "▁" for a space. The others have bytes."""
QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?%s+|\p{N}| ?[^\s%s\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_LETTERS = {"Qwen2Tokenizer": (r"\p{L}", r"\p{L}"), "Qwen3_5Tokenizer": (r"[\p{L}\p{M}]", r"\p{L}\p{M}")}


def load_tokenizer(name: str, folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Returns a model's tokenizer: a `Tokenizer`, or transformers' own if only it can interpret the files.

    `name` is a folder or hub id, `folder` its `model_folder`. Raises `OSError` or `ValueError`.
    """

    def with_transformers() -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)

    settings = _settings(folder)
    raw, rebuilt_class = _read_tokenizer(folder, settings)
    if raw is None:
        logger.info(f"The tokenizer of {name} needs transformers, which takes seconds and 350 MiB in each process.")
        return with_transformers()
    if rebuilt_class:
        _rebuild(raw, rebuilt_class, settings)
    tokenizer = Tokenizer(name, raw, settings, with_transformers)
    if rebuilt_class:  # such a class flags every named token, whatever the files say
        named = set(tokenizer.all_special_tokens)
        raw.add_special_tokens([token for token in tokenizer.added_tokens_decoder.values() if token.content in named])
    return tokenizer


def model_folder(name: str) -> Path:
    """Returns a folder with a model's `FILES`, downloaded if it is a hub id. Raises `OSError`."""
    if is_local_path(name):
        if not (folder := user_path(name)).is_dir():
            raise FileNotFoundError("there is no such folder")
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except Exception as error:  # every transport has exceptions of its own
        raise OSError(str(error) or type(error).__name__) from error


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a file. Empty if the file does not exist."""
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _settings(folder: Path) -> dict[str, Any]:
    """Returns the settings in the files beside tokenizer.json. `chat_template` is a text, or texts by name."""
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


def _read_tokenizer(folder: Path, settings: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer | None, str]:
    """Returns tokenizer.json unchanged, and the transformers class that replaces parts of it, or "".

    The tokenizer is None if only transformers can interpret the files.
    """
    unknown = None, ""
    special_cases = any(settings.get(key) for key in ("auto_map", "fast_tokenizer_files", "fix_mistral_regex"))
    if special_cases or not (folder / "tokenizer.json").is_file() or (folder / "tekken.json").exists():
        return unknown
    try:
        raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain exceptions
        raise ValueError(f"tokenizer.json: {error}") from error
    declared = settings.get("added_tokens_decoder")
    older = read_json(folder / "added_tokens.json") if declared is None else {}
    if any(raw.token_to_id(token) != token_id for token, token_id in older.items()):
        return unknown
    model_type = str(read_json(folder / "config.json").get("model_type"))
    name = CLASS_OF_MODEL.get(model_type, str(settings.get("tokenizer_class")).removesuffix("Fast"))
    if model_type in PLAIN_MODELS or name in PLAIN_CLASSES:
        return raw, ""
    if name not in DEFAULT_TOKENS or not isinstance(raw.model, models.BPE):
        return unknown
    of_bytes = raw.pre_tokenizer is not None and b'"ByteLevel"' in raw.pre_tokenizer.__getstate__()
    if of_bytes == (name in PIECES):
        return raw, ""
    written = {token_id: repr(token) for token_id, token in raw.get_added_tokens_decoder().items()}
    differs = declared and {int(token_id): repr(added_token(token)) for token_id, token in declared.items()} != written
    return unknown if differs else (raw, name)


def _rebuild(raw: tokenizers.Tokenizer, name: str, settings: dict[str, Any]) -> None:
    """Gives a tokenizer the parts and default tokens of a class that ignores them in tokenizer.json."""
    prefix = settings.get("add_prefix_space")
    normalizer: Any = normalizers.NFC()
    splitter: Any = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix))
    decoder: Any = decoders.ByteLevel()
    if name in PIECES:
        steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        normalizer, splitter = normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")
        if name == "LlamaTokenizer":
            scheme = "never" if prefix is False else "always" if settings.get("legacy") else "first"
            normalizer, splitter = None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
            steps += [] if prefix is False else [decoders.Strip(" ", left=1)]
        decoder = decoders.Sequence(steps)
    elif name in QWEN_LETTERS:
        split = pre_tokenizers.Split(tokenizers.Regex(QWEN_SPLIT % QWEN_LETTERS[name]), "isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix), use_regex=False)
        splitter = pre_tokenizers.Sequence([split, as_bytes])
    elif name == "GPT2Tokenizer":
        normalizer = None
    elif name == "CohereTokenizer":
        splitter = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), splitter])
    else:
        raw.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    raw.normalizer, raw.pre_tokenizer, raw.decoder = normalizer, splitter, decoder
    for token, text in DEFAULT_TOKENS[name].items():
        settings.setdefault(f"{token}_token", text)
    model = raw.model
    model.fuse_unk = model.byte_fallback = name in PIECES
    model.ignore_merges, model.dropout = False, None
    model.unk_token = added_token(settings["unk_token"]).content if name == "GemmaTokenizer" else None
