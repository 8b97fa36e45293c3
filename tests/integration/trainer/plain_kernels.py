"""FlashAttention's kernels written out, so that blocks are compiled on the CPU as they are on a GPU."""

import functools

import pytest
import torch

from telescope.trainer import flash_attention_4
from telescope.trainer.backends.fsdp import sharding


class PlainKernels:
    """What the package's two functions compute, written out, and how often each was called."""

    def __init__(self) -> None:
        self.calls = {"forward": 0, "backward": 0}

    def probabilities(self, q_THD, k_TKD, options):
        """Attention weights [H, T, T] and the key head of each query head [H]."""
        assert options["causal"]
        assert options["window_size_left"] is None
        num_tokens, num_heads, _ = q_THD.shape
        key_head_H = torch.arange(num_heads) // (num_heads // k_TKD.shape[1])
        segment_T = torch.bucketize(torch.arange(num_tokens), options["cu_seqlens_q"], right=True)
        assert int(segment_T.bincount().max()) <= options["max_seqlen_q"]
        is_seen = (segment_T[:, None] == segment_T[None, :]) & torch.ones(num_tokens, num_tokens).tril().bool()
        scores = torch.einsum("thd,shd->hts", q_THD, k_TKD[:, key_head_H]) * options["softmax_scale"]
        return scores.masked_fill(~is_seen, float("-inf")).softmax(dim=-1), key_head_H

    def forward(self, q_THD, k_TKD, v_TKD, *, return_lse, **options):
        assert return_lse
        self.calls["forward"] += 1
        p, key_head_H = self.probabilities(q_THD, k_TKD, options)
        return torch.einsum("hts,shd->thd", p, v_TKD[:, key_head_H]), p.new_zeros(p.shape[:2])

    def backward(self, q_THD, k_TKD, v_TKD, out_THD, grad_THD, lse_HT, **options):
        self.calls["backward"] += 1
        p, key_head_H = self.probabilities(q_THD, k_TKD, options)
        grad_p = torch.einsum("thd,shd->hts", grad_THD, v_TKD[:, key_head_H])
        grad_scores = p * (grad_p - (grad_p * p).sum(dim=-1, keepdim=True)) * options["softmax_scale"]
        grad_q = torch.einsum("hts,shd->thd", grad_scores, k_TKD[:, key_head_H])
        grad_k = torch.zeros_like(k_TKD).index_add(1, key_head_H, torch.einsum("hts,thd->shd", grad_scores, q_THD))
        grad_v = torch.zeros_like(v_TKD).index_add(1, key_head_H, torch.einsum("hts,thd->shd", p, grad_THD))
        return grad_q, grad_k, grad_v


def use_plain_kernels(patch: pytest.MonkeyPatch) -> PlainKernels:
    """Let the trainers that are set up from now on take these for the package's kernels, and compile their blocks."""
    plain = PlainKernels()
    patch.setattr(flash_attention_4, "_kernels", lambda: (plain.forward, plain.backward))
    patch.setattr(sharding, "choose_kernel", lambda *_, **__: "flash_attn_4")
    # Traced, differentiated and partitioned as on a GPU, but without a C++ compiler's minutes.
    patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager_decomp_partition"))
    return plain
