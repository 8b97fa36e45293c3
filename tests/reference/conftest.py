"""The trainers and models of the trainer's integration tests, and a model for float32."""

from pathlib import Path

import pytest
from tests.integration.trainer.conftest import models as trainer_models  # noqa: F401
from tests.integration.trainer.conftest import one_rank, quick_trainers  # noqa: F401
from tests.integration.trainer.trainer_cases import build_model


@pytest.fixture(scope="session")
def models(trainer_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:  # noqa: F811
    """Beside the others `tied_calm`, with smaller weights.

    The weights of the others are so large that plain transformers in float32 differs from itself in float64 by up to
    9e-7, which would hide any other error.
    """
    folder: Path = tmp_path_factory.mktemp("reference_models")
    return trainer_models | {
        "tied_calm": build_model(folder / "tied_calm", family="starcoder2", tied=True, initializer_range=0.1)
    }
