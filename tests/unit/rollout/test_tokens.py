"""Ids, texts and templates of `rollout.tokens` equal those of transformers, for every tokenizer of the tests."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests import released
from tests.unit.environments import test_environment_dialogue as made
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from transformers.models.auto import tokenization_auto

from telescope.errors import UserError
from telescope.rollout import tokens
from telescope.rollout.rendering import Renderer, RendererSpec
from telescope.rollout.tokens import Tokenizer, load_tokenizer, model_folder
from telescope.tiny_model.build import build_tokenizer

MESSAGES = [
    {"role": "system", "content": "Answer <briefly>, in “words”."},
    {"role": "user", "content": "Why?\n"},
    {"role": "assistant", "content": "<think>\nBecause.\n</think>\n\nSo."},
    {"role": "user", "content": " How?"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Reads a page, “as is”.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
CALL = {"type": "function", "id": "call00000", "function": {"name": "look_up", "arguments": {"word": "<a & b>"}}}
CALLING = [
    *MESSAGES[:2],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "look_up", "tool_call_id": "call00000", "content": "é ü"},
]


def load(folder: Path) -> Any:
    return load_tokenizer(str(folder), folder)


def both(folder: Path) -> tuple[Tokenizer, Any]:
    ours = load(folder)
    assert isinstance(ours, Tokenizer)
    return ours, transformers.AutoTokenizer.from_pretrained(folder)


def sentencepiece_like(folder: Path) -> Path:
    """A unigram tokenizer in the manner of sentencepiece, with tokens that take spaces and parts of words."""
    pieces = ["<unk>", "<s>", "</s>", "▁", *(c for c in map(chr, range(33, 127))), "▁th", "▁the", "▁a", "er", "▁'", "n't"]
    raw = tokens.tokenizers.Tokenizer(models.Unigram([(piece, -i / 9) for i, piece in enumerate(pieces)], unk_id=0))
    raw.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("''", '"')])
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Metaspace(prepend_scheme="first")
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    raw.add_special_tokens(["<unk>", "<s>", "</s>", AddedToken("<mask>", lstrip=True)])
    raw.add_tokens([AddedToken("[W]", single_word=True, rstrip=True), AddedToken("ﬁx", normalized=True)])
    raw.enable_padding(pad_id=2, pad_token="</s>", length=8)
    raw.enable_truncation(4)
    return written(
        folder, raw.to_str(), bos_token="<s>", eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=True
    )


def written(folder: Path, tokenizer: str, **config: Any) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each tokenizer of the tests: released, of the demo, made for the tests of dialogues, and others."""
    base = tmp_path_factory.mktemp("tokenizers")
    found = {family: released.tokenizer_folder(family) for family in released.FAMILIES}
    for family in made.FAMILIES:
        made.renderer(family).tokenizer.save_pretrained(base / family)
    build_tokenizer(["Use 3, 5 and 7 to make 22."] * 9, 400).save_pretrained(base / "demo")
    (base / "demo" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    sentencepiece_like(base / "pieces")
    return found | {folder.name: folder for folder in base.iterdir()}


@pytest.fixture(scope="module")
def pair(folders: dict[str, Path]) -> Any:
    return cache(lambda name: both(folders[name]))


NAMES = [*released.FAMILIES, *made.FAMILIES, "demo", "pieces"]
SPACES = st.text(" \n\t\r\u00a0\u2009\u3000▁", max_size=4)
WORDS = st.sampled_from(["the", "don't", "3.14159", "e\u0301é", "ﬁx", "日本語", "👩‍🔬", "\ufdd0", "x=1;", " , .", "[W]a [W]"])


def texts_with(names: list[str]) -> st.SearchStrategy[str]:
    piece = st.text(max_size=6) | SPACES | WORDS | st.sampled_from(names) | st.sampled_from(names).map(lambda n: n[:-1])
    return st.lists(piece, max_size=8).map("".join)


def assert_same(ours: Tokenizer, theirs: Any, text: str) -> None:
    for special in (False, True):
        ids = ours(text, add_special_tokens=special)
        assert dict(ids) == {key: theirs(text, add_special_tokens=special)[key] for key in ids}
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.tokenize(text) == theirs.tokenize(text)
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    for options in ({}, {"skip_special_tokens": True}, {"clean_up_tokenization_spaces": True}):
        assert ours.decode(ids, **options) == theirs.decode(ids, **options)


ATTRIBUTES = (
    "special_tokens_map", "all_special_tokens", "all_special_ids", "extra_special_tokens", "vocab_size", "chat_template",
    "model_max_length", "padding_side", "is_fast", *(f"{name}{end}" for name in tokens.SPECIAL_TOKENS for end in ("", "_id")),
)  # fmt: skip


def assert_same_attributes(ours: Tokenizer, theirs: Any) -> None:
    for name in ATTRIBUTES:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs)
    assert {i: repr(t) for i, t in ours.added_tokens_decoder.items()} == {
        i: repr(t) for i, t in theirs.added_tokens_decoder.items()
    }
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    assert ours.get_vocab() == theirs.get_vocab()
    unknown = ["no token", *ours.all_special_tokens]
    assert ours.convert_tokens_to_ids(unknown) == theirs.convert_tokens_to_ids(unknown)


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_and_vocabulary_equal_those_of_transformers(name: str, pair: Any) -> None:
    assert_same_attributes(*pair(name))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_ids_and_texts_equal_those_of_transformers(name: str, pair: Any, data: st.DataObject) -> None:
    ours, theirs = pair(name)
    assert_same(ours, theirs, data.draw(texts_with(sorted(ours.get_added_vocab()))))
    ids = data.draw(st.lists(st.integers(0, len(ours) + 9), max_size=20))
    assert ours.decode(ids) == theirs.decode(ids)
    assert ours.batch_decode([ids, []]) == theirs.batch_decode([ids, []])
