"""The output layer on one GPU, in tiles and in blocks: numbers, memory, choice. Run by hand: `pytest tests/gpu`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from telescope.trainer import logprob
from telescope.trainer.logprob import LogprobHead

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

ROUNDING = {torch.bfloat16: 5e-3, torch.float16: 7e-4}
"""Gradients are rounded to the dtype twice: that of the logits, and the sum."""


@pytest.fixture(params=["tiles", "blocks"])
def way(request, monkeypatch) -> str:
    if request.param == "blocks":
        monkeypatch.setattr(logprob, "TILED_CAPABILITIES", set())
    elif torch.cuda.get_device_capability() not in logprob.TILED_CAPABILITIES:
        pytest.skip("tiles are cut for Hopper")
    return request.param


def make(
    num_tokens: int,
    vocab: int,
    width: int,
    dtype: torch.dtype,
    *,
    chunk_size: int = 512,
    with_bias: bool = False,
    softcap: float | None = None,
):
    generator = torch.Generator("cuda").manual_seed(num_tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    bias = nn.Parameter(draw(vocab)) if with_bias else None
    head = LogprobHead(nn.Parameter(draw(vocab, width)), bias, chunk_size, softcap=softcap)
    targets = torch.randint(0, vocab, (num_tokens,), device="cuda", generator=generator)
    # Logits of a standard deviation of 8, whatever the width: float32 then has them to about 1e-5.
    hidden = (draw(num_tokens, width) * (8 * width**-0.5)).to(dtype)
    return hidden.requires_grad_(), head, targets


def exact(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.t() if bias is None else hidden @ weight.t() + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logp = (logits / temperature).log_softmax(dim=-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(dim=-1)


def assert_exact(
    hidden: torch.Tensor, head: LogprobHead, targets: torch.Tensor, temperature: float, *, with_entropy: bool = True
) -> None:
    """Values and gradients are those of log-softmax in float64."""
    generator = torch.Generator("cuda").manual_seed(1)
    scales = [torch.randn(len(targets), device="cuda", generator=generator) for _ in range(2)]
    if not with_entropy:
        scales.pop()
    inputs = [hidden, head.weight, *([] if head.bias is None else [head.bias])]
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    found = head(hidden, targets, temperature)
    wanted = exact(doubles[0], doubles[1], doubles[2] if len(doubles) > 2 else None, targets, temperature, head.softcap)
    grads, wanted_grads = (
        torch.autograd.grad(sum((s * t).sum() for s, t in zip(scales, outputs, strict=False)), parameters)
        for outputs, parameters in ((found, inputs), (wanted, doubles))
    )
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=5e-5)
    for mine, right in zip(grads, wanted_grads, strict=True):
        assert mine.dtype == hidden.dtype
        assert float((mine.double() - right).norm() / right.norm()) < ROUNDING[hidden.dtype]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(
    ("num_tokens", "vocab", "width"), [(7, 50, 64), (300, 2500, 192), (3000, 5003, 64), (2500, 32_000, 64)]
)
def test_the_head_equals_log_softmax_in_float64(way, dtype, temperature, num_tokens, vocab, width):
    hidden, head, targets = make(num_tokens, vocab, width, dtype)
    assert logprob._is_tiled(hidden, head.weight) == (way == "tiles")
    assert_exact(hidden, head, targets, temperature)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_bias_and_a_loss_without_entropy_have_the_gradients_of_float64(way, dtype, with_entropy):
    hidden, head, targets = make(1500, 5003, 128, dtype, with_bias=True)
    assert_exact(hidden, head, targets, 0.7, with_entropy=with_entropy)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("softcap", [3.0, 30.0])
def test_bounded_logits_have_the_values_and_gradients_of_float64(way, dtype, softcap):
    assert_exact(*make(1500, 5003, 128, dtype, softcap=softcap), 0.7)


def test_targets_at_the_borders_of_tiles_and_of_the_vocabulary_are_found(way):
    vocab = 5003
    borders = [0, vocab - 1, *(edge + side for edge in range(64, vocab, 64) for side in (-1, 0))]
    hidden, head, _ = make(len(borders), vocab, 64, torch.bfloat16, chunk_size=32)
    assert_exact(hidden, head, torch.tensor(borders, device="cuda"), 1.0)


def test_a_width_that_tiles_do_not_divide_and_an_odd_address_go_by_blocks():
    hidden, head, targets = make(300, 1000, 72, torch.bfloat16)
    assert not logprob._is_tiled(hidden, head.weight)
    assert_exact(hidden, head, targets, 1.0)
    stored = torch.randn(300 * 64 + 1, device="cuda").bfloat16()
    hidden, head, targets = make(300, 1000, 64, torch.bfloat16)
    hidden = stored[1:].view(300, 64).requires_grad_()
    assert not logprob._is_tiled(hidden, head.weight)
    assert_exact(hidden, head, targets, 1.0)


def test_a_tied_weight_has_the_sum_of_both_gradients(way):
    _, head, targets = make(700, 3001, 64, torch.bfloat16)
    token_ids = torch.randint(0, 3001, (700,), device="cuda")
    double = head.weight.detach().double().requires_grad_()
    mine = head(nn.functional.embedding(token_ids, head.weight), targets, 1.0)
    right = exact(nn.functional.embedding(token_ids, double), double, None, targets, 1.0)
    grads = [
        torch.autograd.grad(sum(t.sum() for t in outputs), w)[0]
        for outputs, w in ((mine, head.weight), (right, double))
    ]
    assert float((grads[0].double() - grads[1]).norm() / grads[1].norm()) < 2 * ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("with_bias", [False, True])
def test_no_tokens_give_gradients_of_exactly_zero(way, with_bias):
    hidden, head, targets = make(0, 5003, 64, torch.bfloat16, with_bias=with_bias)
    found = head(hidden, targets, 1.0)
    assert [t.shape for t in found] == [(0,), (0,)]
    sum(t.sum() for t in found).backward()
    assert hidden.grad is not None and head.weight.grad is not None
    assert not head.weight.grad.any()
    assert head.bias is None or not head.bias.grad.any()


def test_huge_logits_do_not_overflow(way):
    hidden, head, targets = make(600, 5003, 64, torch.bfloat16)
    hidden = (hidden.detach() * 1e3).requires_grad_()
    logp, entropy = head(hidden, targets, 1.0)
    (logp.sum() + entropy.sum()).backward()
    assert all(torch.isfinite(t).all() for t in (logp, entropy, hidden.grad, head.weight.grad))


def test_one_number_as_the_gradient_of_all_tokens_is_read_as_such(way):
    hidden, head, targets = make(600, 1000, 64, torch.bfloat16, chunk_size=128)
    expanded = torch.autograd.grad(sum(t.sum() for t in head(hidden, targets, 1.0)), hidden)[0]
    ones = torch.ones(600, device="cuda")
    written_out = torch.autograd.grad(sum((ones * t).sum() for t in head(hidden, targets, 1.0)), hidden)[0]
    assert torch.equal(expanded, written_out)


def test_the_same_call_gives_the_same_bits(way):
    hidden, head, targets = make(3000, 5003, 128, torch.bfloat16)
    calls = []
    for _ in range(2):
        found = head(hidden, targets, 1.0)
        calls.append([*found, *torch.autograd.grad(sum(t.sum() for t in found), [hidden, head.weight])])
    assert all(torch.equal(first, second) for first, second in zip(*calls, strict=True))


def peaks(num_tokens: int) -> tuple[int, int]:
    """Bytes beyond its inputs that the head takes in forward, and in both passes beyond gradients, at 0.6B's shape."""
    width, vocab = 1024, 151_936
    hidden, head, targets = make(num_tokens, vocab, width, torch.bfloat16, chunk_size=1024)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logp, entropy = head(hidden, targets, 1.0)
    forward = torch.cuda.max_memory_allocated() - before
    (logp.sum() + 0.1 * entropy.sum()).backward()
    both = torch.cuda.max_memory_allocated() - before
    gradient_of_head = head.weight.numel() * (4 + 2)  # summed in float32, handed on in bfloat16
    return forward, both - gradient_of_head - hidden.numel() * 2


def test_the_head_takes_less_than_2_gib_at_64k_tokens_and_a_vocabulary_of_152k(way):
    assert peaks(65_536)[1] < 2 * 2**30


def test_tiles_and_blocks_agree_at_the_shape_of_a_model_of_0_6b(monkeypatch):
    hidden, head, targets = make(65_536, 151_936, 1024, torch.bfloat16, chunk_size=1024)
    found = []
    for capabilities in (logprob.TILED_CAPABILITIES, frozenset()):
        monkeypatch.setattr(logprob, "TILED_CAPABILITIES", capabilities)
        values = head(hidden, targets, 0.9)
        loss = values[0].sum() + 0.1 * values[1].sum()
        found.append([*(value.detach() for value in values), *torch.autograd.grad(loss, [hidden, head.weight])])
    for tiles, blocks in zip(*found, strict=True):
        assert float((tiles.float() - blocks.float()).norm() / blocks.float().norm()) < 5e-3


@pytest.mark.parametrize("way", ["tiles"], indirect=True)
def test_in_tiles_no_block_of_float32_logits_exists(way):
    forward, both = peaks(65_536)
    block = 1024 * 151_936 * 4
    assert forward < block / 4
    assert both < block
