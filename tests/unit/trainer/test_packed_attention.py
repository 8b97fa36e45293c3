"""Packed attention: a segment sees itself, causally, whatever lies beside it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from telescope.errors import UserError
from telescope.trainer import flash_attention_4
from telescope.trainer.attention import bucket_segments, choose_kernel, make_layout, packed_attention

CPU = torch.device("cpu")


def one_by_one(q, k, v, lengths, window=None):
    """Attention of each segment by itself, [1, H, T, D] -> [1, T, H, D]."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    outputs, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        position = torch.arange(length)
        seen = position[:, None] >= position[None, :]
        if window is not None:
            seen &= position[:, None] - position[None, :] < window
        outputs.append(F.scaled_dot_product_attention(q[:, :, rows], k[:, :, rows], v[:, :, rows], attn_mask=seen))
        start += length
    return torch.cat(outputs, dim=2).transpose(1, 2)


def make(lengths, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    q, k, v = (
        torch.randn(1, heads, total, 4, generator=generator, dtype=dtype).requires_grad_() for heads in (4, 2, 2)
    )
    layout = make_layout(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), CPU, "padded")
    return q, k, v, layout


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=8))
def test_packed_output_and_gradient_equal_single_segments(lengths):
    q, k, v, layout = make(lengths)
    found, _ = packed_attention(nn.Identity(), q, k, v, None, packed_layout=layout)
    wanted = one_by_one(q, k, v, lengths)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    mix = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad((found * mix).sum(), [q, k, v]),
        torch.autograd.grad((wanted * mix).sum(), [q, k, v]),
        rtol=1e-11, atol=1e-12,
    )  # fmt: skip


def test_changing_one_segment_leaves_the_others_bit_for_bit():
    q, k, v, layout = make([5, 70, 7])
    before, _ = packed_attention(nn.Identity(), q, k, v, None, packed_layout=layout)
    with torch.no_grad():
        for tensor in (q, k, v):
            tensor[:, :, 5:75] += 3.0
    after, _ = packed_attention(nn.Identity(), q, k, v, None, packed_layout=layout)
    torch.testing.assert_close(after[:, :5], before[:, :5], rtol=0, atol=0)
    torch.testing.assert_close(after[:, 75:], before[:, 75:], rtol=0, atol=0)


@pytest.mark.parametrize("window", [1, 3, 100])
def test_a_sliding_window_counts_the_token_itself(window):
    lengths = [9, 4, 40]
    q, k, v, layout = make(lengths)
    found, _ = packed_attention(nn.Identity(), q, k, v, None, packed_layout=layout, sliding_window=window)
    torch.testing.assert_close(found, one_by_one(q, k, v, lengths, window), rtol=1e-12, atol=1e-12)


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=60))
def test_padded_calls_hold_every_segment_once_and_waste_little(lengths):
    found = bucket_segments(np.array(lengths))
    assert sorted(int(i) for members in found for i in members) == list(range(len(lengths)))
    for members in found:
        longest = max(lengths[i] for i in members)
        assert longest <= 64 or all(lengths[i] >= 0.75 * longest for i in members)


@pytest.mark.parametrize(("option", "kernel", "named"), [
    ({"softcap": 30.0}, "varlen", "softcap"), ({"s_aux": torch.zeros(4)}, "flash_attn", "s_aux"),
    ({"position_bias": torch.zeros(3, 3)}, "padded", "position_bias"), ({"is_causal": False}, "padded", "is_causal"),
])  # fmt: skip
def test_what_a_kernel_does_not_know_is_refused_and_never_ignored(option, kernel, named):
    q, k, v, layout = make([3])
    layout.kernel = kernel
    with pytest.raises(UserError, match=named):
        packed_attention(nn.Identity(), q, k, v, None, packed_layout=layout, **option)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.7, False), (None, True), (0.7, True)])
def test_soft_caps_and_sinks_are_those_of_the_definition(window, softcap, has_sinks):
    lengths = [5, 70, 7]
    q, k, v, layout = make(lengths)
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64).requires_grad_() if has_sinks else None
    found, _ = packed_attention(
        nn.Identity(), q, k, v, None, packed_layout=layout, sliding_window=window, softcap=softcap, s_aux=sinks
    )
    wide_k, wide_v = (t.repeat_interleave(2, dim=1) for t in (k, v))
    start, rows = 0, []
    for length in lengths:
        for query in range(start, start + length):
            first = start if window is None else max(start, query - window + 1)
            score_HK = (wide_k[0, :, first : query + 1] @ q[0, :, query, :, None]).squeeze(-1) / 2
            score_HK = score_HK if softcap is None else softcap * torch.tanh(score_HK / softcap)
            weight_HK = score_HK.exp()
            total_H = weight_HK.sum(1) + (0 if sinks is None else sinks.exp())
            rows.append((weight_HK[:, :, None] * wide_v[0, :, first : query + 1]).sum(1) / total_H[:, None])
        start += length
    wanted = torch.stack(rows)[None]
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), inputs), torch.autograd.grad(wanted.square().sum(), inputs),
        rtol=1e-9, atol=1e-11,
    )  # fmt: skip


def test_values_may_be_narrower_than_keys():
    """As in latent attention."""
    q, k, v, layout = make([5, 9])
    found, _ = packed_attention(nn.Identity(), q, k, v[..., :3], None, packed_layout=layout)
    whole, _ = packed_attention(nn.Identity(), q, k, v, None, packed_layout=layout)
    torch.testing.assert_close(found, whole[..., :3])


def test_anything_that_the_offset_kernels_do_not_take_is_padded():
    gpu = torch.device("cuda")
    assert choose_kernel(gpu, torch.bfloat16, 64) != "padded"
    assert choose_kernel(CPU, torch.bfloat16, 64) == "padded"
    assert choose_kernel(gpu, torch.float32, 64) == "padded"
    assert choose_kernel(gpu, torch.bfloat16, 4) == "padded"
    assert choose_kernel(gpu, torch.bfloat16, 512) == "padded"


def test_flash_attention_4_is_used_for_tested_gpus_and_head_sizes(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(flash_attention_4, "is_installed", lambda name: True)
    for capability, head_dim, wanted in (((9, 0), 64, True), ((8, 0), 64, False), ((9, 0), 8, False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert (choose_kernel(gpu, torch.bfloat16, head_dim) == "flash_attn_4") is wanted
