"""The Triton kernels of the output layer, run by Triton's interpreter on the CPU: what `test_logprob_on_gpu` checks of
the compiled ones, for small sizes. A program of its own for pytest, since Triton asks once, at its import, how it is to
run (`test_kernels_by_interpreter`). bfloat16 is left to the GPU: the interpreter of Triton 3.9 multiplies its bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from triton.runtime import interpreter

from telescope.trainer import logprob, logprob_kernels
from telescope.trainer.logprob import LogprobHead

SMALL = {"rows": 16, "columns": 32, "group": 2}

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_with_index(tensor: Any, *scope: Any) -> None:
    _patch_tensor(tensor, *scope)
    # That of Triton 3.6 is `int` of an array of one element, which NumPy 2.5 refuses.
    tensor.__index__ = lambda self: int(self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_with_index


@pytest.fixture(params=[1, 2, 5], ids="span {}".format)
def tiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits go by tiles on the CPU, small ones; the gradient's blocks of the vocabulary are those of a GPU."""
    monkeypatch.setattr(logprob, "_is_tiled", logprob._can_be_tiled)
    monkeypatch.setitem(logprob.VOCABULARY_BLOCKS, "cpu", 3)
    monkeypatch.setattr(logprob, "SUMS_BYTES", 40 * 1024)
    for name in ("SUMS", "GRADIENT"):
        small = replace(getattr(logprob_kernels, name), span=request.param, **SMALL)
        monkeypatch.setattr(logprob_kernels, name, small)


def make(num_tokens: int, vocab: int, width: int, with_bias: bool) -> tuple[torch.Tensor, LogprobHead, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).half()

    bias = nn.Parameter(draw(vocab)) if with_bias else None
    head = LogprobHead(nn.Parameter(draw(vocab, width)), bias, chunk_size=16)
    hidden = (draw(num_tokens, width) * 4 * width**-0.5).requires_grad_()
    return hidden, head, torch.randint(0, vocab, (num_tokens,), generator=generator)


def assert_exact(hidden: torch.Tensor, head: LogprobHead, targets: torch.Tensor, temperature: float) -> None:
    """Values and gradients are those of log-softmax in float64."""
    inputs = [hidden, head.weight, *([] if head.bias is None else [head.bias])]
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    logits = doubles[0] @ doubles[1].t() + (doubles[2] if head.bias is not None else 0.0)
    logp = (logits / temperature).log_softmax(dim=-1)
    wanted = [logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(dim=-1)]
    found = head(hidden, targets, temperature)
    scales = [torch.linspace(-1.0, 2.0, len(targets)), torch.linspace(1.0, -0.5, len(targets))]

    def gradients(outputs: tuple[torch.Tensor, ...] | list[torch.Tensor], leaves: list[torch.Tensor]) -> list:
        total = sum(((scale * output).sum() for scale, output in zip(scales, outputs, strict=True)), torch.zeros(()))
        return list(torch.autograd.grad(total, leaves))

    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=5e-5)
    for mine, right in zip(gradients(found, inputs), gradients(wanted, doubles), strict=True):
        assert mine.dtype == torch.float16
        assert float((mine.double() - right).norm() / right.norm()) < 1e-3


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(("num_tokens", "vocab"), [(1, 33), (16, 64), (50, 321)])
def test_in_tiles_the_head_equals_log_softmax_in_float64(
    tiled: None, num_tokens: int, vocab: int, temperature: float, with_bias: bool
) -> None:
    hidden, head, targets = make(num_tokens, vocab, 128, with_bias)
    assert logprob._is_tiled(hidden, head.weight)
    assert_exact(hidden, head, targets, temperature)


def test_targets_at_the_borders_of_tiles_are_found(tiled: None) -> None:
    hidden, head, _ = make(12, 200, 64, False)
    targets = torch.tensor([0, 31, 32, 63, 64, 95, 96, 127, 128, 159, 160, 199])
    assert_exact(hidden, head, targets, 1.0)


def test_targets_outside_of_the_vocabulary_have_a_logit_of_zero(tiled: None) -> None:
    hidden, head, _ = make(4, 70, 64, False)
    targets = torch.tensor([70, 75, 96, -100])
    found = logprob_kernels.softmax_sums(hidden.detach(), head.weight.detach(), None, targets, 1.0)[1]
    assert found.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_in_tiles_no_tokens_give_gradients_of_exactly_zero(tiled: None) -> None:
    hidden, head, targets = make(0, 100, 64, True)
    found = head(hidden, targets, 1.0)
    assert [tensor.shape for tensor in found] == [(0,), (0,)]
    (found[0].sum() + found[1].sum()).backward()
    for parameter in (head.weight, head.bias):
        assert not parameter.grad.any()


@pytest.mark.parametrize("num_columns", [1, 60, 5000])
def test_the_kernels_of_blocks_leave_what_torch_leaves(num_columns: int) -> None:
    generator = torch.Generator().manual_seed(num_columns)
    rows, temperature = 5, 0.8
    blocks = [torch.randn(rows, num_columns, generator=generator) * 3 for _ in range(2)]
    target = torch.randint(0, 2 * num_columns, (rows,), generator=generator)
    mine, right = (logprob._Softmax.empty(rows, torch.float32, torch.device("cpu")) for _ in range(2))
    for index, block in enumerate(blocks):
        inside = target - index * num_columns
        sums = (mine.top_C, mine.total_C, mine.moment_C, mine.target_logit_C)
        logprob_kernels.add_block(block.clone(), inside, *sums, temperature)
        right.add(block.clone(), inside, temperature)
    torch.testing.assert_close(mine.result(), right.result(), rtol=1e-5, atol=1e-5)
    _, entropy, log_total = right.result()
    upstream = [torch.randn(rows, generator=generator) for _ in range(2)]
    calls: list[Callable[..., torch.Tensor]] = [logprob_kernels.block_gradient, logprob._block_gradient]
    ours, torchs = (
        call(blocks[0].clone(), target, log_total, entropy, *upstream, temperature, torch.float32) for call in calls
    )
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)
