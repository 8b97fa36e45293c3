"""The trainer on one GPU: attention kernel, bfloat16 numerics, memory. Run by hand: `pytest tests/gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.integration.trainer.trainer_cases import (
    build_model,
    free_port,
    gradients,
    make_config,
    make_samples,
    relative_error,
    weights,
)
from torch import nn

from telescope.trainer.attention import choose_kernel, make_layout, packed_attention
from telescope.trainer.logprob import LogprobHead
from telescope.trainer.metrics import StepMetrics
from telescope.trainer.packing import pack_step
from telescope.trainer.timeline import Timeline
from telescope.trainer.worker import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

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


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("num_key_value_heads", [8, 2])
def test_the_offset_kernel_equals_padded_attention(window, num_key_value_heads):
    device = torch.device("cuda")
    lengths = [130, 1, 64, 700, 33, 2]
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    kernel = choose_kernel(device, torch.bfloat16, head_dim=64)
    assert kernel != "padded"
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, int(cu[-1]), 64, device=device, generator=generator)
        for heads in (8, num_key_value_heads, num_key_value_heads)
    )
    found = {}
    for name, dtype in ((kernel, torch.bfloat16), ("padded", torch.float32)):
        inputs = [t.to(torch.bfloat16).to(dtype).requires_grad_() for t in (q, k, v)]
        layout = make_layout(cu, device, name)
        out, _ = packed_attention(nn.Identity(), *inputs, None, packed_layout=layout, sliding_window=window)
        mix = torch.linspace(-1, 1, out.numel(), device=device).view(out.shape)
        found[name] = [out.float(), *(g.float() for g in torch.autograd.grad((out.float() * mix).sum(), inputs))]
    for half, exact in zip(found[kernel], found["padded"], strict=True):
        assert float(((half - exact).norm() / exact.norm()).detach()) < 1e-2


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
    path = build_model(tmp_path / "model", tied=True, num_attention_heads=2, num_key_value_heads=1)
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


def test_memory_of_the_head_does_not_grow_with_tokens_times_vocabulary():
    device = torch.device("cuda")
    num_tokens, width, vocab = 16_384, 1024, 151_936
    head = LogprobHead(nn.Parameter(torch.randn(vocab, width, device=device, dtype=torch.bfloat16)), None, 1024)
    hidden = torch.randn(num_tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, vocab, (num_tokens,), device=device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logp, entropy = head(hidden, targets, 1.0)
    (logp.sum() + 0.1 * entropy.sum()).backward()
    extra = torch.cuda.max_memory_allocated() - before
    gradient_of_head = head.weight.numel() * (4 + 2)  # summed in float32, handed on in bfloat16
    assert extra - gradient_of_head - hidden.numel() * 2 < 2 * 2**30
