"""Compiled and recomputed blocks give the same step, and recompute what they are asked to."""

import logging

import pytest
import torch
from tests.integration.trainer.trainer_cases import gradients, make_samples, relative_error
from torch._dynamo.utils import counters
from torch._logging._internal import warning_once

from telescope.trainer.backends.fsdp import sharding
from telescope.trainer.metrics import StepMetrics
from telescope.trainer.packing import pack_step
from telescope.utils.timeline import Timeline

NUM_LAYERS = 2


def gradient_of(trainer, lengths):
    backend = trainer.backend
    (mine,) = pack_step(make_samples(lengths), step=0, version=0, seq_len=200, num_ranks=1)
    backend.accumulate(mine.minibatches[0], 0, Timeline(backend.device, 0), StepMetrics(backend.device))
    return gradients(trainer)


@pytest.mark.parametrize("compile_blocks", [False, True])
@pytest.mark.parametrize(("recompute", "forwards"), [
    pytest.param({"gradient_checkpointing": False}, NUM_LAYERS, marks=pytest.mark.slow),
    pytest.param({"gradient_checkpointing": True}, NUM_LAYERS, marks=pytest.mark.slow),
    pytest.param(
        {"gradient_checkpointing": True, "recompute_attention": True}, 2 * NUM_LAYERS, marks=pytest.mark.slow
    ),
    (
        {"gradient_checkpointing": True, "recompute_attention": True, "gradient_checkpointing_layers": 1},
        NUM_LAYERS + 1,
    ),
])  # fmt: skip
def test_attention_runs_once_unless_it_is_to_be_recomputed(one_rank, kernels, compile_blocks, recompute, forwards):
    lengths = [5, 31, 12, 7]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "choose_kernel", lambda *_, **__: "padded")
        wanted = gradient_of(one_rank("untied", model_dtype="float32"), lengths)
    assert kernels.calls == {"forward": 0, "backward": 0}
    found = gradient_of(one_rank("untied", model_dtype="float32", compile_blocks=compile_blocks, **recompute), lengths)
    assert kernels.calls == {"forward": forwards, "backward": NUM_LAYERS}
    assert relative_error(found, wanted) < 1e-6


def test_rows_of_any_length_and_all_blocks_share_one_compilation_without_a_warning(one_rank, kernels, caplog):
    torch._dynamo.reset()
    counters.clear()
    warning_once.cache_clear()
    trainer = one_rank("untied", model_dtype="float32", gradient_checkpointing=True)
    for lengths in ([5, 31, 12, 7], [40, 17], [23], [9, 8, 7, 6, 5]):
        gradient_of(trainer, lengths)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_blocks_with_experts_share_one_compilation_in_bfloat16(one_rank, kernels):
    lengths = [5, 31, 12, 7]
    settings = {"model_dtype": "float32", "mixed_precision_dtype": "bfloat16"}
    wanted = gradient_of(one_rank("experts", **settings, compile_blocks=False), lengths)
    torch._dynamo.reset()
    counters.clear()
    found = gradient_of(one_rank("experts", **settings, gradient_checkpointing=True), lengths)
    assert relative_error(found, wanted) < 1e-2  # of roundings of 2^-8
    routers = [name for name in wanted if name.endswith("mlp.gate.weight")]  # small, and they divide in place
    assert len(routers) == NUM_LAYERS
    assert relative_error({name: found[name] for name in routers}, {name: wanted[name] for name in routers}) < 1e-2
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_experts_are_not_compiled_in_unsupported_dtypes(one_rank, kernels):
    counters.clear()
    gradient_of(one_rank("experts", model_dtype="float32", gradient_checkpointing=True), [5, 31])
    assert counters["stats"]["unique_graphs"] == 0
