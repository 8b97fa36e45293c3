"""One-rank trainers in the test's own process, and the models they load."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.trainer.plain_kernels import PlainKernels, use_plain_kernels
from tests.integration.trainer.trainer_cases import build_model, make_config, set_up_quickly
from tests.processes import free_port

from telescope.trainer.worker import Trainer


@pytest.fixture(scope="session", autouse=True)
def quick_trainers() -> None:
    set_up_quickly()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of models: Qwen2 `tied` and `untied`, the same of a family that is float64 throughout, and `experts`."""
    root: Path = tmp_path_factory.mktemp("trainer_models")
    return {
        "tied": build_model(root / "tied", tied=True),
        "untied": build_model(root / "untied", tied=False),
        "tied64": build_model(root / "tied64", family="starcoder2", tied=True),
        "experts": build_model(root / "experts", family="qwen3_moe", tied=False),
        "untied64": build_model(root / "untied64", family="starcoder2", tied=False),
    }


@pytest.fixture
def one_rank(models: dict[str, str]) -> Iterator[Callable[..., Trainer]]:
    """Makes a set-up trainer of one rank from config changes; the process group ends with the test."""
    made: list[Trainer] = []

    def make(model: str = "tied64", **changes: Any) -> Trainer:
        for trainer in made:
            trainer.shutdown()
        trainer = Trainer(make_config(models[model], **changes), 0, 1, "127.0.0.1", free_port())
        made.append(trainer)
        trainer.setup()
        return trainer

    yield make
    for trainer in made:
        trainer.shutdown()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> PlainKernels:
    """Trainers of this test compile their blocks; counts how often attention's kernels are called."""
    return use_plain_kernels(monkeypatch)
