"""Megatron's ranks compute what transformers and the FSDP backend compute, however the model is divided."""

import functools
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.trainer.test_gradient_contract import reference_gradient
from tests.integration.trainer.trainer_cases import (
    build_model,
    by_checkpoint_name,
    make_config,
    make_samples,
    relative_error,
    run_here,
    run_ranks,
    step_gradient,
    weights,
    write_meta,
)
from transformers import AutoModelForCausalLM

from telescope.errors import RunError, UserError
from telescope.orchestrator.conversion import convert
from telescope.trainer.batch import StepInput
from telescope.trainer.checkpoint_names import checkpoint_tensors
from telescope.trainer.logprob import logprobs_of_part
from telescope.trainer.packing import pack_step
from telescope.trainer.self_check import GradientComparison, compare_gradients
from telescope.trainer.worker import Trainer
from telescope.utils.digests import damage

LENGTHS = [5, 31, 12, 7, 2, 28, 19, 3, 16, 9, 24, 11]
STEPS = (0, 2, 3)
"""Of the schedule: one that warms up, the peak, one that decays."""
TEXT = [1, 5, 9, 2, 60, 33]
TEMPERATURE = 0.7

TP, PP, CP, EP = (f"megatron_{kind}_parallel_size" for kind in ("tensor", "pipeline", "context", "expert"))
SEQUENCE, OPTIMIZER = "megatron_sequence_parallel", "megatron_use_distributed_optimizer"
RECOMPUTE, OVERLAP = "megatron_gradient_checkpointing", "megatron_overlap_grad_reduce"
FREE_BUFFERS = "weight_broadcast_free_grad_buffers"

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("qwen2", {}),
    "tp2": ("qwen2", {TP: 2}),
    "tp2 with sequence parallel": ("tied", {TP: 2, SEQUENCE: True}),
    "pp2": ("llama", {PP: 2}),
    "pp2 tied": ("tied", {PP: 2}),
    "cp2": ("qwen3", {CP: 2}),
    "ep2": ("experts", {EP: 2}),
    "tp2 with ep2": ("experts", {TP: 2, EP: 2, SEQUENCE: True}),
    "recomputation": ("qwen3", {TP: 2, SEQUENCE: True, RECOMPUTE: True}),
    # Megatron fails if it waits for a reduction that no backward pass has started.
    "dp2 with overlapped reduction": ("qwen2", {OVERLAP: True}),
    "ep2 with overlapped reduction": ("experts", {EP: 2, OVERLAP: True}),
}
"""The model and the division of each case."""

RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2 with distributed optimizer": ("qwen2", {OPTIMIZER: True}),
    "tp2": ("tied", {TP: 2, SEQUENCE: True}),
    "pp2": ("qwen2", {PP: 2}),
    "ep2 with distributed optimizer": ("experts", {EP: 2, OPTIMIZER: True}),
}
DIVIDED_ANEW: dict[str, dict[str, Any]] = {
    "tp2": {PP: 2},
    "dp2 with distributed optimizer": {TP: 2},
    "ep2 with distributed optimizer": {TP: 2, SEQUENCE: True},
}
"""By a case of `RESUMED`: the division that its checkpoint is loaded into."""

TRAINED = RESUMED | {
    "cp2, ratios of whole samples": ("qwen3", {CP: 2, "algorithm": "gspo"}),
    "tp2 with ep2": ("experts", {TP: 2, EP: 2, SEQUENCE: True}),
    "recomputation, gradients kept during syncs": ("qwen2", {TP: 2, RECOMPUTE: True, FREE_BUFFERS: False}),
}
"""The cases that train three steps."""

FOUR_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2 with pp2": ("tied", {TP: 2, PP: 2, SEQUENCE: True}),
    "pp2 with cp2": ("llama", {PP: 2, CP: 2}),
    "cp2 with ep2": ("experts", {CP: 2, EP: 2}),
    "dp2 with tp2": ("qwen2", {TP: 2, OPTIMIZER: True}),
}

LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tied": False},
    "tied": {"family": "qwen3", "tied": True, "pad_token_id": 3},
    "qwen3": {"family": "qwen3", "tied": False, "pad_token_id": 3},
    "llama": {"family": "llama", "tied": False, "rope_parameters": LLAMA_3},
    "experts": {"family": "qwen3_moe", "tied": False},
}


def config_of(model: str, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "train_backend": "megatron", "model_dtype": "float32", "temperature": TEMPERATURE,
        "lr_scheduler": "cosine", "warmup_steps": 2, "number_of_steps": 6,
        "weight_decay": 0.1, "grad_clip": 0.05, FREE_BUFFERS: True,
        SEQUENCE: False, OPTIMIZER: False, RECOMPUTE: False,
    }  # fmt: skip
    return make_config(model, **(options | changes))


def packed(trainer: Trainer, step: int, seq_len: int = 64) -> StepInput:
    layout = trainer.backend.layout
    samples = make_samples(LENGTHS, seed=step)
    return pack_step(samples, step=step, version=step, seq_len=seq_len, num_ranks=layout.data_size)[layout.data_rank]


def two_packings(trainer: Trainer) -> GradientComparison:
    return compare_gradients(trainer.backend, packed(trainer, 0), packed(trainer, 0, seq_len=40))


def full_gradient(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The gradient of the first step, by Hugging Face name."""
    return step_gradient(trainer, packed(trainer, 0))


def gradient_job(trainer: Trainer) -> dict[str, Any]:
    """The gradient of one optimizer step, and the backend's weights, names and logprobs."""
    backend: Any = trainer.backend
    return {
        "two_packings": two_packings(trainer),
        "gradient": full_gradient(trainer),
        "weights": weights(trainer),
        "metadata": [(meta.name, meta.shape) for meta in backend.weight_metadata()],
        "logprobs": backend.sequence_logprobs(TEXT, TEMPERATURE),
        "vocabulary": divided_vocabulary(backend.parallel.tp),
    }


def divided_vocabulary(group: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logprobs, entropies and gradients in float64, with this rank's part of 37 ids and with all of them."""
    generator = torch.Generator().manual_seed(0)
    hidden_ND, table_VD = (torch.randn(size, 8, generator=generator, dtype=torch.float64) for size in (10, 37))
    targets_N = torch.randint(0, 37, (10,), generator=generator)
    weights_N = torch.linspace(-1.0, 2.0, 10, dtype=torch.float64)
    size = -(-40 // group.size())  # three rows of padding
    padded_VD = torch.cat([table_VD, torch.full((3, 8), 9.0, dtype=torch.float64)])
    own = slice(group.rank() * size, (group.rank() + 1) * size)

    def results(logprob_N: torch.Tensor, entropy_N: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
        total = (weights_N * logprob_N + weights_N.flip(0) * entropy_N).sum()
        return [logprob_N.detach(), entropy_N.detach(), *torch.autograd.grad(total, inputs)]

    hidden, part = hidden_ND.clone().requires_grad_(), padded_VD[own].clone().requires_grad_()
    found = results(*logprobs_of_part(hidden, part, targets_N, 0.7, 3, group, 37), hidden, part)
    torch.distributed.all_reduce(found[2], group=group)  # of the hidden states each rank has a share
    hidden, whole = hidden_ND.clone().requires_grad_(), padded_VD.clone().requires_grad_()
    logp_NV = (hidden @ whole[:37].t() / 0.7).log_softmax(dim=-1)
    entropy_N = -(logp_NV.exp() * logp_NV).sum(dim=-1)
    wanted = results(logp_NV.gather(1, targets_N[:, None]).squeeze(1), entropy_N, hidden, whole)
    return found, [*wanted[:3], wanted[3][own]]


def steps_job(trainer: Trainer, folder: Path | None = None) -> dict[str, Any]:
    """Three training steps after a warm-up, which leaves no trace, with a checkpoint after the second."""
    trainer.warm_up()
    metrics, gradient_bytes = [], []
    for step in STEPS:
        if step == STEPS[-1] and folder is not None:
            trainer.save_checkpoint(2, folder)
            digests = trainer.finish_checkpoint()
            assert digests or trainer.rank, "of the files of this rank"
            assert not damage(folder, digests)
        metrics.append(trainer.train_step(packed(trainer, step)).metrics)
        weights(trainer)  # as for the servers
        gradient_bytes.append(bytes_of_gradients(trainer))
    return {"weights": weights(trainer), "metrics": metrics, "gradient_bytes": gradient_bytes}


def bytes_of_gradients(trainer: Trainer) -> int:
    """The memory of Megatron's gradient buffers."""
    ddp = getattr(trainer.backend, "ddp", None)
    buffers = [] if ddp is None else [*ddp.buffers, *ddp.expert_parallel_buffers]
    return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)


def resumed_job(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """The third step, from a checkpoint after the second."""
    trainer.backend.load_checkpoint(2, folder)
    loaded = weights(trainer)
    trainer.train_step(packed(trainer, STEPS[-1]))
    return {"loaded": loaded, "weights": weights(trainer), "two_packings": two_packings(trainer)}


def refused_job(trainer: Trainer, folder: Path) -> str:
    """The error of a checkpoint that another optimizer wrote."""
    try:
        trainer.backend.load_checkpoint(2, folder)
    except RunError as error:
        return str(error)
    return "loaded"


def full_disk_job(trainer: Trainer, folder: Path) -> str:
    """The error of a checkpoint that does not fit on the disk, after which the ranks go on."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        trainer.save_checkpoint(2, folder)
    except OSError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        weights(trainer)
    return "saved"


@dataclass
class Results:
    """By case: what `gradient_job`, `steps_job` and `resumed_job` returned on each rank."""

    gradient: dict[str, list[Any]]
    trained: dict[str, list[Any]]
    resumed: dict[str, list[Any]]
    divided_anew: dict[str, list[Any]]
    refused: list[str]
    full_disk: list[str]
    folders: dict[str, Path]


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {name: build_model(root / name, **changes) for name, changes in FAMILIES.items()}


@pytest.fixture(scope="module")
def results(families, tmp_path_factory):
    root = tmp_path_factory.mktemp("megatron")
    folders = {case: root / f"checkpoint {index}" for index, case in enumerate(RESUMED)}
    for folder in folders.values():
        folder.mkdir()
    jobs = [(gradient_job, config_of(families[model], **changes), ()) for model, changes in CASES.values()]
    for case, (model, changes) in TRAINED.items():
        jobs.append((steps_job, config_of(families[model], **changes), (folders.get(case),)))
    for case, (model, changes) in RESUMED.items():
        jobs.append((resumed_job, config_of(families[model], **changes), (folders[case],)))
    for case, changes in DIVIDED_ANEW.items():
        jobs.append((resumed_job, config_of(families[RESUMED[case][0]], **changes), (folders[case],)))
    jobs.append((refused_job, config_of(families["qwen2"]), (folders["dp2 with distributed optimizer"],)))
    (root / "full").mkdir()
    jobs.append((full_disk_job, config_of(families["qwen2"]), (root / "full",)))
    found = iter(run_ranks(jobs, num_ranks=2, folder=root / "ranks"))
    return Results(
        {case: next(found) for case in CASES},
        {case: next(found) for case in TRAINED},
        {case: next(found) for case in RESUMED},
        {case: next(found) for case in DIVIDED_ANEW},
        next(found),
        next(found),
        folders,
    )


@pytest.fixture(scope="module")
def by_fsdp(families):
    """Returns what three steps of the FSDP backend give on one rank, by model and algorithm."""

    @functools.cache
    def train(model: str, algorithm: str) -> dict[str, Any]:
        config = config_of(families[model], train_backend="fsdp", algorithm=algorithm)
        return run_here((steps_job, config, ()))

    return train


@pytest.mark.parametrize("case", CASES)
def test_gradient_equals_that_of_single_samples(results, families, case):
    model = families[CASES[case][0]]
    wanted = by_checkpoint_name(model, reference_gradient(model, make_samples(LENGTHS), TEMPERATURE))
    for rank in results.gradient[case]:
        assert relative_error(rank["gradient"], wanted) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_verify_finds_one_gradient_in_two_packings(results, families, case):
    reference = reference_gradient(families[CASES[case][0]], make_samples(LENGTHS), TEMPERATURE)
    norm = float(torch.stack([gradient.norm() for gradient in reference.values()]).norm())
    for rank in results.gradient[case]:
        assert rank["two_packings"].relative_error < 1e-5
        assert rank["two_packings"].norms == pytest.approx((norm, norm), rel=1e-5)


@pytest.mark.parametrize("case", RESUMED)
def test_verify_compares_gradients_that_the_optimizer_divides(results, case):
    for rank in results.resumed[case]:
        assert rank["two_packings"].relative_error < 1e-5
        assert rank["two_packings"].norms[0] > 0


@pytest.mark.parametrize("case", CASES)
def test_every_rank_yields_the_weights_of_the_checkpoint(results, families, case):
    model = AutoModelForCausalLM.from_pretrained(families[CASES[case][0]], dtype=torch.float32)
    wanted = dict(checkpoint_tensors(model))
    for rank in results.gradient[case]:
        assert rank["weights"].keys() == wanted.keys()
        assert all(torch.equal(rank["weights"][name], wanted[name]) for name in wanted)
        assert rank["metadata"] == [(name, tuple(tensor.shape)) for name, tensor in rank["weights"].items()]


@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_the_logprobs_of_transformers(results, families, case):
    model = AutoModelForCausalLM.from_pretrained(families[CASES[case][0]], dtype=torch.float32)
    with torch.no_grad():
        logp_LV = (model(torch.tensor([TEXT])).logits[0] / TEMPERATURE).log_softmax(dim=-1)
    wanted = logp_LV[:-1].gather(1, torch.tensor(TEXT[1:])[:, None]).squeeze(1).tolist()
    for rank in results.gradient[case]:
        assert rank["logprobs"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("case", ["tp2", "dp2"])
def test_logprobs_and_gradients_of_a_divided_vocabulary_are_exact(results, case):
    for rank in results.gradient[case]:
        torch.testing.assert_close(*rank["vocabulary"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", TRAINED)
def test_three_steps_give_the_weights_and_metrics_of_the_fsdp_backend(results, by_fsdp, case):
    model, changes = TRAINED[case]
    equals_fsdp(results.trained[case], by_fsdp(model, changes.get("algorithm", "grpo")))


def equals_fsdp(ranks: list[Any], fsdp: dict[str, Any]) -> None:
    """Checks that ranks have the weights and metrics of FSDP's rank, whose learning rate changed every step."""
    assert len({metrics["learning_rate"] for metrics in fsdp["metrics"]}) == 3
    for rank in ranks:
        assert relative_error(rank["weights"], fsdp["weights"]) < 1e-5
        for found, wanted in zip(rank["metrics"], fsdp["metrics"], strict=True):
            assert found.keys() == wanted.keys()
            counted = {name: value for name, value in wanted.items() if not name.startswith(("timing_", "micro_"))}
            assert {name: found[name] for name in counted} == pytest.approx(counted, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("case", TRAINED)
def test_a_sync_frees_the_gradients_unless_they_are_kept(results, case):
    for rank in results.trained[case]:
        assert all((num_bytes > 0) == ("kept" in case) for num_bytes in rank["gradient_bytes"])


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_equals_a_straight_one_bit_for_bit(results, case):
    for straight, resumed in zip(results.trained[case], results.resumed[case], strict=True):
        assert straight["weights"].keys() == resumed["weights"].keys()
        assert all(torch.equal(tensor, resumed["weights"][name]) for name, tensor in straight["weights"].items())


@pytest.mark.parametrize("case", DIVIDED_ANEW)
def test_a_checkpoint_loads_into_another_division_of_the_model(results, case):
    for found, wanted in zip(results.divided_anew[case], results.resumed[case], strict=True):
        assert all(torch.equal(found["loaded"][name], tensor) for name, tensor in wanted["loaded"].items())
        assert relative_error(found["weights"], wanted["weights"]) < 1e-6


def test_the_state_of_another_optimizer_is_refused_with_the_field(results):
    for error in results.refused:
        assert "set megatron_use_distributed_optimizer as in the run" in error


def test_a_checkpoint_that_the_disk_cannot_take_is_an_error_of_every_rank(results):
    assert "OSError" in results.full_disk[0]
    assert results.full_disk[1] != "saved"


@pytest.mark.parametrize("case", RESUMED)
def test_convert_reads_a_checkpoint_without_megatron(results, families, tmp_path, case):
    write_meta(results.folders[case], families[RESUMED[case][0]], train_backend="megatron")
    convert(results.folders[case], tmp_path / "hf")
    flipped = shutil.copytree(results.folders[case], tmp_path / "step_2") / "__0_0.distcp"
    flipped.write_bytes(bytes([*flipped.read_bytes()[:-1], flipped.read_bytes()[-1] ^ 1]))
    with pytest.raises(UserError, match=r"step_2 is damaged: __0_0.distcp has changed since it was written"):
        convert(flipped.parent, tmp_path / "damaged")
    found, wanted = load_file(tmp_path / "hf" / "model.safetensors"), results.resumed[case][0]["loaded"]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


@pytest.mark.slow
def test_four_ranks_that_divide_twice_train_like_one_of_the_fsdp_backend(families, by_fsdp, tmp_path):
    jobs = []
    for model, changes in FOUR_RANKS.values():
        # The distributed optimizer leaves each rank its part of the gradient.
        jobs.append((full_gradient, config_of(families[model], **(changes | {OPTIMIZER: False})), ()))
        jobs.append((steps_job, config_of(families[model], **changes), ()))
    found = iter(run_ranks(jobs, num_ranks=4, folder=tmp_path / "ranks"))
    for model, _ in FOUR_RANKS.values():
        reference = reference_gradient(families[model], make_samples(LENGTHS), TEMPERATURE)
        wanted = by_checkpoint_name(families[model], reference)
        for gradient in next(found):
            assert relative_error(gradient, wanted) < 1e-5
        equals_fsdp(next(found), by_fsdp(model, "grpo"))
