"""Experts and tensor-parallel workers on GPUs, with CUDA graphs: the claims of the CPU's test, over NCCL from another
GPU and over host memory from one of the server's own. Run by hand on GPUs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.weights.test_experts_and_ranks_on_vllm import (
    test_a_failed_load_in_one_worker_fails_the_sync_and_closes_every_update,
    test_a_transfer_that_failed_half_way_is_repaired_by_the_next_one,
    test_after_a_sync_the_engine_computes_with_the_new_weights,
    test_before_any_sync_it_samples_with_the_logprobs_of_the_model_that_it_loaded,
    test_every_worker_reports_why_it_is_updated_in_place,
    test_killing_a_worker_during_a_sync_fails_at_once_and_ends_its_server,
    test_the_probe_names_the_wrong_tensors_of_one_worker_and_the_next_sync_repairs_it,
)
from tests.integration.weights.vllm_server import Server, make_model, serving
from transformers import PreTrainedModel

__all__ = [
    "test_a_failed_load_in_one_worker_fails_the_sync_and_closes_every_update",
    "test_a_transfer_that_failed_half_way_is_repaired_by_the_next_one",
    "test_after_a_sync_the_engine_computes_with_the_new_weights",
    "test_before_any_sync_it_samples_with_the_logprobs_of_the_model_that_it_loaded",
    "test_every_worker_reports_why_it_is_updated_in_place",
    "test_killing_a_worker_during_a_sync_fails_at_once_and_ends_its_server",
    "test_the_probe_names_the_wrong_tensors_of_one_worker_and_the_next_sync_repairs_it",
]

pytestmark = pytest.mark.gpu
STAGED = "staged"


def case(num_gpus: int, *values: object) -> Any:
    """Parameters of a server that needs so many GPUs, its trainer's included."""
    few = torch.cuda.device_count() < num_gpus
    return pytest.param(
        values, id="-".join(map(str, values)), marks=pytest.mark.skipif(few, reason=f"needs {num_gpus} GPUs")
    )


def on_gpus(model: PreTrainedModel, folder: Path, workers: int, transport: str) -> Server:
    """A server on the last `workers` GPUs. Its trainer is on the first GPU, or with `STAGED` on the last beside a
    worker: NCCL does not connect two processes there, so weights travel through host memory.
    """
    last, staged = torch.cuda.device_count() - 1, transport == STAGED
    return Server(model.to(f"cuda:{last if staged else 0}"), folder, gpu=last, staged=staged, tensor_parallel=workers)


@pytest.fixture(
    scope="module",
    params=[
        case(1, "untied", 1, STAGED), case(2, "tied", 1, "nccl"), case(3, "tied", 2, "nccl"),
        case(3, "untied", 2, "nccl"), case(4, "untied", 4, STAGED), case(5, "untied", 4, "nccl"),
    ],
)  # fmt: skip
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One vLLM server per kind of embedding, number of workers and transport."""
    kind, workers, transport = request.param
    folder = tmp_path_factory.mktemp("experts")
    # Two key and value heads: four workers repeat them.
    model = make_model(folder, tied=kind == "tied", architecture="qwen3_moe", head_dim=64, expert_size=128)
    with serving(on_gpus(model, folder, workers, transport)) as made:
        yield made
