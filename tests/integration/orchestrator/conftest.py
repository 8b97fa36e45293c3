"""A tokenizer for the fake engine's ids; made once."""

from pathlib import Path

import pytest

from telescope.tiny_model.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small tokenizer and chat template, as `model` wants one."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(["item 1 2 3", "12 7 3 -> 22"] * 4, 384).save_pretrained(folder)
    return folder
