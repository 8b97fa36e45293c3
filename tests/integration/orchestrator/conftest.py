"""A tokenizer for the fake engine's ids, and one fork server for the environments of all runs."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.integration.orchestrator.harness import Ground

from telescope.rollout.rendering import RendererSpec
from telescope.rollout.worker_pool.launcher import Launcher
from telescope.tiny_model.build import build_tokenizer


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def ground(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ground]:
    """A folder with a small tokenizer and chat template, as `model` wants one, and a fork server that has loaded it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(["item 1 2 3", "12 7 3 -> 22"] * 4, 384).save_pretrained(folder)
    launcher = Launcher(RendererSpec(tokenizer_path=str(folder)), tmp_path_factory.mktemp("server"))
    await launcher.start(120)
    yield Ground(folder, launcher)
    await launcher.close()
