"""Two ranks over gloo compute what one rank computes: gradients, metrics, weights, checkpoints."""

import os
import re
import resource
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.integration.trainer.trainer_cases import (
    gradients,
    make_config,
    make_samples,
    relative_error,
    run_here,
    run_ranks,
    weights,
    write_meta,
)

from telescope.orchestrator.conversion import convert
from telescope.trainer.backends.fsdp.checkpoint import missing_files
from telescope.trainer.metrics import StepMetrics
from telescope.trainer.packing import pack_step
from telescope.trainer.worker import Trainer
from telescope.utils.digests import digests_of
from telescope.utils.timeline import Timeline
from telescope.weights.model_folder import ModelOrigin, ModelSource, is_whole, read_origin

ORIGIN = ModelOrigin(ModelSource(2), run="first")

BATCHES = {
    "even": [5, 31, 12, 7, 2, 28, 19, 3, 16, 9, 24, 11],
    "dummy": [32, 32, 32, 3],  # three full rows and a short one on two ranks
    "lone": [20],  # one sample: the other rank has only a dummy
}
CHANGES = {"warmup_steps": 3, "weight_decay": 0.1, "grad_clip": 0.05}
TEXT = [1, 5, 9, 2, 60, 33]


@dataclass
class Compared:
    """Results of `whole_job` on one rank and by rank on two, and of `resume_job` on one."""

    one: dict[str, Any]
    two: list[dict[str, Any]]
    resumed: dict[str, torch.Tensor]
    folder: Path
    source: Path


def whole_job(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Everything that the claims below compare, from one set-up of the ranks."""
    backend: Any = trainer.backend
    found: dict[str, Any] = {"weights_before": weights(trainer)}
    for name, lengths in BATCHES.items():
        sums = StepMetrics(backend.device)
        mine = _packed(trainer, lengths, step=0)
        for minibatch in mine.minibatches:
            backend.accumulate(minibatch, 0, Timeline(backend.device, trainer.rank), sums)
        found[f"gradient_{name}"] = gradients(trainer)
        found[f"metrics_{name}"] = sums.reduce()
        found[f"dummies_{name}"] = sum(not row.sample_ids for mb in mine.minibatches for row in mb.micro_batches)
    results = [trainer.train_step(_packed(trainer, BATCHES["even"], step=step)) for step in range(2)]
    if trainer.world_size == 2:
        trainer.save_checkpoint(2, folder / "checkpoint")
        found["digests"] = trainer.finish_checkpoint()
    found["save_error"] = _save_without_space(trainer, folder / "hf")
    trainer.save_hf(folder / "hf", ORIGIN)
    found["weights_2"] = weights(trainer)
    results.append(trainer.train_step(_packed(trainer, BATCHES["even"], step=2)))
    found["weights_3"] = weights(trainer)
    found["weights_3_half"] = {name: tensor.clone() for name, tensor in trainer.named_weights(torch.bfloat16)}
    found["step_metrics"] = [result.metrics for result in results]
    found["spans"] = results[-1].spans
    found["metadata"] = trainer.backend.weight_metadata()
    found["logprobs"] = trainer.backend.sequence_logprobs(TEXT)
    if trainer.world_size == 2 and folder.parent.name == MODELS[0]:
        found["writers"] = _failures_of_writers(trainer, folder)
    return found


def _failures_of_writers(trainer: Trainer, folder: Path) -> list[str | None]:
    """The errors of four checkpoints: the second without memory on rank 1, the third after a writer was killed."""
    saver = trainer.backend.saver  # type: ignore[attr-defined]
    copy, errors = saver.copies.copy, []

    def fails(state: Any) -> Any:
        raise OSError("no shared memory")

    for step in range(4):
        if step == 2 and trainer.rank == 0:
            os.kill(saver._process.pid, signal.SIGKILL)
            saver._process.join()
        saver.copies.copy = fails if step == 1 and trainer.rank == 1 else copy
        directory = folder / f"step_{step}"
        try:
            trainer.save_checkpoint(step, directory)
            trainer.backend.finish_checkpoint()
            dist.barrier()
            errors.append("; ".join(missing_files(directory, "fsdp")) or None)
        except OSError as error:
            errors.append(str(error))
    return errors


def _save_without_space(trainer: Trainer, folder: Path) -> str | None:
    """The error of saving while no file may grow past 1,000 bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        trainer.save_hf(folder, ORIGIN)
    except OSError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return None


def resume_job(trainer: Trainer, folder: Path) -> dict[str, torch.Tensor]:
    """The third step again, from the checkpoint after the second. Then its weights once more, from weights alone."""
    optimizer: Any = trainer.backend.optimizer  # type: ignore[attr-defined]
    optimizer.param_groups[0]["weight_decay"] = 0.5
    trainer.backend.load_checkpoint(2, folder / "checkpoint")
    assert optimizer.param_groups[0]["weight_decay"] == 0.5, "as the config has it now"
    optimizer.param_groups[0]["weight_decay"] = trainer.config.weight_decay
    trainer.train_step(_packed(trainer, BATCHES["even"], step=2))
    trained = weights(trainer)
    if folder.parent.name != MODELS[0]:
        return trained
    trainer.config.checkpoint_save_training_state = False
    trainer.backend.save_checkpoint(3, folder / "weights_only")
    trainer.backend.finish_checkpoint()
    trainer.restart()
    assert relative_error(weights(trainer), trained) > 0
    trainer.backend.load_checkpoint(3, folder / "weights_only")
    assert relative_error(weights(trainer), trained) == 0
    assert not trainer.backend.optimizer.state, "a new optimizer"  # type: ignore[attr-defined]
    return trained


def _packed(trainer: Trainer, lengths: list[int], *, step: int):
    inputs = pack_step(
        make_samples(lengths, seed=step), step=step, version=0, seq_len=32, num_ranks=trainer.world_size,
        pad_to_multiple_of=8, num_minibatches=1 + step % 2,
    )  # fmt: skip
    return inputs[trainer.rank]


MODELS = ("tied64", "untied64")
EXPERTS = "experts"
"""In float32: parts of this model are, whatever its dtype."""


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory) -> dict[str, Compared]:
    """Each model on two ranks (new processes) and on one (this process)."""
    root = tmp_path_factory.mktemp("ranks")
    configs = {name: make_config(models[name], **CHANGES) for name in MODELS}
    configs[EXPERTS] = make_config(models[EXPERTS], **CHANGES, model_dtype="float32")
    on_two = run_ranks(
        [(whole_job, configs[name], (root / name / "two",)) for name in configs], num_ranks=2, folder=root / "results"
    )
    return {
        name: Compared(
            one=run_here((whole_job, configs[name], (root / name / "one",))),
            two=two,
            resumed=run_here((resume_job, configs[name], (root / name / "two",))),
            folder=root / name / "two",
            source=Path(models[name]),
        )
        for name, two in zip(configs, on_two, strict=True)
    }


@pytest.fixture(params=MODELS)
def both(request, runs) -> Compared:
    """The runs of one model."""
    return runs[request.param]


@pytest.mark.parametrize("batch", BATCHES)
def test_gradient_is_the_same_on_one_and_two_ranks(both, batch):
    one, two = both.one, both.two
    for rank in two:
        assert relative_error(rank[f"gradient_{batch}"], one[f"gradient_{batch}"]) < 1e-12


@pytest.mark.parametrize("batch", BATCHES)
def test_metrics_are_of_all_ranks_and_equal_on_each(both, batch):
    one, two = both.one, both.two
    assert two[0][f"metrics_{batch}"] == two[1][f"metrics_{batch}"]
    assert two[0][f"metrics_{batch}"] == pytest.approx(one[f"metrics_{batch}"], rel=1e-11)


def test_a_lone_sample_leaves_the_other_rank_a_dummy_and_nothing_hangs(both):
    assert sorted(rank["dummies_lone"] for rank in both.two) == [0, 1]
    assert sum(rank["dummies_even"] for rank in both.two) == 0


def test_three_clipped_steps_end_in_the_same_weights(both):
    one, two = both.one, both.two
    assert relative_error(two[0]["weights_3"], one["weights_3"]) < 1e-10
    assert relative_error(one["weights_3"], one["weights_before"]) > 1e-3


def test_reported_rate_is_the_one_used_and_the_norm_is_before_clipping(both):
    one, two = both.one, both.two
    assert [m["learning_rate"] for m in two[0]["step_metrics"]] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01])
    norms = [[metrics["grad_norm"] for metrics in rank["step_metrics"]] for rank in (*two, one)]
    assert norms[0] == norms[1] == pytest.approx(norms[2], rel=1e-9)
    assert min(norms[0]) > CHANGES["grad_clip"]
    assert [m["optimizer_steps"] for m in two[0]["step_metrics"]] == [1, 2, 1]


def test_full_weights_come_under_the_checkpoint_s_names_tied_ones_once(both):
    stored = load_file(both.source / "model.safetensors")
    found = both.two[1]["weights_before"]
    assert found.keys() == stored.keys()
    assert ("lm_head.weight" in found) == (both.source.name == "untied64")
    assert all(torch.equal(found[name], stored[name]) for name in stored)
    metadata = both.two[0]["metadata"]
    assert [(m.name, m.shape, m.dtype) for m in metadata] == [(n, tuple(t.shape), "float64") for n, t in found.items()]


def test_weights_that_are_cast_before_they_are_gathered_are_those_cast_after(both):
    for rank in (*both.two, both.one):
        assert rank["weights_3_half"].keys() == rank["weights_3"].keys()
        for name, whole in rank["weights_3"].items():
            assert torch.equal(rank["weights_3_half"][name], whole.to(torch.bfloat16))


def test_sequence_logprobs_agree_between_ranks(both):
    one, two = both.one, both.two
    assert two[0]["logprobs"] == two[1]["logprobs"] == pytest.approx(one["logprobs"], abs=1e-9)
    assert len(one["logprobs"]) == len(TEXT) - 1


def test_a_checkpoint_of_two_ranks_continues_identically_on_one(both):
    """Optimizer state and the step's learning rate included."""
    assert relative_error(both.resumed, both.two[0]["weights_3"]) < 1e-10


def test_each_rank_computes_the_digests_of_its_files(both):
    digests = [rank["digests"] for rank in both.two]
    assert [list(of_rank) for of_rank in digests] == [["__0_0.distcp"], ["__1_0.distcp"]]
    assert digests_of(both.folder / "checkpoint", ["__0_0.distcp", "__1_0.distcp"]) == digests[0] | digests[1]


def test_a_rank_without_memory_or_writer_costs_one_checkpoint_at_most(runs):
    first, second = (rank["writers"] for rank in runs[MODELS[0]].two)
    assert first == [None, "another rank could not copy its state", None, None]
    assert second == [None, "no shared memory", None, None]


def test_the_saved_hugging_face_checkpoint_has_the_trained_weights_and_their_origin(both):
    stored = load_file(both.folder / "hf" / "model.safetensors")
    assert relative_error(stored, both.two[0]["weights_2"]) == 0.0
    origin = read_origin(both.folder / "hf")
    assert (origin.run, origin.checkpoint.step) == ("first", 2)
    assert is_whole(both.folder / "hf", origin)


def test_a_checkpoint_of_two_ranks_is_converted_to_what_the_trainer_saves(both, tmp_path):
    write_meta(both.folder / "checkpoint", str(both.source))
    convert(both.folder / "checkpoint", tmp_path / "hf")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (both.folder / "hf" / name).read_bytes()


def test_experts_are_trained_alike_on_one_and_two_ranks_and_leave_one_by_one(runs):
    run = runs[EXPERTS]
    for batch in BATCHES:
        for rank in run.two:
            assert relative_error(rank[f"gradient_{batch}"], run.one[f"gradient_{batch}"]) < 1e-5
    assert relative_error(run.two[0]["weights_3"], run.one["weights_3"]) < 1e-4
    assert relative_error(run.resumed, run.two[0]["weights_3"]) < 1e-4
    source = load_file(run.source / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in source
    assert run.two[1]["weights_before"].keys() == source.keys()
    assert [(m.name, m.shape) for m in run.two[0]["metadata"]] == [
        (name, tuple(tensor.shape)) for name, tensor in run.two[0]["weights_before"].items()
    ]
    stored = load_file(run.folder / "hf" / "model.safetensors")
    assert relative_error(stored, run.two[0]["weights_2"]) == 0.0


def test_a_model_that_the_disk_cannot_take_is_one_error_and_the_ranks_go_on(both):
    for results, folder in ((both.two, both.folder), ([both.one], both.folder.parent / "one")):
        assert re.fullmatch(rf"{folder / 'hf'} needs [\d.e-]+ GiB: .*File too large.*", results[0]["save_error"])
        assert all(result["save_error"] is None for result in results[1:])
        assert (folder / "hf" / "model.safetensors").is_file(), "the second try succeeds"
        assert not list(folder.glob(".partial*"))
        assert len({path.stat().st_mode for path in (folder / "hf").iterdir()}) == 1, "all files have the same mode"


def test_timing_metrics_have_the_documented_names_and_spans_lie_on_one_clock(both):
    metrics, spans = both.two[0]["step_metrics"][-1], both.two[0]["spans"]
    operations = ("forward", "backward", "loss_computation", "compute_kl", "compute_entropy", "data_to_device")
    operations = (*operations, "prepare_tensors", "gradient_reduction")
    for operation in operations:
        assert metrics[f"timing_{operation}_total"] > 0
        mean = metrics[f"timing_{operation}_total"] / metrics["micro_batches"]
        assert metrics[f"timing_{operation}_microbatch_mean"] == pytest.approx(mean)
        of_ranks = [
            sum(span.end - span.start for span in result["spans"] if span.name == operation) for result in both.two
        ]
        assert metrics[f"timing_{operation}_total"] == pytest.approx(max(of_ranks))
        assert metrics[f"timing_{operation}_rank_mean"] == pytest.approx(sum(of_ranks) / 2)
    parts = ("timing_step_active", "timing_waiting_for_data", "timing_weight_sync_trainer_total", "timing_checkpoint")
    assert metrics["timing_weight_sync_trainer_total"] > 0
    assert metrics["timing_step_total"] <= sum(metrics[part] for part in parts) + 1e-9
    (step,) = (span for span in spans if span.name == "step")
    inside = [span for span in spans if span.name in (*operations, "gradient_norm", "optimizer")]
    assert all(step.start - 1e-3 <= span.start <= span.end <= step.end + 1e-3 for span in inside)
    assert {span.micro_batch for span in inside if span.name == "backward"} == set(range(int(metrics["micro_batches"])))
    for reduction in (span for span in inside if span.name == "gradient_reduction"):
        (backward,) = (s for s in inside if s.name == "backward" and s.micro_batch == reduction.micro_batch)
        assert backward.start <= reduction.start <= reduction.end <= backward.end
