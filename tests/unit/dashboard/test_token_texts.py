"""Texts of single tokens for the dashboard."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from telescope.dashboard.rollouts import find_tokenizer, token_texts


def write_tokenizer(folder: Path) -> Path:
    folder.mkdir(parents=True)
    words = {"▁the": 0, "▁answer": 1, "s": 2, "<end>": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_tokens_keep_the_blank_before_a_word(tmp_path):
    path = write_tokenizer(tmp_path / "model")
    texts = token_texts(path, [0, 1, 2])
    assert "".join(texts).lstrip() == "the answers"
    assert texts[1:] == [" answer", "s"]


def test_the_run_directory_comes_before_the_model_of_the_config(tmp_path):
    own = write_tokenizer(tmp_path / "run" / "model")
    other = write_tokenizer(tmp_path / "base")
    assert find_tokenizer(tmp_path / "run", str(other.parent)) == own
    assert find_tokenizer(tmp_path / "elsewhere", str(other.parent)) == other


def test_a_model_that_is_not_on_this_machine_has_no_tokenizer(tmp_path):
    assert find_tokenizer(tmp_path, "nobody/no-such-model-here") is None
    assert find_tokenizer(tmp_path, "/no/such/folder") is None
    assert find_tokenizer(tmp_path, None) is None


def test_a_damaged_tokenizer_gives_no_texts(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    assert token_texts(tmp_path / "tokenizer.json", [1]) is None
