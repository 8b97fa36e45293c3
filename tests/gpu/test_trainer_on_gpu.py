"""The trainer on one GPU: bfloat16 numerics, waits, compiling, memory. Run by hand: `pytest tests/gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.integration.trainer.trainer_cases import (
    build_model,
    gradients,
    make_config,
    make_samples,
    relative_error,
    weights,
)
from tests.processes import free_port
from torch._dynamo.utils import counters

from telescope.trainer.metrics import StepMetrics
from telescope.trainer.packing import pack_step
from telescope.trainer.worker import Trainer
from telescope.utils.timeline import Timeline

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

LENGTHS = [5, 31, 12, 7, 2, 28, 19, 3, 16, 9, 24, 11]


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def set_up(path: str, device: str, **changes) -> Trainer:
    trainer = Trainer(make_config(path, device=device, **changes), 0, 1, "127.0.0.1", free_port())
    trainer.setup()
    return trainer


def test_the_host_waits_for_nothing_between_forward_and_backward(tmp_path):
    path = build_model(tmp_path / "model", tied=True, hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    trainer = set_up(path, "cuda", model_dtype="float32", mixed_precision_dtype="bfloat16")
    backend = trainer.backend
    (mine,) = pack_step(make_samples(LENGTHS), step=0, version=0, seq_len=64, num_ranks=1)
    sums, timeline = StepMetrics(backend.device), Timeline(backend.device, 0)
    backend.accumulate(mine.minibatches[0], 0, timeline, sums)  # type: ignore[attr-defined]  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.accumulate(mine.minibatches[0], 0, timeline, sums)  # type: ignore[attr-defined]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    trainer.shutdown()


def test_a_warm_up_compiles_what_steps_run_and_takes_no_more_memory_than_they_do(tmp_path):
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    path = build_model(tmp_path / "model", tied=False, **shape)
    settings = {"model_dtype": "float32", "mixed_precision_dtype": "bfloat16", "gradient_checkpointing": True}
    torch._dynamo.reset()
    trainer = set_up(path, "cuda", seq_len=2048, pad_to_multiple_of=64, **settings)
    counters.clear()
    trainer.warm_up()
    assert counters["stats"]["unique_graphs"] == 1
    # Compiling also takes 60 MB to time kernels with; what the row takes, a second one shows.
    peaks = [peak_of(trainer.warm_up)]
    for step, lengths in enumerate(([512] * 4, [700, 3], [2048], [2])):
        samples = make_samples(lengths)
        for sample in samples:
            sample.trained_L[1:], sample.version_L[1:] = True, 0  # as in the row of the warm-up
        (mine,) = pack_step(samples, step=step, version=0, seq_len=2048, num_ranks=1, pad_to_multiple_of=64)
        peaks.append(peak_of(lambda mine=mine: trainer.train_step(mine)))
    assert counters["stats"]["unique_graphs"] == 1
    assert peaks[0] <= peaks[1]
    trainer.shutdown()


def peak_of(call: Callable[[], object]) -> int:
    """The most bytes that torch's allocator had given out during a call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated()


def test_a_float32_step_on_gpu_equals_the_step_on_cpu(tmp_path):
    path = build_model(tmp_path / "model", tied=False)
    found = {}
    for device in ("cpu", "cuda"):
        trainer = set_up(path, device, model_dtype="float32")
        (mine,) = pack_step(make_samples(LENGTHS), step=0, version=0, seq_len=64, num_ranks=1, pad_to_multiple_of=8)
        result = trainer.train_step(mine)
        found[device] = (weights(trainer), result.metrics, result.spans)
        trainer.shutdown()
    for name in ("entropy", "kl_divergence_inference", "grad_norm"):
        assert found["cuda"][1][name] == pytest.approx(found["cpu"][1][name], rel=1e-3)
    assert relative_error(found["cuda"][0], found["cpu"][0]) < 1e-3
    assert {span.name for span in found["cuda"][2]} == {span.name for span in found["cpu"][2]}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bfloat16_gradients_stay_close_to_float32_and_do_not_depend_on_packing(tmp_path, checkpointing):
    # Weights small enough that attention does not saturate, where rounding would be amplified tenfold.
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.1}
    path = build_model(tmp_path / "model", tied=True, **shape)
    found = []
    for dtype, seq_len in ((None, 200), ("bfloat16", 200), ("bfloat16", 32)):
        trainer = set_up(
            path, "cuda", model_dtype="float32", mixed_precision_dtype=dtype, gradient_checkpointing=checkpointing
        )
        (mine,) = pack_step(make_samples(LENGTHS), step=0, version=0, seq_len=seq_len, num_ranks=1)
        backend = trainer.backend
        sums = StepMetrics(backend.device)
        backend.accumulate(mine.minibatches[0], 0, Timeline(backend.device, 0), sums)  # type: ignore[attr-defined]
        found.append(gradients(trainer))
        trainer.shutdown()
    exact, whole, split = found
    assert relative_error(whole, exact) < 0.05
    assert relative_error(split, whole) < 0.02
