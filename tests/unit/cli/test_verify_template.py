"""`telescope verify --template`, and what ends an answer in `telescope chat`, with a released tokenizer."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests import released

from telescope.cli.chat import find_stops
from telescope.cli.main import main
from telescope.config import TelescopeConfig

WORDLE = "environments: [{name: wordle, kwargs: {max_turns: 3}}]\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The tokenizer of a Qwen base model."""
    place = tmp_path_factory.mktemp("qwen")
    return released.write_tokenizer(place, "qwen3", template="qwen2_5", eos_token="<|endoftext|>")


def verify(capsys, tmp_path: Path, *arguments: str) -> tuple[int, str, str]:
    (tmp_path / "run.yaml").write_text(WORDLE)
    code = main(["verify", "--template", "--config", str(tmp_path / "run.yaml"), *arguments])
    return code, *capsys.readouterr()


def test_a_conversation_is_printed_with_its_trained_tokens_and_stops(capsys, tmp_path, folder):
    code, out, _ = verify(capsys, tmp_path, "--model", str(folder))
    assert code == 0
    assert "The answers are a fixed probe text, not the model's words." in out
    assert "<|im_end|>, id 151645, from chat template; <|endoftext|>, id 151643, from tokenizer" in out
    assert "[[<think>\nThe first thought.\n</think>\n\nThe first answer.<|im_end|>]]\n<|im_start|>user\n" in out
    assert out.count("[[The last answer.<|im_end|>]]") == 1 and "--- fork" not in out


def test_a_fork_and_a_lost_message_are_named(capsys, tmp_path, folder):
    code, out, _ = verify(capsys, tmp_path, "--model", str(folder), "--interleaved_rollouts", "false")
    assert code == 0 and "--- fork (interleaved_rollouts: false)" in out
    template = "{% for m in messages[:1] %}{{ m.content }}<|im_end|>{% endfor %}"
    code, out, err = verify(capsys, tmp_path, "--model", str(folder), "--chat_template", template)
    assert code == 2 and "[[<think>" in out
    assert "leaves out the message of 'assistant' (message 2 of 5), which the environment 'wordle' sends" in err


def test_a_chat_ends_answers_as_training_does(folder):
    config = TelescopeConfig(model="a run", environments=[{"name": "countdown"}], stop=["\nUser:"])
    target = SimpleNamespace(model_files_folder=lambda: folder)
    assert find_stops(config, target) == {"stop_token_ids": [151_645, 151_643], "stop": ["\nUser:"]}
