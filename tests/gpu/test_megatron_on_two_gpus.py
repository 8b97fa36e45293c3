"""Megatron's ranks over NCCL, and FSDP's ranks that share rows. Run by hand on a machine with two GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.test_megatron_on_gpu import FAMILIES, SHAPE
from tests.integration.trainer.test_gradient_contract import reference_gradient
from tests.integration.trainer.test_megatron import (
    CP,
    EP,
    LENGTHS,
    OPTIMIZER,
    PP,
    RECOMPUTE,
    SEQUENCE,
    TEMPERATURE,
    TP,
    config_of,
    full_gradient,
    packed,
    resumed_job,
    steps_job,
)
from tests.integration.trainer.trainer_cases import (
    Job,
    build_model,
    gradients,
    make_config,
    make_samples,
    relative_error,
    run_ranks,
)

from telescope.trainer.loss import denominator
from telescope.trainer.metrics import StepMetrics
from telescope.trainer.model import checkpoint_tensors
from telescope.trainer.timeline import Timeline
from telescope.trainer.worker import Trainer
from telescope.utils.process import is_installed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.skipif(not is_installed("megatron.core"), reason="needs megatron-core: make setup MEGATRON=1"),
]

DIVISIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("qwen2", {}),
    "tp2": ("qwen2", {TP: 2}),
    "tp2 with sequence parallel": ("qwen3", {TP: 2, SEQUENCE: True}),
    "pp2": ("llama", {PP: 2}),
    "pp2 tied": ("qwen3", {PP: 2}),
    "cp2": ("llama", {CP: 2}),
    "ep2": ("experts", {EP: 2}),
    "tp2 with ep2": ("experts", {TP: 2, EP: 2, SEQUENCE: True}),
    "recomputation": ("qwen3", {TP: 2, SEQUENCE: True, RECOMPUTE: True}),
}
RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2 with distributed optimizer": ("qwen2", {OPTIMIZER: True}),
    "tp2": ("qwen3", {TP: 2, SEQUENCE: True}),
    "pp2": ("llama", {PP: 2}),
    "ep2 with distributed optimizer": ("experts", {EP: 2, OPTIMIZER: True}),
}
SHARED_ROWS = "FSDP with shared rows"
DEADLINE_SECONDS = 400
GRADIENT_BOUND = 1e-4
"""As on one GPU: float32, and rotary angles whose cosines are rounded differently on the two devices."""


def shared_rows_job(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The gradient of one optimizer step by FSDP."""
    backend: Any = trainer.backend
    (batch,) = packed(trainer, 0).minibatches
    backend.accumulate(batch, 0, Timeline(backend.device, trainer.rank), StepMetrics(backend.device))
    divisor = denominator(backend.algorithm, batch, trainer.config)
    return {name: gradient / divisor for name, gradient in gradients(trainer).items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: build_model(root / name, **(SHAPE | changes)) for name, changes in FAMILIES.items()}


@pytest.fixture(scope="module")
def results(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Any]]:
    """By kind of job and case: what each rank returned."""
    root = tmp_path_factory.mktemp("ranks")
    jobs: dict[tuple[str, str], Job] = {}
    for case, (model, changes) in DIVISIONS.items():
        jobs["gradient", case] = (full_gradient, config_of(models[model], device="cuda", **changes), ())
    shared = make_config(
        models["llama"], device="cuda", model_dtype="float32", temperature=TEMPERATURE, fsdp_context_parallel_size=2
    )
    jobs["gradient", SHARED_ROWS] = (shared_rows_job, shared, ())
    for case, (model, changes) in RESUMED.items():
        folder = root / case.replace(" ", "_")
        folder.mkdir()
        config = config_of(models[model], device="cuda", **changes)
        jobs["straight", case] = (steps_job, config, (folder,))
        jobs["resumed", case] = (resumed_job, config, (folder,))
    found = run_ranks(list(jobs.values()), num_ranks=2, folder=root / "results", seconds=DEADLINE_SECONDS)
    return dict(zip(jobs, found, strict=True))


@pytest.mark.parametrize("case", [*DIVISIONS, SHARED_ROWS])
def test_the_float32_gradient_over_nccl_equals_that_of_transformers(results, models, case):
    model = models[DIVISIONS[case][0] if case in DIVISIONS else "llama"]
    wanted = reference_gradient(model, make_samples(LENGTHS), TEMPERATURE)
    if case in DIVISIONS:
        wanted = {part: tensor for name, grad in wanted.items() for part, tensor in checkpoint_tensors(name, grad)}
    for rank in results["gradient", case]:
        error = relative_error(rank, wanted)
        print(f"{case}: {error:.3g}")
        assert error < GRADIENT_BOUND


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_over_nccl_equals_a_straight_one_bit_for_bit(results, case):
    for straight, resumed in zip(results["straight", case], results["resumed", case], strict=True):
        for name, tensor in straight["weights"].items():
            assert torch.equal(tensor, resumed["weights"][name]), name
