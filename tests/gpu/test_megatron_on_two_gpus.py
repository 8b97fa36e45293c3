"""Megatron's ranks over NCCL, and FSDP's ranks that share rows. Run by hand on a machine with two GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.test_megatron_on_gpu import FAMILIES
from tests.integration.trainer.test_gradient_contract import reference_gradient
from tests.integration.trainer.test_megatron import (
    CASES,
    LENGTHS,
    RESUMED,
    TEMPERATURE,
    config_of,
    full_gradient,
    resumed_job,
    steps_job,
)
from tests.integration.trainer.trainer_cases import (
    Job,
    build_model,
    by_checkpoint_name,
    make_config,
    make_samples,
    relative_error,
    run_ranks,
)

from telescope.utils.packages import is_installed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.skipif(not is_installed("megatron.core"), reason="needs megatron-core: make setup MEGATRON=1"),
]

SHARED_ROWS = "FSDP with shared rows"
DEADLINE_SECONDS = 400
GRADIENT_BOUND = 1e-4
"""As on one GPU: float32, and rotary angles whose cosines are rounded differently on the two devices."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: build_model(root / name, **changes) for name, changes in FAMILIES.items()}


@pytest.fixture(scope="module")
def results(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Any]]:
    """By kind of job and case: what each rank returned."""
    root = tmp_path_factory.mktemp("ranks")
    jobs: dict[tuple[str, str], Job] = {}
    for case, (model, changes) in CASES.items():
        jobs["gradient", case] = (full_gradient, config_of(models[model], device="cuda", **changes), ())
    shared = make_config(
        models["llama"], device="cuda", model_dtype="float32", temperature=TEMPERATURE, fsdp_context_parallel_size=2
    )
    jobs["gradient", SHARED_ROWS] = (full_gradient, shared, ())
    for case, (model, changes) in RESUMED.items():
        folder = root / case.replace(" ", "_")
        folder.mkdir()
        config = config_of(models[model], device="cuda", **changes)
        jobs["straight", case] = (steps_job, config, (folder,))
        jobs["resumed", case] = (resumed_job, config, (folder,))
    found = run_ranks(list(jobs.values()), num_ranks=2, folder=root / "results", seconds=DEADLINE_SECONDS)
    return dict(zip(jobs, found, strict=True))


@pytest.mark.parametrize("case", [*CASES, SHARED_ROWS])
def test_the_float32_gradient_over_nccl_equals_that_of_transformers(results, models, case):
    model = models[CASES[case][0] if case in CASES else "llama"]
    wanted = reference_gradient(model, make_samples(LENGTHS), TEMPERATURE)
    if case in CASES:
        wanted = by_checkpoint_name(model, wanted)
    for rank in results["gradient", case]:
        error = relative_error(rank, wanted)
        print(f"{case}: {error:.3g}")
        assert error < GRADIENT_BOUND


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_over_nccl_equals_a_straight_one_bit_for_bit(results, case):
    for straight, resumed in zip(results["straight", case], results["resumed", case], strict=True):
        for name, tensor in straight["weights"].items():
            assert torch.equal(tensor, resumed["weights"][name]), name
