"""A tokenizer for the fake engine's ids."""

import pytest
from tests.integration.orchestrator.harness import Ground

from telescope.tiny_model.build import build_tokenizer


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """A folder with a small tokenizer and chat template, as `model` wants one."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(["item 1 2 3", "12 7 3 -> 22"] * 4, 384).save_pretrained(folder)
    return Ground(folder)
