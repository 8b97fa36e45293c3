"""Checks of a model's files before anything loads them."""

import json
import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub import errors
from tests.model_folder import (
    MODEL_CONFIG,
    TEMPLATE,
    safetensors,
    tensors_of,
    tokenizer,
    write_model_folder,
    write_safetensors,
)

from telescope.config import TelescopeConfig, load_config
from telescope.config.model_files import inspect_model
from telescope.config.model_shape import known_shape
from telescope.config.model_source import is_downloaded, is_local_path, read_meta_files
from telescope.errors import ConfigError, UserError
from telescope.rollout.rendering import Renderer, RendererSpec
from telescope.weights.model_folder import model_folder

FILES = {"tokenizer": "tokenizer.json", "tokenizer_config": "tokenizer_config.json"}


def write_model(folder: Path, *, without: str = "", config: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A folder that looks like a model. `without` leaves a file out; `changes` replaces contents by file stem."""
    write_model_folder(folder, without=without, **(config or {}))
    for stem, content in changes.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / FILES.get(stem, "chat_template.jinja")).write_text(text)
    return folder


def config(model: object, **values: object) -> TelescopeConfig:
    return TelescopeConfig(environments=[{"name": "a"}], model=str(model), **values)


def error_of(model: object, **values: object) -> str:
    with pytest.raises(UserError) as raised:
        inspect_model(config(model, **values))
    return str(raised.value)


def test_a_complete_folder_is_accepted_and_gives_its_shape(tmp_path):
    report = inspect_model(config(write_model(tmp_path / "m")))
    assert (report.unchecked, report.shape.num_layers) == (None, 2)


@pytest.mark.parametrize(("missing", "words", "fix"), [
    ("config.json", "holds no config.json", ". "),
    ("tokenizer.json", "holds no tokenizer", ". Save it beside the weights: AutoTokenizer.from_pretrained("),
    ("chat_template.jinja", "has no chat template", ". Set chat_template to "),
    ("model.safetensors", "holds no weights", ". "),
])  # fmt: skip
def test_a_missing_file_is_named_with_the_fix(tmp_path, missing, words, fix):
    folder = write_model(tmp_path / "m", without=missing)
    message = error_of(folder)
    assert message.startswith(f"model is '{folder}'")
    assert words in message
    assert fix in message


TEMPLATES = [{"name": "default", "template": TEMPLATE}]
MARKED = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"


@pytest.mark.parametrize(
    ("files", "fields"),
    [
        ({"without": "chat_template.jinja", "tokenizer_config": {"chat_template": TEMPLATE}}, {}),
        ({"without": "chat_template.jinja", "tokenizer_config": {"chat_template": TEMPLATES}}, {}),
        ({"without": "chat_template.jinja"}, {"chat_template": TEMPLATE}),
        ({"chat_template": MARKED}, {}),
    ],
    ids=["in the tokenizer's config", "one of several", "in the configuration", "marks generation, controls loops"],
)
def test_a_template_counts_wherever_it_is(tmp_path, files, fields):
    assert inspect_model(config(write_model(tmp_path / "m", **files), **fields)).unchecked is None


def test_an_invalid_template_is_refused_in_any_file(tmp_path):
    folder = write_model(tmp_path / "m", chat_template="{% for m in messages %}")
    assert "is not a Jinja2 template" in error_of(folder)
    assert error_of(folder, chat_template="{{ messages").startswith("chat_template is not a Jinja2 template")
    broken = write_model(tmp_path / "b", without="chat_template.jinja", tokenizer_config="{")
    assert "tokenizer_config.json" in error_of(broken)
    (folder / "chat_template.jinja").write_bytes(TEMPLATE.encode("utf-16"))
    assert error_of(folder).startswith(f"chat_template.jinja of {folder} cannot be read: 'utf-8' codec")


@pytest.mark.parametrize(("model", "environment", "command"), [
    ("models/tiny-countdown", "a", "`telescope tiny-model --output models/tiny-countdown`"),
    ("models/smollm2-135m", "a", "`telescope tiny-model --from smollm2-135m --output models/smollm2-135m`"),
    ("models/tiny-x", "calculator_agent", "`telescope tiny-model --task calculator_agent --output models/tiny-x`"),
])  # fmt: skip
def test_a_tiny_model_that_is_not_there_yet_can_be_made(tmp_path, monkeypatch, model, environment, command):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=command):
        inspect_model(TelescopeConfig(environments=[{"name": environment}], model=model))
    assert "telescope tiny-model" not in error_of("models/large")


@pytest.mark.parametrize(("content", "words"), [
    (b"", "0 bytes"),
    (safetensors({})[0][:9], "cut off"),
    (safetensors({"a": [4]})[0], "cut off"),
    (b"\xff" * 8 + b"{}", "damaged"),
    (struct.pack("<Q", 2) + b"[]", "damaged"),
    (struct.pack("<Q", 3) + b"not", "damaged"),
])  # fmt: skip
def test_weight_files_shorter_than_their_header_lists_are_refused(tmp_path, content, words):
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    message = error_of(folder)
    assert "model.safetensors" in message
    assert words in message


def test_every_shard_that_the_index_lists_must_be_there_and_whole(tmp_path):
    folder = write_model(tmp_path / "m", without="model.safetensors")
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    tensors = tensors_of(MODEL_CONFIG)
    halves = [dict(list(tensors.items())[:9]), dict(list(tensors.items())[9:])]
    index = {"weight_map": {name: shard for shard, half in zip(shards, halves, strict=True) for name in half}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_safetensors(folder / shards[0], halves[0])
    assert f"lacks {shards[1]}" in error_of(folder)
    write_safetensors(folder / shards[1], halves[1], less=1)
    assert f"{shards[1]} of {folder} is broken" in error_of(folder)
    write_safetensors(folder / shards[1], halves[1])
    assert inspect_model(config(folder)).unchecked is None


@pytest.mark.parametrize(("dtype", "is_quantized"), [
    *((dtype, True) for dtype in ("F8_E4M3", "I8", "U8")), *((dtype, False) for dtype in ("F64", "F16", "BF16")),
])  # fmt: skip
def test_quantized_weights_are_refused_with_tensor_dtype_and_fix_and_no_others(tmp_path, dtype, is_quantized):
    folder = write_model(tmp_path / "m")
    write_safetensors(folder / "model.safetensors", tensors_of(MODEL_CONFIG), dtype)
    if not is_quantized:
        assert inspect_model(config(folder)).unchecked is None
        return
    message = error_of(folder)
    assert f"model.safetensors of {folder} holds model.embed_tokens.weight ({dtype}), " in message
    assert "quantized weights cannot be trained. Choose the model that it was quantized from" in message


NO_TEXT = "no causal language model. Choose a model that generates text"


@pytest.mark.parametrize(("changes", "words"), [
    ({"quantization_config": {"quant_method": "fp8"}}, ['has a quantization_config ("fp8")']),
    ({"text_config": {"quantization_config": {}}}, ["has a quantization_config (null)"]),
    ({"compression_config": "x"}, ['has a compression_config ("x")']),
    ({"quantization_config": None}, []),
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, ['has model_type "bert"', NO_TEXT]),
    ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
     ['has model_type "t5"', NO_TEXT]),
    ({"model_type": "vit", "architectures": None}, ['has model_type "vit"', NO_TEXT]),
    ({"model_type": None}, ["has model_type null", NO_TEXT]),
])  # fmt: skip
def test_a_model_that_cannot_be_trained_is_refused_by_its_config_whatever_its_tokenizer(tmp_path, changes, words):
    folder = write_model(tmp_path / "m", without="chat_template.jinja" if NO_TEXT in words else "")
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG | changes))
    if words:
        message = error_of(folder)
        assert [word for word in words if word not in message] == []
    else:
        assert inspect_model(config(folder)).unchecked is None


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"model": {}}', '{"model": {"vocab": {}}}'])
def test_a_tokenizer_file_without_a_tokenizer_is_refused(tmp_path, text):
    message = error_of(write_model(tmp_path / "m", tokenizer=text))
    assert "tokenizer.json" in message
    assert "again" in message


@pytest.mark.parametrize(("tokens", "fits"), [
    (tokenizer(128, {}), True),
    (tokenizer(129, {}), False),
    (tokenizer(100, {"<|start|>": 128}), False),  # the template writes it
    (tokenizer(100, {"<|end|>": 128}), False),  # the end of an answer
    (tokenizer(100, {"<image>": 128}), True),  # nothing does
    ({"model": {"type": "Unigram", "vocab": [["a", -1.0]] * 128}}, True),
    ({"model": {"type": "Unigram", "vocab": [["a", -1.0]] * 129}}, False),
])  # fmt: skip
def test_a_token_without_an_embedding_is_refused(tmp_path, tokens, fits):
    special = {"eos_token": {"content": "<|end|>"}}
    folder = write_model(tmp_path / "m", tokenizer=tokens, tokenizer_config=special)
    if fits:
        assert inspect_model(config(folder)).unchecked is None
    else:
        message = error_of(folder)
        assert "vocab_size 128, but its tokenizer has ids up to 128" in message
        assert "resize the model: model.resize_token_embeddings(len(tokenizer))" in message


def test_unexpected_json_in_any_file_never_crashes(tmp_path):
    odd = [None, [], 1, "x", {}, {"text_config": None}, {"model": {"vocab": 5}}, {"model": {"vocab": {"a": None}}},
           {"weight_map": {"a": []}}, {"added_tokens": [None, {"id": "x", "content": 3}], "model": {"vocab": [0]}},
           {"eos_token": [1], "chat_template": [1]}]  # fmt: skip
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"):
        for number, content in enumerate(odd):
            folder = write_model(tmp_path / f"{name}{number}")
            (folder / name).write_text(json.dumps(content))
            try:
                inspect_model(config(folder))
            except ConfigError as error:
                assert str(error).startswith(("model is ", name))  # noqa: PT017


def test_a_path_that_is_no_folder_or_may_not_be_read_is_refused(monkeypatch, tmp_path):
    assert "does not exist" in error_of(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "is a file" in error_of(tmp_path / "file")
    monkeypatch.setattr(Path, "iterdir", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert "which cannot be read (Permission denied)" in error_of(tmp_path)


def heads(num: int, num_key_value: int) -> dict[str, int]:
    return {"num_attention_heads": num, "num_key_value_heads": num_key_value, "head_dim": 16}


def sharing(num_ranks: int) -> dict[str, int]:
    return {"fsdp_context_parallel_size": num_ranks, "trainer_num_workers": num_ranks}


def cut(size: int) -> dict[str, int]:
    return {"inference_tensor_parallel_size": size, "inference_num_workers": size}


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 44}
ODD = EXPERTS | {"intermediate_size": 130}  # no layer has this size, unless one is dense


@pytest.mark.parametrize(("sizes", "values", "words"), [
    ({}, {"max_model_len": 9000}, "max_model_len is 9000"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"max_model_len": 9000}, "max_model_len"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {"max_model_len": 9000}, None),
    (heads(4, 2), sharing(3), "fsdp_context_parallel_size is 3, but .* has 4 attention heads, which it must divide"),
    (heads(12, 3), sharing(2), "has 3 key and value heads, which it must divide or be a multiple of"),
    (heads(12, 3), sharing(6), None), (heads(4, 2), sharing(2), None),
    ({}, cut(8), "inference_tensor_parallel_size is 8, but num_attention_heads of .* is 4"),
    ({"num_attention_heads": 8, "num_key_value_heads": 3}, cut(4), "size is 4, but num_key_value_heads of"),
    ({"intermediate_size": 130}, cut(4), "size is 4, but intermediate_size of"),
    (EXPERTS | {"moe_intermediate_size": 42}, cut(4), "size is 4, but moe_intermediate_size of"),
    (ODD | {"mlp_only_layers": [0]}, cut(4), "but intermediate_size of"),
    (ODD | {"decoder_sparse_step": 2}, cut(4), "but intermediate_size of"),
    (ODD, cut(4), None), ({}, cut(4), None),  # two key and value heads are repeated
    (EXPERTS, {"weight_transfer": "background"}, "weight_transfer is background"),
])  # fmt: skip
def test_a_setting_must_fit_the_sizes_of_the_model(tmp_path, sizes, values, words):
    folder = write_model(tmp_path / "m", config=sizes)
    if words is None:
        assert inspect_model(config(folder, **values)).shape
    else:
        assert re.search(words, error_of(folder, **values))


def test_a_hub_identifier_that_cannot_be_looked_up_is_reported_and_keeps_its_known_shape(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    report = inspect_model(config("Qwen/Qwen3-8B", max_model_len=40960), ask_hub=False)
    assert report.shape == known_shape("Qwen/Qwen3-8B") and "could not be checked" in report.unchecked


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Makes downloads fail from a hub whose list of files can be read, while nothing is in the cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    siblings = [SimpleNamespace(rfilename=name) for name in ("config.json", "tokenizer.json", "model.safetensors")]
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=siblings))
    return lambda call, error: monkeypatch.setattr(f"huggingface_hub.{call}", Mock(side_effect=error))


def test_a_gated_model_whose_list_of_files_is_public_is_refused_with_the_way_to_get_it(hub):
    hub("hf_hub_download", errors.GatedRepoError("403", response=Mock()))
    with pytest.raises(ConfigError, match=r"granted access.*hf auth login"):
        inspect_model(config("meta-llama/Llama-3.1-8B"))


def test_a_connection_that_breaks_during_a_download_is_reported_by_its_kind(hub):
    class ReadError(Exception):  # those of huggingface_hub's transports are no OSError
        pass

    hub("hf_hub_download", ReadError)
    assert "config.json cannot be downloaded (ReadError)" in inspect_model(config("org/model")).unchecked
    hub("snapshot_download", ReadError("reset by peer."))
    with pytest.raises(UserError, match=r"org/model is not .* cannot be downloaded: reset by peer\. Check the name"):
        model_folder("org/model")
    with pytest.raises(UserError, match="The tokenizer of 'org/model' cannot be loaded: reset by peer"):
        Renderer(RendererSpec("org/model"))


NO_NAME = "which is neither a folder here nor a hub identifier"


@pytest.mark.parametrize(("model", "words"), [
    *[(model, NO_NAME) for model in ("a b", "-a", "a..b", "x/", "a\nb", "a" * 400, "o/" + "a" * 5000)],
    *[(model, "is not a path: ") for model in ("/" + "a" * 5000, "~no-such-user/x")],
])  # fmt: skip
def test_what_is_no_model_is_refused_briefly(tmp_path, monkeypatch, model, words):
    monkeypatch.chdir(tmp_path)
    message = error_of(model)
    assert words in message and len(message) < 400


def test_a_chat_template_may_be_a_file_whose_content_the_run_keeps(tmp_path):
    (file := tmp_path / "chat.jinja").write_text(TEMPLATE)
    loaded = config(write_model(tmp_path / "m", without="chat_template.jinja"), chat_template=str(file))
    file.unlink()
    assert TelescopeConfig.from_json(loaded.to_json()).chat_template == TEMPLATE
    assert inspect_model(loaded).unchecked is None


@pytest.mark.parametrize(("content", "problem"), [
    (None, "it has no {{ or {% and is read as a file, which cannot be read (No such file or directory). Set a"),
    ("user:", "that file has no {{ or {%."),
    ('{"chat_template": null}', "that file has no {{ or {%."),
])  # fmt: skip
def test_a_chat_template_that_is_neither_text_nor_a_file_is_refused(tmp_path, content, problem):
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as raised:
        load_config(None, ["--environments", "[{name: countdown}]", "--chat_template", str(file)], {})
    assert problem in str(raised.value)


def test_an_adapter_is_refused_with_its_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    assert "holds an adapter of org/base: merge it" in error_of(tmp_path)


def test_weights_that_trainer_and_engine_would_take_from_other_files_are_refused(tmp_path):
    folder = write_model(tmp_path / "m")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "Remove that index, which is of an earlier save" in error_of(folder)
    write_safetensors(folder / "model-00001-of-00001.safetensors", tensors_of(MODEL_CONFIG))
    assert "has both model.safetensors, which the trainer would load" in error_of(folder)


def test_a_hub_model_is_downloaded_once_all_files_of_its_index_are_here(tmp_path, monkeypatch):
    def cached(model, name):
        return str(tmp_path / name) if (tmp_path / name).exists() else None

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    assert not is_downloaded("org/model")
    shards = ["model-1.safetensors", "model-2.safetensors"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(enumerate(shards))}))
    for shard in shards:
        assert not is_downloaded("org/model")
        (tmp_path / shard).write_bytes(b"")
    assert is_downloaded("org/model")


def test_paths_and_hub_identifiers_are_distinguished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    names = ["models/tiny", "/data/model", "./model", "a/b/c", "models/not-there-yet", "Qwen/Qwen2.5-3B", "gpt2"]
    assert [name for name in names if not is_local_path(name)] == ["Qwen/Qwen2.5-3B", "gpt2"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config("~/m").model == str(tmp_path / "m")


def test_the_files_beside_the_weights_have_the_chat_template_of_the_run(tmp_path):
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text("{}")
    files = read_meta_files(config(folder))
    assert sorted(files) == ["chat_template.jinja", "config.json", "tokenizer.json", "tokenizer_config.json"]
    assert files["chat_template.jinja"] == TEMPLATE.encode()
    assert read_meta_files(config(folder, chat_template="{{ messages }}")) == {
        **files, "chat_template.jinja": b"{{ messages }}"
    }  # fmt: skip
    assert read_meta_files(config(tmp_path / "gone")) == {}
