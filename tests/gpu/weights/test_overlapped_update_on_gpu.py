"""Background syncs into a real vLLM server on a GPU, with CUDA graphs: the claims of the CPU's test, over NCCL from
another GPU and over host memory from the same one. Run by hand on GPUs.
"""

from collections.abc import Iterator

import pytest
import torch
from tests.integration.weights.test_overlapped_update_on_vllm import (
    kill_in_a_background_sync,
    test_after_a_background_sync_the_engine_computes_with_the_new_weights,
    test_an_overlapped_transfer_that_failed_changes_nothing_and_the_next_one_repairs_it,
    test_the_engine_samples_from_the_old_weights_until_the_swap,
    test_the_probe_names_the_tensors_of_a_corrupted_overlapped_sync_and_the_next_sync_repairs_it,
)
from tests.integration.weights.vllm_server import Server, make_model, serving

__all__ = [
    "test_after_a_background_sync_the_engine_computes_with_the_new_weights",
    "test_an_overlapped_transfer_that_failed_changes_nothing_and_the_next_one_repairs_it",
    "test_the_engine_samples_from_the_old_weights_until_the_swap",
    "test_the_probe_names_the_tensors_of_a_corrupted_overlapped_sync_and_the_next_sync_repairs_it",
]

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL refuses two ranks on one GPU")


@pytest.fixture(scope="module", params=[pytest.param("tied, NCCL", marks=two_gpus), "untied, one GPU"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One vLLM process per kind of model and transport."""
    folder = tmp_path_factory.mktemp("model")
    shared = "one GPU" in request.param
    last = torch.cuda.device_count() - 1
    model = make_model(folder, tied=request.param.startswith("tied"), num_heads=2).to(f"cuda:{last if shared else 0}")
    with serving(Server(model, folder, gpu=last, staged=shared)) as made:
        yield made


@pytest.mark.last_on_its_server
def test_killing_the_engine_in_the_middle_of_a_background_sync_is_an_error_at_once(server: Server) -> None:
    kill_in_a_background_sync(server)
