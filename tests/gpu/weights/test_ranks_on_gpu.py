"""Dense models on tensor-parallel workers on GPUs, with CUDA graphs: the claims of the CPU's tests.

Run by hand on GPUs.
"""

from collections.abc import Iterator

import pytest
from tests.gpu.weights.test_experts_and_ranks_on_gpu import STAGED, case, on_gpus
from tests.integration.weights.test_experts_and_ranks_on_vllm import (
    test_a_transfer_that_failed_half_way_is_repaired_by_the_next_one,
    test_after_a_sync_the_engine_computes_with_the_new_weights,
    test_before_any_sync_it_samples_with_the_logprobs_of_the_model_that_it_loaded,
    test_every_worker_reports_why_it_is_updated_in_place,
    test_killing_a_worker_during_a_sync_fails_at_once_and_ends_its_server,
)
from tests.integration.weights.test_probe_on_vllm import (
    test_the_probe_names_the_tensors_of_a_corrupted_sync_and_the_next_sync_repairs_it,
)
from tests.integration.weights.vllm_server import Server, make_model, serving

__all__ = [
    "test_a_transfer_that_failed_half_way_is_repaired_by_the_next_one",
    "test_after_a_sync_the_engine_computes_with_the_new_weights",
    "test_before_any_sync_it_samples_with_the_logprobs_of_the_model_that_it_loaded",
    "test_every_worker_reports_why_it_is_updated_in_place",
    "test_killing_a_worker_during_a_sync_fails_at_once_and_ends_its_server",
    "test_the_probe_names_the_tensors_of_a_corrupted_sync_and_the_next_sync_repairs_it",
]

pytestmark = pytest.mark.gpu


@pytest.fixture(
    scope="module",
    params=[
        case(2, "tied", 2, STAGED),
        case(3, "tied", 2, "nccl"),
        case(3, "untied", 2, "nccl"),
        case(4, "untied", 4, STAGED),
        case(5, "untied", 4, "nccl"),
    ],
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One vLLM server per kind of embedding, number of workers and transport."""
    kind, workers, transport = request.param
    folder = tmp_path_factory.mktemp("ranks")
    # Qwen2, whose projections have biases: heads of 64 numbers, and of four workers two hold the same key and value
    # head.
    heads = max(2, workers)
    model = make_model(folder, tied=kind == "tied", num_heads=heads, hidden_size=64 * heads)
    with serving(on_gpus(model, folder, workers, transport)) as made:
        yield made
