"""Every attention kernel against exact attention on a GPU. Run by hand: `pytest tests/gpu`.

FlashAttention 4 compiles kernels for each head size, window and ratio of heads, in about ten seconds.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from telescope.trainer import flash_attention_4
from telescope.trainer.attention import make_layout, packed_attention
from telescope.utils.packages import is_installed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

KERNELS = ["varlen", *(["flash_attn_4"] if is_installed("flash_attn.cute") else [])]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("num_key_value_heads", [8, 2])
@pytest.mark.parametrize("head_dim", flash_attention_4.HEAD_DIMS)
def test_offset_kernels_equal_padded_attention(kernel, window, num_key_value_heads, head_dim):
    device = torch.device("cuda")
    lengths = [130, 1, 64, 700, 33, 2]
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, int(cu[-1]), head_dim, device=device, generator=generator)
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


@pytest.mark.parametrize("kernel", KERNELS)
def test_changing_one_segment_leaves_the_others_bit_for_bit(kernel):
    device = torch.device("cuda")
    layout = make_layout(np.array([0, 100, 700, 900], dtype=np.int32), device, kernel)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, 900, 64, device=device, generator=generator, dtype=torch.bfloat16) for heads in (8, 2, 2)
    )
    before, _ = packed_attention(nn.Identity(), q, k, v, None, packed_layout=layout)
    for tensor in (q, k, v):
        tensor[:, :, 100:700] += 3.0
    after, _ = packed_attention(nn.Identity(), q, k, v, None, packed_layout=layout)
    assert torch.equal(after[:, :100], before[:, :100])
    assert torch.equal(after[:, 700:], before[:, 700:])
    assert not torch.equal(after[:, 100:700], before[:, 100:700])
