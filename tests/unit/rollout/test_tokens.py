"""Ids, texts and templates of `rollout.tokens` equal those of transformers, for every tokenizer of the tests."""

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
from telescope.rollout import tokenizer_files, tokens
from telescope.rollout.rendering import Renderer, RendererSpec
from telescope.rollout.tokenizer_files import load_tokenizer, model_folder
from telescope.rollout.tokens import Tokenizer
from telescope.tiny_model.build import build_tokenizer

MESSAGES = [
    {"role": "system", "content": "Answer <briefly>, in “words”."}, {"role": "user", "content": "Why?\n"},
    {"role": "assistant", "content": "<think>\nBecause.\n</think>\n\nSo."}, {"role": "user", "content": " How?"},
]  # fmt: skip
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
    pieces = [
        "<unk>", "<s>", "</s>", "▁", *(c for c in map(chr, range(33, 127))), "▁th", "▁the", "▁a", "er", "▁'", "n't",
    ]  # fmt: skip
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
        tokenizer = made.renderer(family).tokenizer
        if bos := tokenizer.bos_token:
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.bos_token_id)]
            )
        tokenizer.save_pretrained(base / family)
    build_tokenizer(["Use 3, 5 and 7 to make 22."] * 9, 400).save_pretrained(base / "demo")
    (base / "demo" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    sentencepiece_like(base / "pieces")
    return found | {folder.name: folder for folder in base.iterdir()}


@pytest.fixture(scope="module")
def pair(folders: dict[str, Path]) -> Any:
    return cache(lambda name: both(folders[name]))


NAMES = [*released.FAMILIES, *made.FAMILIES, "demo", "pieces"]
SPACES = st.text(" \n\t\r\u00a0\u2009\u3000▁", max_size=4)
WORDS = st.sampled_from(
    ["the", "don't", "3.14159", "e\u0301é", "ﬁx", "日本語", "👩‍🔬", "\ufdd0", "x=1;", " , .", "[W]a [W]"]
)


def texts_with(tokenizer: Tokenizer) -> st.SearchStrategy[str]:
    names = sorted(str(token) for token in tokenizer.added_tokens_decoder.values())
    piece = st.text(max_size=6) | SPACES | WORDS | st.sampled_from(names) | st.sampled_from(names).map(lambda n: n[:-1])
    return st.lists(piece, max_size=8).map("".join)


def assert_same(ours: Tokenizer, theirs: Any, text: str) -> None:
    for special in (False, True):
        ids = ours(text, add_special_tokens=special)
        assert dict(ids) == {key: theirs(text, add_special_tokens=special)[key] for key in ids}
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    for options in ({}, {"skip_special_tokens": True}, {"clean_up_tokenization_spaces": True}):
        assert ours.decode(ids, **options) == theirs.decode(ids, **options)


ATTRIBUTES = (
    "special_tokens_map", "all_special_tokens", "all_special_ids", "extra_special_tokens", "vocab_size",
    "chat_template", *tokens.SPECIAL_TOKENS,
    *(f"{name}_id" for name in tokens.SPECIAL_TOKENS),
)  # fmt: skip


def assert_same_attributes(ours: Tokenizer, theirs: Any) -> None:
    for name in ATTRIBUTES:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs)
    assert {i: repr(t) for i, t in ours.added_tokens_decoder.items()} == {
        i: repr(t) for i, t in theirs.added_tokens_decoder.items()
    }
    assert ours.get_vocab() == theirs.get_vocab()
    unknown = ["no token", *ours.all_special_tokens]
    assert ours.convert_tokens_to_ids(unknown) == theirs.convert_tokens_to_ids(unknown)


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_and_vocabulary_equal_those_of_transformers(name, pair):
    assert_same_attributes(*pair(name))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_ids_and_texts_equal_those_of_transformers(name, pair, data):
    ours, theirs = pair(name)
    assert_same(ours, theirs, data.draw(texts_with(ours)))
    ids = data.draw(st.lists(st.integers(0, len(ours) + 9), max_size=20))
    assert ours.decode(ids) == theirs.decode(ids)
    assert ours.decode([ids, []]) == theirs.decode([ids, []])


CONVERSATIONS = [MESSAGES, MESSAGES[1:2], MESSAGES[1:3], CALLING, CALLING[1:]]
VARIABLES: list[dict[str, Any]] = [
    {}, {"add_generation_prompt": True}, {"add_generation_prompt": True, "enable_thinking": True},
    {"add_generation_prompt": True, "enable_thinking": False, "tools": [TOOL]},
    {"documents": [{"title": "t", "text": "x"}]},
]  # fmt: skip


def rendered(tokenizer: Any, messages: Any, **variables: Any) -> Any:
    """The text, or the error: of a template with its message, of a missing template without."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **variables)
    except Exception as error:  # a template may raise whatever Python raises
        return ValueError if isinstance(error, ValueError) else (type(error), str(error))


SCOPES = (
    "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content }}\n{% endgeneration %}{{ x }}"
    "{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}{{ [x, 'ü'] | tojson(true, 1) }}"
    "{{ {'b': 1, 'a': '<'} | tojson(ensure_ascii=False, sort_keys=True) }}{{ strftime_now('%Y') }}{{ bos_token }}"
)


def test_every_template_renders_as_in_transformers(pair):
    templates = {name: released.chat_template(name) for name in released.chat_template_names()}
    templates |= {name: template for name, (template, *_) in made.FAMILIES.items()} | {"scopes": SCOPES}
    ours, theirs = pair("llama3_1")
    texts = 0
    for name, template in templates.items():
        for messages in CONVERSATIONS:
            for variables in VARIABLES:
                text = rendered(ours, messages, chat_template=template, **variables)
                assert text == rendered(theirs, messages, chat_template=template, **variables), name
                texts += isinstance(text, str)
    assert texts > 0.7 * len(templates) * len(CONVERSATIONS) * len(VARIABLES), "most conversations fit a template"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*released.WITHOUT_TEMPLATE, "pieces")])
def test_the_tokenizers_own_template_gives_the_ids_of_transformers(name, pair):
    ours, theirs = pair(name)
    for messages in CONVERSATIONS[1:3]:
        ids = ours.apply_chat_template(messages, add_generation_prompt=True)
        assert ids == dict(theirs.apply_chat_template(messages, add_generation_prompt=True))
        assert ids.input_ids == ours.apply_chat_template(messages, None, None, None, True, return_dict=False)
    several = ours.apply_chat_template(CONVERSATIONS[1:3], padding=False)
    assert several == dict(theirs.apply_chat_template(CONVERSATIONS[1:3]))
    with pytest.raises(ValueError, match="empty conversation"):
        theirs.apply_chat_template([])
    with pytest.raises(ValueError, match="without a message"):
        ours.apply_chat_template([])


NAMED = [{"name": "default", "template": "D{{ tools }}"}, {"name": "tool_use", "template": "T"}]
BOS = {"__type": "AddedToken", "content": "<|im_start|>", "lstrip": True, "normalized": True}
NEW = {"content": "[new]", "special": False, "normalized": True, "lstrip": False, "rstrip": True, "single_word": True}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "no settings": ({}, {}),
    "template": ({"chat_template": "{{ messages[0].content }}{{ eos_token }}", "eos_token": "<|im_end|>"}, {}),
    "templates by name": ({"chat_template": NAMED}, {}),
    "template file": ({"chat_template": NAMED}, {"chat_template.jinja": "F\r\nü{{ cls_token }}"}),
    "template files": (
        {"chat_template": "C"},
        {"chat_template.jinja": "F", "additional_chat_templates/rag.jinja": "R"},
    ),
    "only a named file": ({"chat_template": "C"}, {"additional_chat_templates/tool_use.jinja": "U"}),
    "token as fields": ({"bos_token": BOS, "eos_token": "<|im_end|>", "unk_token": None}, {}),
    "tokens that are missing": ({"bos_token": "<bos>", "pad_token": BOS | {"content": "<pad>"}}, {}),
    "bos and eos are for the file to add": (
        {"bos_token": "<|im_start|>", "add_bos_token": True, "add_eos_token": True},
        {},
    ),
    "a token of a model": ({"image_token": "<image>", "audio_token": BOS | {"content": "<audio>"}}, {}),
    "further tokens": ({"additional_special_tokens": ["<|im_end|>", "<x>"]}, {}),
    "further tokens as fields": ({"extra_special_tokens": ["<x>", BOS | {"content": "<y>"}]}, {}),
    "further tokens by name": ({"extra_special_tokens": {"boi_token": "<boi>"}, "eos_token": "<boi>"}, {}),
    "tokens that are declared": ({"added_tokens_decoder": {"500": NEW, "1": NEW | {"content": "<|im_start|>"}}}, {}),
    "a declared token with a name": ({"added_tokens_decoder": {"500": NEW}, "eos_token": "[new]"}, {}),
    "older files": (
        {"eos_token": "<|endoftext|>"},
        {
            "special_tokens_map.json": json.dumps(
                {"eos_token": {k: v for k, v in BOS.items() if k != "__type"}, "additional_special_tokens": ["<x>"]}
            ),
            "added_tokens.json": json.dumps({"<|im_start|>": 1}),
        },
    ),
    "split": ({"split_special_tokens": True}, {}),
    "clean": ({"clean_up_tokenization_spaces": True}, {}),
    "own names": ({"add_prefix_space": True, "legacy": True, "sp_model_kwargs": {}}, {}),
}


@pytest.mark.parametrize("base", ["demo", "pieces"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_mean_what_they_mean_in_transformers(setting, base, folders, tmp_path):
    config, files = SETTINGS[setting]
    folder = written(tmp_path, (folders[base] / "tokenizer.json").read_text(), **config)
    (folder / "additional_chat_templates").mkdir()
    if base == "demo":
        for name, content in files.items():
            (folder / name).write_bytes(content.encode())
    ours, theirs = both(folder)
    assert_same_attributes(ours, theirs)
    assert_same(ours, theirs, f"a <x>b{''.join(ours.all_special_tokens)} [new] , <|im_start|> the<mask>.")
    for options in ({}, {"tools": [TOOL]}, {"chat_template": "tool_use"}, {"chat_template": "{{ bos_token }}"}):
        assert rendered(ours, MESSAGES, **options) == rendered(theirs, MESSAGES, **options)


def test_the_tables_of_classes_are_those_of_transformers():
    classes = tokenization_auto.TOKENIZER_MAPPING_NAMES
    plain = {"TokenizersBackend", "MistralCommonBackend"}
    assert {classes[model_type] for model_type in tokenizer_files.PLAIN_MODELS} <= plain
    forced = tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert {name: classes[name] for name in forced if classes[name] not in plain} == tokenizer_files.CLASS_OF_MODEL


REBUILT = [
    (base, {"tokenizer_class": name} | options)
    for base in ("demo", "gemma", "mistral")
    for name in tokenizer_files.DEFAULT_TOKENS
    if (base == "demo") != (name in tokenizer_files.PIECES)
    for options in ({}, {"add_prefix_space": True}, {"add_prefix_space": False, "eos_token": "<x>"}, {"legacy": True})
]


@pytest.mark.parametrize(("base", "config"), REBUILT)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_class_that_ignores_parts_of_the_file_is_followed(base, config, folders, tmp_path, data):
    folder = written(tmp_path, (folders[base] / "tokenizer.json").read_text(), **config)
    ours, theirs = both(folder)
    assert type(theirs).__name__ == config["tokenizer_class"]
    assert_same_attributes(ours, theirs)
    for _ in range(8):
        assert_same(ours, theirs, data.draw(texts_with(ours)))


@pytest.mark.parametrize(("base", "name"), [("demo", "LlamaTokenizerFast"), ("gemma", "GPT2Tokenizer")])
def test_a_file_is_right_where_the_class_would_lose_text(base, name, folders, tmp_path):
    folder = written(tmp_path, (folders[base] / "tokenizer.json").read_text(), tokenizer_class=name)
    ours, theirs = both(folder)
    text = "Use 3, 5  and 7"
    assert ours.decode(ours.encode(text, add_special_tokens=False)) == text
    assert theirs.decode(theirs.encode(text, add_special_tokens=False)) != text


@pytest.mark.parametrize(("base", "config", "files"), [
    ("pieces", {"tokenizer_class": "GemmaTokenizer"}, {}),
    ("demo", {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": {"0": NEW}}, {}),
    ("demo", {"tokenizer_class": "CodeGenTokenizer"}, {}),
    ("demo", {}, {"added_tokens.json": '{"[new]": 9999}'}),
])  # fmt: skip
def test_a_tokenizer_that_transformers_builds_in_its_own_way_is_left_to_it(base, config, files, folders, tmp_path):
    folder = written(tmp_path, (folders[base] / "tokenizer.json").read_text(), **config)
    for name, content in files.items():
        (folder / name).write_text(content)
    tokenizer = load(folder)
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
    assert type(tokenizer) is type(transformers.AutoTokenizer.from_pretrained(folder))


def test_a_hub_id_is_read_from_the_cache_of_the_hub(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--some--model"
    shutil.copytree(folders["demo"], repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert model_folder("some/model") == repository / "snapshots" / "abc"
    assert Renderer(RendererSpec("some/model")).tokenizer.name_or_path == "some/model"
    for missing in ("some/other", "not a name"):
        with pytest.raises(UserError, match=f"The tokenizer of '{missing}' cannot be loaded"):
            Renderer(RendererSpec(missing))


def test_a_folder_that_does_not_exist_is_not_taken_for_a_hub_id(tmp_path):
    with pytest.raises(UserError, match=r"missing/model' cannot be loaded: there is no such folder$"):
        Renderer(RendererSpec(str(tmp_path / "missing" / "model")))


def test_a_broken_tokenizer_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.json: "):
        Renderer(RendererSpec(str(written(tmp_path, '{"model": 1}'))))


def format_prompt(tokenizer: Any, text: str) -> Any:
    return tokenizer.pad([{"input_ids": tokenizer.encode(text)}, {"input_ids": []}])["attention_mask"]


def test_transformers_answers_what_else_user_code_asks(folders, caplog):
    ours, theirs = both(folders["demo"])
    ours.pad_token = theirs.pad_token = ours.eos_token
    assert ours.pad_token_id == ours.eos_token_id
    assert not hasattr(ours, "_private"), "asked for by copy, pickle and others"
    assert not ours._loaded
    with caplog.at_level(logging.WARNING):
        assert format_prompt(ours, "make") == format_prompt(theirs, "make")
    assert f"format_prompt ({__file__}:" in caplog.text and "asks the tokenizer for pad," in caplog.text
    for options in ({"return_tensors": "np"}, {"text_pair": "of"}, {"return_offsets_mapping": True}):
        assert str(ours("make", **options)) == str(theirs("make", **options))
    ours.chat_template = theirs.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    for options in ({"continue_final_message": True}, {"return_tensors": "np"}, {"tools": [format_tool]}):
        assert str(ours.apply_chat_template(MESSAGES, **options)) == str(
            theirs.apply_chat_template(MESSAGES, **options)
        )
    with pytest.raises(AttributeError, match="nonsense"):
        _ = ours.nonsense
    assert len(caplog.records) == 1


def format_tool(word: str) -> str:
    """Reads a page.

    Args:
        word: What to read.
    """
    return word


def test_a_process_that_renders_loads_neither_transformers_nor_torch(folders):
    script = (
        "import sys; from telescope.rollout.rendering import Dialogue, Renderer, RendererSpec\n"
        "from telescope.rollout import environments, worker\n"
        "for folder in sys.argv[1:]:\n"
        "    assert Dialogue(Renderer(RendererSpec(folder))).begin([{'role': 'user', 'content': 'Why?'}])\n"
        "print(sorted({'torch', 'transformers', 'ray', 'huggingface_hub'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", script, *(str(folders[name]) for name in ("demo", "qwen3", "llama3_1", "gemma3"))]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
