"""Packed attention: a segment sees itself, causally, whatever lies beside it."""

from __future__ import annotations

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


@pytest.mark.parametrize("option", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}])
def test_features_that_are_not_implemented_are_refused(option):
    q, k, v, layout = make([3])
    with pytest.raises(UserError, match="soft-capped scores or attention sinks"):
        packed_attention(nn.Identity(), q, k, v, None, packed_layout=layout, **option)


def test_anything_that_the_offset_kernels_do_not_take_is_padded():
    gpu = torch.device("cuda")
    assert choose_kernel(gpu, torch.bfloat16, 64) != "padded"
    assert choose_kernel(CPU, torch.bfloat16, 64) == "padded"
    assert choose_kernel(gpu, torch.float32, 64) == "padded"
    assert choose_kernel(gpu, torch.bfloat16, 4) == "padded"
    assert choose_kernel(gpu, torch.bfloat16, 512) == "padded"


def test_flash_attention_4_is_used_for_tested_gpus_and_head_sizes(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(flash_attention_4, "is_installed", lambda: True)
    for capability, head_dim, wanted in (((9, 0), 64, True), ((8, 0), 64, False), ((9, 0), 8, False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert (choose_kernel(gpu, torch.bfloat16, head_dim) == "flash_attn_4") is wanted
