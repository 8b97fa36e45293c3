"""The Megatron backend on one GPU, with and without Transformer Engine. Run by hand: `pytest tests/gpu`.

Every test trains models of its own: a failure hides no other. `pytest -s` shows the measured differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.trainer.test_gradient_contract import reference_gradient
from tests.integration.trainer.test_megatron import FAMILIES as FAMILIES_ON_CPU
from tests.integration.trainer.test_megatron import (
    LENGTHS,
    TEMPERATURE,
    TEXT,
    config_of,
    full_gradient,
    resumed_job,
    steps_job,
)
from tests.integration.trainer.trainer_cases import (
    build_model,
    by_checkpoint_name,
    make_samples,
    relative_error,
    run_here,
    weights,
    write_meta,
)
from transformers import AutoModelForCausalLM

from telescope.config.megatron import TRANSFORMER_ENGINE
from telescope.orchestrator.conversion import convert
from telescope.trainer.worker import Trainer
from telescope.utils.packages import installed_version, is_installed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not is_installed("megatron.core"), reason="needs megatron-core: make setup MEGATRON=1"),
]
needs_engine = pytest.mark.skipif(
    not all(map(installed_version, TRANSFORMER_ENGINE)), reason="needs Transformer Engine, see docs/gpu.md"
)

SHAPE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "initializer_range": 0.08,
}  # fmt: skip
"""Sizes that real kernels take, and weights small enough that attention does not saturate."""
FAMILIES = {
    name: SHAPE | changes | ({"moe_intermediate_size": 128} if name == "experts" else {})
    for name, changes in FAMILIES_ON_CPU.items()
}

ENGINE = {"megatron_use_transformer_engine": True}
ONE_ROUNDING = 2**-8
"""Largest relative difference of neighbors in bfloat16: the halves of the optimizer have different kernels of Adam."""
FP8 = ENGINE | {"megatron_fp8": True}
BFLOAT16 = {"mixed_precision_dtype": "bfloat16"}
OFFLOAD = BFLOAT16 | {"megatron_optimizer_cpu_offload": True}
PRECISION_AWARE = BFLOAT16 | ENGINE | {"megatron_use_precision_aware_optimizer": True}
MOMENTS = {"megatron_exp_avg_dtype": "bfloat16", "megatron_exp_avg_sq_dtype": "bfloat16"}
SMALL_STATES = {"megatron_main_params_dtype": "float16", "megatron_exp_avg_dtype": "fp8"}
SMALL_GRADIENTS = {"megatron_main_grads_dtype": "bfloat16", "megatron_grad_reduce_in_fp32": False}

TF32_BOUND = 1e-2
"""Transformer Engine multiplies float32 in TF32, with 10 bits after the first."""
BFLOAT16_BOUND = 0.05
FP8_LOGPROB_BOUND = 0.3
"""Rounding blocks to E4M3, emulated on the CPU in these models, changes logprobs by 0.14 to 0.20 in the mean."""
FP8_BOUND = 0.4
"""The same emulation changes the gradient by 0.20 to 0.23."""


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Returns the path of a family's model."""
    root = tmp_path_factory.mktemp("models")

    def path(family: str) -> str:
        folder = root / family
        return str(folder) if folder.exists() else build_model(folder, **FAMILIES[family])

    return path


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def run(job: Callable[..., Any], model: str, changes: dict[str, Any], *arguments: Any) -> Any:
    return run_here((job, config_of(model, device="cuda", **changes), arguments))


def gradient_and_weights(trainer: Trainer) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return full_gradient(trainer), weights(trainer)


def logprobs(trainer: Trainer) -> torch.Tensor:
    return torch.tensor(trainer.backend.sequence_logprobs(TEXT * 4, TEMPERATURE))


def states_after_three_steps(trainer: Trainer) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.dtype]]]:
    """The weights, and the dtypes of the optimizer's states by parameter."""
    from telescope.trainer.backends.megatron.optimizer import inner_optimizers

    backend: Any = trainer.backend
    found = steps_job(trainer)["weights"]
    dtypes = [
        {name: value.dtype for name, value in values.items() if torch.is_tensor(value)}
        for inner in inner_optimizers(backend.optimizer)
        for values in inner.optimizer.state.values()
    ]
    return found, dtypes


def report(what: str, value: float) -> float:
    print(f"{what}: {value:.3g}")
    return value


@pytest.mark.parametrize("family", FAMILIES)
def test_the_float32_gradient_equals_that_of_transformers(model_of, family):
    model = model_of(family)
    found, _ = run(gradient_and_weights, model, {})
    reference = reference_gradient(model, make_samples(LENGTHS), TEMPERATURE)
    wanted = by_checkpoint_name(model, reference)
    # megatron-core multiplies the router by Transformer Engine where that is installed, in TF32.
    rounds_router = family == "experts" and is_installed("transformer_engine")
    assert report("relative error", relative_error(found, wanted)) < (1e-3 if rounds_router else 1e-4)


@pytest.mark.parametrize("family", ["qwen3", "experts"])
def test_a_resumed_run_equals_a_straight_one_bit_for_bit(model_of, tmp_path, family):
    resumes_bit_for_bit(model_of(family), BFLOAT16, tmp_path)


def resumes_bit_for_bit(model: str, changes: dict[str, Any], folder: Path) -> None:
    straight = run(steps_job, model, changes, folder)["weights"]
    resumed = run(resumed_job, model, changes, folder)["weights"]
    differing = [name for name, tensor in straight.items() if not torch.equal(tensor, resumed[name])]
    assert not differing, report("relative error", relative_error(resumed, straight))


# --- the optimizer on the CPU ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_offloading_half_of_the_optimizer_changes_nothing(model_of, overlap):
    options = OFFLOAD | {"megatron_overlap_cpu_optimizer_d2h_h2d": overlap}
    on_gpu, half, plain = (
        run(steps_job, model_of("qwen3"), changes)["weights"]
        for changes in (
            options | {"megatron_optimizer_offload_fraction": 0.0},
            options | {"megatron_optimizer_offload_fraction": 0.5},
            BFLOAT16,
        )
    )
    assert report("fraction 0.5 and 0", relative_error(half, on_gpu)) < ONE_ROUNDING
    assert report("fraction 0.5 and no offload", relative_error(half, plain)) < ONE_ROUNDING


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_run_with_offload_resumes_bit_for_bit(model_of, tmp_path, fraction):
    resumes_bit_for_bit(model_of("qwen3"), OFFLOAD | {"megatron_optimizer_offload_fraction": fraction}, tmp_path)


# --- Transformer Engine ---------------------------------------------------------------------------------------------


@needs_engine
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "bound"), [({}, TF32_BOUND), (BFLOAT16, BFLOAT16_BOUND)], ids=["float32", "bfloat16"]
)
def test_transformer_engine_gives_the_same_gradient_and_weights(model_of, family, dtype, bound):
    wanted, wanted_weights = run(gradient_and_weights, model_of(family), dtype)
    found, found_weights = run(gradient_and_weights, model_of(family), dtype | ENGINE)
    assert found_weights.keys() == wanted_weights.keys()
    assert all(torch.equal(tensor, found_weights[name]) for name, tensor in wanted_weights.items())
    assert report("relative error", relative_error(found, wanted)) < bound


@needs_engine
@pytest.mark.parametrize("family", ["qwen3", "experts"])
@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])
def test_fp8_gives_nearly_the_logprobs_and_the_gradient_of_bfloat16(model_of, family, recompute):
    options = BFLOAT16 | {"megatron_gradient_checkpointing": recompute}
    wanted, found = (run(logprobs, model_of(family), options | changes) for changes in ({}, FP8))
    difference = (found - wanted).abs()
    report("largest difference of logprobs", float(difference.max()))
    assert 0 < report("mean difference of logprobs", float(difference.mean())) < FP8_LOGPROB_BOUND
    gradient, _ = run(gradient_and_weights, model_of(family), options)
    in_fp8, _ = run(gradient_and_weights, model_of(family), options | FP8)
    assert report("relative error of the gradient", relative_error(in_fp8, gradient)) < FP8_BOUND


@needs_engine
@pytest.mark.parametrize(
    ("changes", "dtypes"),
    [
        (MOMENTS, {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "master_param": torch.float32}),
        (SMALL_STATES, {"exp_avg_sq": torch.float32, "master_param": torch.float16}),
        (MOMENTS | SMALL_GRADIENTS, {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}),
    ],
    ids=["bfloat16 moments", "float16 weights, fp8 moment", "bfloat16 gradients"],
)
def test_the_precision_aware_optimizer_trains_with_its_dtypes(model_of, changes, dtypes):
    wanted = run(steps_job, model_of("qwen3"), BFLOAT16 | ENGINE)["weights"]
    found, states = run(states_after_three_steps, model_of("qwen3"), PRECISION_AWARE | changes)
    for state in states:
        assert {name: state[name] for name in dtypes} == dtypes
    start = AutoModelForCausalLM.from_pretrained(model_of("qwen3"), dtype=torch.bfloat16)
    before = {name: tensor.detach() for name, tensor in start.named_parameters() if name in wanted}
    steps = [
        {name: tensor.float() - before[name].float() for name, tensor in after.items()} for after in (found, wanted)
    ]
    assert report("relative error of the update", relative_error(*steps)) < 0.2


@needs_engine
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", ENGINE | BFLOAT16),
        ("experts", ENGINE | BFLOAT16),
        ("qwen3", FP8 | BFLOAT16),
        ("qwen3", PRECISION_AWARE | MOMENTS),
    ],
    ids=["bfloat16", "experts", "fp8", "bfloat16 moments"],
)
def test_a_run_with_transformer_engine_resumes_bit_for_bit(model_of, tmp_path, family, changes):
    resumes_bit_for_bit(model_of(family), changes, tmp_path)


@needs_engine
@pytest.mark.parametrize("family", ["qwen3", "experts"])
@pytest.mark.parametrize(
    ("saved_with", "loaded_with"), [(ENGINE, {}), ({}, ENGINE)], ids=["from the engine", "into the engine"]
)
def test_checkpoints_are_the_same_with_and_without_transformer_engine(
    model_of, tmp_path, family, saved_with, loaded_with
):
    model = model_of(family)
    run(steps_job, model, BFLOAT16 | saved_with, tmp_path)
    loaded = run(resumed_job, model, BFLOAT16 | loaded_with, tmp_path)["loaded"]
    write_meta(tmp_path, model, train_backend="megatron")
    convert(tmp_path, tmp_path / "hf")
    converted = load_file(tmp_path / "hf" / "model.safetensors")
    assert converted.keys() == loaded.keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in converted.items())
