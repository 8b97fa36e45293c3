"""Ranks that share rows: models of every kind, checkpoints, weights, more ranks, and what is refused.

That gradients and metrics of every algorithm are those of one rank is shown in `test_algorithms_on_two_ranks`.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.families import FAMILIES
from tests.integration.trainer.plain_kernels import use_plain_kernels
from tests.integration.trainer.trainer_cases import (
    ALL_MODIFIERS,
    build_model,
    gradients,
    make_config,
    make_samples,
    near_policy,
    packed_share,
    relative_error,
    run_here,
    run_ranks,
    weights,
)
from torch._dynamo.utils import counters
from transformers import AutoConfig, LlamaConfig

from telescope.errors import UserError
from telescope.trainer.backends.fsdp.backend import FSDPBackend
from telescope.trainer.batch import MicroBatch
from telescope.trainer.metrics import StepMetrics
from telescope.trainer.sequence_exchange import pad_row
from telescope.trainer.worker import Trainer
from telescope.utils.timeline import Timeline

LENGTHS = [5, 31, 12, 7, 2, 28, 19, 3, 16, 9, 24, 11]
SINGLE = {"model_dtype": "float32"}
CHECKPOINTED = "one key head for both ranks"
"""Of this model a checkpoint is written, which takes some seconds."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    CHECKPOINTED: ("one_key_head", {}),
    "tied, recomputed": ("tied64", {"gradient_checkpointing": True}),
    "Qwen2 in float32": ("tied", SINGLE),
    "GSPO in float32": ("untied", {**SINGLE, "algorithm": "gspo"}),
    "experts in float32": ("experts", SINGLE),
    "every modifier in float32": ("untied", {**SINGLE, **ALL_MODIFIERS}),
}
TEXT = [1, 5, 9, 2, 60]


def job(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """A gradient and logprobs, then a step, a checkpoint and a step."""
    backend: Any = trainer.backend
    samples = near_policy(make_samples(LENGTHS), trainer)
    (batch,) = packed_share(trainer, samples).minibatches
    backend.accumulate(batch, 0, Timeline(backend.device, trainer.rank), StepMetrics(backend.device))
    found: dict[str, Any] = {"gradient": gradients(trainer), "logprobs": backend.sequence_logprobs(TEXT)}
    steps = [packed_share(trainer, samples, step=step, num_minibatches=2) for step in range(2)]
    trainer.train_step(steps[0])
    if trainer.world_size == 2 and folder.name == CHECKPOINTED:
        trainer.save_checkpoint(1, folder)
        backend.finish_checkpoint()
    found["metrics"] = trainer.train_step(steps[1]).metrics
    found["weights"] = weights(trainer)
    return found


def resumed(trainer: Trainer, folder: Path) -> dict[str, torch.Tensor]:
    """The weights after the second step of `job`, from its checkpoint."""
    samples = near_policy(make_samples(LENGTHS), trainer)
    trainer.backend.load_checkpoint(1, folder)
    trainer.train_step(packed_share(trainer, samples, step=1, num_minibatches=2))
    return weights(trainer)


def compiled(trainer: Trainer) -> tuple[dict[str, torch.Tensor], int]:
    """The gradient of two packings by compiled blocks, of which one recomputes attention; how many were compiled."""
    with pytest.MonkeyPatch.context() as patch:
        use_plain_kernels(patch)
        trainer.restart()
        assert trainer.backend.compiles
        return two_packings(trainer), counters["stats"]["unique_graphs"]


def two_packings(trainer: Trainer) -> dict[str, torch.Tensor]:
    backend: Any = trainer.backend
    for seq_len in (40, 64):
        (batch,) = packed_share(trainer, make_samples(LENGTHS), seq_len=seq_len).minibatches
        backend.accumulate(batch, 0, Timeline(backend.device, trainer.rank), StepMetrics(backend.device))
    return gradients(trainer)


COMPILED = {**SINGLE, "gradient_checkpointing": True, "gradient_checkpointing_layers": 1, "recompute_attention": True}


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory) -> dict[str, Any]:
    """By case: the results of one rank, and of two that share rows."""
    root = tmp_path_factory.mktemp("sharing")
    paths = models | {
        "one_key_head": build_model(root / "one_key_head", family="starcoder2", tied=False, num_key_value_heads=1)
    }

    def config(case: str, num_sharing: int) -> Any:
        model, changes = MODELS[case]
        return make_config(paths[model], fsdp_context_parallel_size=num_sharing, **changes)

    jobs: list[Any] = [(job, config(case, 2), (root / case,)) for case in MODELS]
    on_two = run_ranks(jobs, num_ranks=2, folder=root / "results")
    found: dict[str, Any] = {
        case: (run_here((job, config(case, 1), (root / case,))), two) for case, two in zip(MODELS, on_two, strict=True)
    }
    alone = run_here((resumed, config(CHECKPOINTED, 1), (root / CHECKPOINTED,)))
    found["resumed"] = alone, found[CHECKPOINTED][1]
    return found


@pytest.mark.parametrize("case", MODELS)
def test_ranks_that_share_rows_have_the_gradient_of_one(runs, case):
    one, two = runs[case]
    for rank in two:
        assert relative_error(rank["gradient"], one["gradient"]) < (1e-6 if "float32" in case else 1e-12)


@pytest.mark.parametrize("case", MODELS)
def test_every_rank_has_the_whole_weights_and_the_logprobs_of_a_text(runs, case):
    one, two = runs[case]
    for rank in two:
        assert rank["logprobs"] == pytest.approx(one["logprobs"], abs=1e-5)
        assert relative_error(rank["weights"], one["weights"]) < 1e-3
        assert all(torch.equal(tensor, two[0]["weights"][name]) for name, tensor in rank["weights"].items())
    shared = {name: value for name, value in two[0]["metrics"].items() if not name.startswith("timing")}
    assert shared == pytest.approx({name: one["metrics"][name] for name in shared}, rel=1e-3, abs=1e-3)


@pytest.mark.slow
def test_compiled_blocks_give_the_same_gradient(models, tmp_path):
    config = make_config(models["untied"], fsdp_context_parallel_size=2, **COMPILED)
    (two,) = run_ranks([(compiled, config, ())], num_ranks=2, folder=tmp_path)
    one = run_here((two_packings, make_config(models["untied"], **COMPILED), ()))
    for rank, num_functions in two:
        assert relative_error(rank, one) < 1e-6
        assert num_functions == 2, "rows of any length share the compilation of a kind of block"


def test_a_checkpoint_of_ranks_that_share_rows_continues_on_one(runs):
    found, two = runs["resumed"]
    assert relative_error(found, two[0]["weights"]) < 1e-10


def test_four_ranks_of_which_two_share_each_row_train_as_one(models, tmp_path):
    changes = {"algorithm": "gspo", "number_of_minibatches": 2}
    config = make_config(models["untied64"], fsdp_context_parallel_size=2, **changes)
    (four,) = run_ranks([(job, config, (tmp_path / "checkpoint",))], num_ranks=4, folder=tmp_path / "results")
    one = run_here((job, make_config(models["untied64"], **changes), (tmp_path,)))
    for rank in four:
        assert relative_error(rank["gradient"], one["gradient"]) < 1e-12
        assert relative_error(rank["weights"], one["weights"]) < 1e-10
        assert rank["metrics"]["tokens/trained"] == one["metrics"]["tokens/trained"]


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_a_model_whose_heads_cannot_be_shared_is_refused_when_it_is_loaded(num_ranks):
    backend = FSDPBackend(make_config("a/model"), 0, num_ranks, torch.device("cpu"))
    heads = LlamaConfig(hidden_size=96, num_attention_heads=4 * 3, num_key_value_heads=3 if num_ranks == 4 else 2)
    backend.hf_config = heads
    with pytest.raises(UserError, match=f"fsdp_context_parallel_size is {num_ranks}, but a/model has [23] key and"):
        backend._refuse_uneven_heads(num_ranks)


def test_every_layer_of_a_model_with_different_heads_is_checked():
    (gemma,) = (family for family in FAMILIES if family.name == "gemma4_text")
    for num_kv_heads, refused in ((1, False), (3, True)):  # of the layers with full attention
        backend = FSDPBackend(make_config("a/model"), 0, 2, torch.device("cpu"))
        fields = gemma.fields | {"num_global_key_value_heads": num_kv_heads}
        backend.hf_config = AutoConfig.for_model(gemma.model_type, **fields)
        with pytest.raises(UserError, match="a/model has 3 key and value heads") if refused else nullcontext():
            backend._refuse_uneven_heads(2)


def test_a_row_is_padded_by_a_segment_of_its_own():
    row = MicroBatch(*(np.arange(5) for _ in range(7)), cu_seqlens=np.array([0, 2, 5], dtype=np.int32))
    token_ids_T, position_ids_T, cu_seqlens = pad_row(row, 4)
    assert token_ids_T.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert position_ids_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert cu_seqlens.tolist() == [0, 2, 5, 8]
    assert [array.tolist() for array in pad_row(row, 1)] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 2, 5]]
