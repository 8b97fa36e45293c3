"""A vLLM server that several files of this folder share."""

from collections.abc import Iterator

import pytest
from tests.integration.weights.vllm_server import Server, make_model, serving


@pytest.fixture(scope="session")
def tied_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Takes weights in place. The last file that uses it kills it."""
    folder = tmp_path_factory.mktemp("tied")
    with serving(Server(make_model(folder, tied=True), folder)) as made:
        yield made
