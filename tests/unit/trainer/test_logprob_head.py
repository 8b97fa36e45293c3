"""The fused logprob and entropy pass equals log-softmax done the plain way, forward and backward."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from telescope.trainer import logprob
from telescope.trainer.logprob import LogprobHead

V, D = 37, 8


def plain(hidden_ND, weight_VD, bias_V, targets_N, temperature):
    logits_NV = hidden_ND @ weight_VD.t()
    if bias_V is not None:
        logits_NV = logits_NV + bias_V
    logp_NV = (logits_NV / temperature).log_softmax(dim=-1)
    entropy_N = -(logp_NV.exp() * logp_NV).sum(dim=-1)
    return logp_NV.gather(1, targets_N[:, None]).squeeze(1), entropy_N


def make(num_tokens: int, dtype: torch.dtype, *, with_bias: bool = False, chunk_size: int = 3, scale: float = 1.0):
    generator = torch.Generator().manual_seed(num_tokens)
    hidden_ND = (torch.randn(num_tokens, D, generator=generator, dtype=torch.float64) * scale).to(dtype)
    head = LogprobHead(
        nn.Parameter(torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype)),
        nn.Parameter(torch.randn(V, generator=generator, dtype=torch.float64).to(dtype)) if with_bias else None,
        chunk_size,
    )
    targets_N = torch.randint(0, V, (num_tokens,), generator=generator)
    return hidden_ND.requires_grad_(), head, targets_N


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 10])
@pytest.mark.parametrize("num_blocks", [1, 4])
def test_values_and_gradients_equal_the_plain_ones(temperature, with_bias, num_tokens, num_blocks, monkeypatch):
    monkeypatch.setitem(logprob.VOCABULARY_BLOCKS, "cpu", num_blocks)
    monkeypatch.setattr(logprob, "COLUMNS_MULTIPLE", 8)
    hidden_ND, head, targets_N = make(num_tokens, torch.float64, with_bias=with_bias)
    inputs = [hidden_ND, head.weight, *([head.bias] if with_bias else [])]
    found = head(hidden_ND, targets_N, temperature)
    wanted = plain(hidden_ND, head.weight, head.bias, targets_N, temperature)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    mix_N = torch.linspace(-1.0, 2.0, num_tokens, dtype=torch.float64)
    grads = [
        torch.autograd.grad((mix_N * logp_N).sum() + (mix_N.flip(0) * entropy_N).sum(), inputs)
        for logp_N, entropy_N in (found, wanted)
    ]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("scale", "softcap"), [(0.25, None), (1.0, 3.0), (2.0, 5.0)])
@pytest.mark.parametrize("num_blocks", [1, 4])
def test_scaled_and_bounded_logits_have_the_values_and_gradients_of_the_definition(
    scale, softcap, num_blocks, monkeypatch
):
    monkeypatch.setitem(logprob.VOCABULARY_BLOCKS, "cpu", num_blocks)
    monkeypatch.setattr(logprob, "COLUMNS_MULTIPLE", 8)
    hidden_ND, plain_head, targets_N = make(10, torch.float64)
    head = LogprobHead(plain_head.weight, None, 3, scale, softcap)
    logits_NV = (hidden_ND @ head.weight.t()) * scale
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    logp_NV = (logits_NV / 0.7).log_softmax(dim=-1)
    wanted = logp_NV.gather(1, targets_N[:, None]).squeeze(1), -(logp_NV.exp() * logp_NV).sum(dim=-1)
    found = head(hidden_ND, targets_N, 0.7)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    inputs = [hidden_ND, head.weight]
    grads = [torch.autograd.grad((logp - 0.3 * entropy).square().sum(), inputs) for logp, entropy in (found, wanted)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-11, atol=1e-12)


def test_only_one_output_in_the_loss_gives_the_right_gradient():
    hidden_ND, head, targets_N = make(5, torch.float64)
    for pick in (0, 1):
        found = torch.autograd.grad(head(hidden_ND, targets_N, 0.9)[pick].sum(), [hidden_ND, head.weight])
        wanted = torch.autograd.grad(
            plain(hidden_ND, head.weight, None, targets_N, 0.9)[pick].sum(), [hidden_ND, head.weight]
        )
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 1000])
@pytest.mark.parametrize("num_blocks", [1, 2, 8])
def test_chunks_and_blocks_change_nothing(chunk_size, num_blocks, monkeypatch):
    hidden_ND, head, targets_N = make(11, torch.float64)
    whole = head(hidden_ND, targets_N, 1.0)
    monkeypatch.setitem(logprob.VOCABULARY_BLOCKS, "cpu", num_blocks)
    monkeypatch.setattr(logprob, "COLUMNS_MULTIPLE", 4)
    head.chunk_size = chunk_size
    torch.testing.assert_close(head(hidden_ND, targets_N, 1.0), whole, rtol=1e-13, atol=1e-13)


def sums_of(z_CV: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """What the kernels leave of the logits between the cuts: top, total and moment, [3, S, C]."""
    parts = []
    for first, last in pairwise(cuts):
        top_C = z_CV[:, first:last].amax(dim=1)
        shifted_CB = z_CV[:, first:last] - top_C[:, None]
        p_CB = shifted_CB.exp()
        parts.append(torch.stack([top_C, p_CB.sum(dim=1), (p_CB * shifted_CB).sum(dim=1)]))
    return torch.stack(parts, dim=1)


@settings(deadline=None)
@given(
    vocab=st.integers(1, 60),
    inner=st.sets(st.integers(1, 59), max_size=12),
    scale=st.sampled_from([0.0, 1.0, 50.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_sums_over_any_parts_of_the_vocabulary_merge_into_the_whole_softmax(vocab, inner, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    z_CV = torch.randn(4, vocab, generator=generator, dtype=torch.float64) * scale
    target_C = torch.randint(0, vocab, (4,), generator=generator)
    target_logit_C = z_CV.gather(1, target_C[:, None]).squeeze(1)
    cuts = [0, *sorted(cut for cut in inner if cut < vocab), vocab]
    merged = logprob._Softmax.merged(sums_of(z_CV, cuts), target_logit_C)
    logp_CV = z_CV.log_softmax(dim=1)
    wanted = (
        logp_CV.gather(1, target_C[:, None]).squeeze(1), -(logp_CV.exp() * logp_CV).sum(dim=1), z_CV.logsumexp(dim=1),
    )  # fmt: skip
    torch.testing.assert_close(merged.result(), wanted, rtol=1e-11, atol=1e-11)


def test_merged_sums_keep_float32_precision_for_confident_tokens():
    z_CV = torch.tensor([[80.0, 60.0, -20.0, 10.0, 59.0]])
    merged = logprob._Softmax.merged(sums_of(z_CV, [0, 2, 4, 5]), z_CV[:, 0])
    logp_C, entropy_C, _ = merged.result()
    exact_CV = z_CV.double().log_softmax(dim=1)
    exact_entropy_C = -(exact_CV.exp() * exact_CV).sum(dim=1)
    torch.testing.assert_close(
        (logp_C.double(), entropy_C.double()), (exact_CV[:, 0], exact_entropy_C), rtol=0, atol=1e-8
    )


@pytest.mark.parametrize(("hidden", "weight", "fits"), [
    (torch.empty(5, 128).bfloat16(), torch.empty(7, 128).bfloat16(), True),
    (torch.empty(5, 64).half(), torch.empty(7, 64).half(), True),
    (torch.empty(0, 64).half(), torch.empty(7, 64).half(), True),
    (torch.empty(5, 64), torch.empty(7, 64), False),
    (torch.empty(5, 64).double(), torch.empty(7, 64).double(), False),
    (torch.empty(5, 64).half(), torch.empty(7, 64).bfloat16(), False),
    (torch.empty(5, 96).half(), torch.empty(7, 96).half(), False),
    (torch.empty(5, 128).half()[:, :64], torch.empty(7, 64).half(), False),
    (torch.empty(5, 64).half(), torch.empty(64, 7).half().t(), False),
    (torch.empty(5 * 64 + 1).half()[1:].view(5, 64), torch.empty(7, 64).half(), False),
])  # fmt: skip
def test_tiles_take_aligned_16_bit_operands_of_a_width_that_they_divide(hidden, weight, fits):
    assert logprob._can_be_tiled(hidden, weight) == fits


def test_on_the_cpu_nothing_goes_by_tiles():
    assert not logprob._is_tiled(torch.empty(5, 64).bfloat16(), torch.empty(7, 64).bfloat16())


def test_no_tokens_give_no_outputs_and_a_gradient_of_zero():
    hidden_ND, head, targets_N = make(0, torch.float32)
    logp_N, entropy_N = head(hidden_ND, targets_N, 1.0)
    assert logp_N.shape == entropy_N.shape == (0,)
    (logp_N.sum() + entropy_N.sum()).backward()
    assert not head.weight.grad.any()


def test_bfloat16_inputs_are_normalized_in_float32():
    hidden_ND, head, targets_N = make(64, torch.bfloat16)
    logp_N, entropy_N = head(hidden_ND, targets_N, 1.0)
    exact_N, exact_entropy_N = plain(hidden_ND.double(), head.weight.double(), None, targets_N, 1.0)
    assert logp_N.dtype == entropy_N.dtype == torch.float32
    torch.testing.assert_close(logp_N.double(), exact_N, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy_N.double(), exact_entropy_N, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_blocks", [1, 4])
def test_bfloat16_gradients_are_summed_in_float32(num_blocks, monkeypatch):
    monkeypatch.setitem(logprob.VOCABULARY_BLOCKS, "cpu", num_blocks)
    monkeypatch.setattr(logprob, "COLUMNS_MULTIPLE", 8)
    hidden_ND, head, targets_N = make(64, torch.bfloat16)
    head(hidden_ND, targets_N, 1.0)[0].sum().backward()
    exact = [hidden_ND.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()]
    wanted = torch.autograd.grad(plain(*exact, None, targets_N, 1.0)[0].sum(), exact)
    for found, right in zip((hidden_ND.grad, head.weight.grad), wanted, strict=True):
        assert float((found.double() - right).norm() / right.norm()) < 6e-3


def test_huge_logits_do_not_overflow():
    hidden_ND, head, targets_N = make(6, torch.float32, scale=1e4)
    logp_N, entropy_N = head(hidden_ND, targets_N, 1.0)
    (logp_N.sum() + entropy_N.sum()).backward()
    assert all(torch.isfinite(t).all() for t in (logp_N, entropy_N, hidden_ND.grad, head.weight.grad))


def test_nothing_of_size_tokens_times_vocabulary_is_kept_for_backward():
    hidden_ND, head, targets_N = make(50, torch.float32)
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        head(hidden_ND, targets_N, 1.0)
    assert max(kept) == max(hidden_ND.numel(), head.weight.numel()) < 50 * V
