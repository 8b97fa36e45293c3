"""A tiny model on disk: it loads, follows from its settings, and the cache never returns a broken one."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from telescope.cli import main as cli
from telescope.errors import UserError
from telescope.tiny_model.build import encode_examples
from telescope.tiny_model.cache import MANIFEST, TinyModelSettings, ensure_tiny_model, is_whole, write_tiny_model
from telescope.tiny_model.examples import ExampleSource

SMALL = {"warm_start_steps": 2, "warm_start_batch_size": 4, "hidden_size": 64, "num_heads": 2, "num_layers": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def built(request, root) -> tuple[Path, bool]:
    return ensure_tiny_model(root, tied=request.param, **SMALL), request.param


def test_it_loads_in_transformers_with_tied_or_untied_embeddings(built):
    folder, tied = built
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen2"
    assert model.config.tie_word_embeddings is tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert model.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id


def test_the_loaded_tokenizer_is_the_one_that_the_warm_start_used(built):
    """`transformers` may load a `qwen2` model's tokenizer with a class that ignores parts of tokenizer.json."""
    from tokenizers import Tokenizer

    loaded, written = AutoTokenizer.from_pretrained(built[0]), Tokenizer.from_file(str(built[0] / "tokenizer.json"))
    text = "<|im_start|>user\n3 71 12 -> 8<|im_end|>\n <answer>(3+7)-12</answer> caf\u00e9 don't\n\n  end  "
    assert loaded(text)["input_ids"] == written.encode(text).ids
    assert loaded.decode(loaded(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "3 7 12 -> 22"}]
    assert loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\n3 7 12 -> 22<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_default_model_has_one_to_three_million_parameters(tmp_path):
    for tied in (True, False):
        folder = ensure_tiny_model(tmp_path, tied=tied, warm_start_steps=0)
        assert 1e6 <= AutoModelForCausalLM.from_pretrained(folder).num_parameters() <= 3e6


def test_the_same_settings_give_the_same_weights(built, tmp_path):
    folder, tied = built
    again = ensure_tiny_model(tmp_path, tied=tied, **SMALL)
    other = ensure_tiny_model(tmp_path, tied=tied, seed=1, **SMALL)
    weights = [(path / "model.safetensors").read_bytes() for path in (folder, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_the_warm_start_does_not_touch_the_callers_random_state_or_threads(tmp_path):
    torch.manual_seed(5)
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    ensure_tiny_model(tmp_path, **SMALL)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_the_warm_start_learns(tmp_path):
    losses = []
    settings = SMALL | {"warm_start_steps": 60, "warm_start_batch_size": 16, "clean_share": 1.0}
    folder = ensure_tiny_model(tmp_path, report=lambda state: losses.append(state.loss), **settings)
    assert losses[0] > 4
    assert losses[-1] < 1
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    source = ExampleSource(TinyModelSettings(seed=9))
    tokens_BL, targets_BL = encode_examples([source.draw(0.0) for _ in range(32)], tokenizer)
    with torch.no_grad():
        logits_BLV = model(tokens_BL).logits
    assert torch.nn.functional.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten()) < 1


def test_a_second_call_trains_nothing(built, root):
    report = Mock(side_effect=AssertionError("the cache did not answer"))
    assert ensure_tiny_model(root, tied=built[1], report=report, **SMALL) == built[0]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", MANIFEST])
@pytest.mark.parametrize("damage", ["changed", "missing", "cut"])
def test_a_damaged_model_is_built_again(tmp_path, name, damage):
    folder = ensure_tiny_model(tmp_path, **SMALL | {"warm_start_steps": 0})
    weights = (folder / "model.safetensors").read_bytes()
    path = folder / name
    content = bytearray(path.read_bytes())
    if damage == "changed":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()
    assert ensure_tiny_model(tmp_path, **SMALL | {"warm_start_steps": 0}) == folder
    assert is_whole(folder, TinyModelSettings(**SMALL | {"warm_start_steps": 0}))
    assert (folder / "model.safetensors").read_bytes() == weights
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_an_interrupted_build_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        ensure_tiny_model(tmp_path, report=Mock(side_effect=KeyboardInterrupt), **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_of_two_builds_at_once_the_first_to_finish_stays(tmp_path):
    target = tmp_path / "model"
    settings = TinyModelSettings(**SMALL)
    inner = {}

    def report(state):
        if state.step == 1:
            write_tiny_model(target, settings)
            inner["made"] = (target / MANIFEST).stat().st_ino

    assert write_tiny_model(target, settings, report=report) == target
    assert is_whole(target, settings)
    assert (target / MANIFEST).stat().st_ino == inner["made"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_other_settings_replace_a_tiny_model_and_nothing_else(tmp_path):
    target = write_tiny_model(tmp_path / "model", TinyModelSettings(**SMALL))
    other = TinyModelSettings(**SMALL | {"seed": 3})
    write_tiny_model(target, other)
    assert is_whole(target, other)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="is not a tiny model"):
        write_tiny_model(mine, other)
    assert (mine / "thesis.txt").read_text() == "years of work"
    with pytest.raises(UserError, match="is not a tiny model"):
        write_tiny_model(mine / "thesis.txt", other)


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write a tiny model to"):
        ensure_tiny_model(tmp_path / "file" / "cache", **SMALL)


def test_the_command_prints_the_folder_and_progress_apart(tmp_path, capsys):
    flags = [text for name, value in SMALL.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert cli.main(["tiny-model", "--cache-dir", str(tmp_path), "--tied", "--seed", "4", *flags]) == 0
    captured = capsys.readouterr()
    folder = Path(captured.out.strip())
    assert folder.parent == tmp_path
    assert json.loads((folder / MANIFEST).read_text())["settings"]["tied"] is True
    assert "2/2" in captured.err
    output = tmp_path / "named" / "model"
    assert cli.main(["tiny-model", "--output", str(output), "--no-tied", *flags]) == 0
    assert capsys.readouterr().out.strip() == str(output)
    assert is_whole(output, TinyModelSettings(**SMALL))


def test_the_command_refuses_a_setting_that_makes_no_model(tmp_path, capsys):
    assert cli.main(["tiny-model", "--cache-dir", str(tmp_path), "--num-heads", "3"]) == 2
    assert "hidden_size is 128; with num_heads 3" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_default_cache_follows_the_desktop_convention(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ensure_tiny_model(**SMALL).parent == tmp_path / "telescope"


def test_an_interrupted_build_reports_that_nothing_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("telescope.tiny_model.build.warm_start", Mock(side_effect=KeyboardInterrupt))
    assert cli.main(["tiny-model", "--output", str(tmp_path / "model")]) == 130
    assert "is not kept" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
