"""The estimate of a trainer rank's memory against a count of every tensor of a step, at the widths of real models."""

from typing import Any

import pytest
import torch
from tests.integration.trainer.fake_step import as_on_a_gpu, bytes_of_a_step
from tests.integration.trainer.live_bytes import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode

from telescope.config.memory import VOCABULARY_BLOCKS
from telescope.trainer import logprob
from telescope.trainer.logprob import LogprobHead

TOO_LOW, TOO_HIGH = 0.03, 0.12
"""Shares of the count by which the estimate may be off. With few layers, what is not sharded weighs most."""


def qwen3(hidden: int, inner: int, heads: int, layers: int, *, tied: bool) -> dict[str, Any]:
    """The widths of a model of that family, with fewer layers."""
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": tied,
    }  # fmt: skip


SMALL, MIDDLE, LARGE = (
    qwen3(1024, 3072, 16, 6, tied=True),
    qwen3(4096, 12_288, 32, 6, tied=False),
    qwen3(5120, 17_408, 40, 4, tied=False),
)
FULL = {"recompute_attention": True}
CASES: dict[str, tuple[dict[str, Any], int, int, dict[str, Any]]] = {
    "14B on four, 16k": (LARGE, 4, 16_384, {}),
    "14B on four, nothing recomputed": (LARGE, 4, 16_384, {"gradient_checkpointing": False}),
    "14B on four, half recomputed": (LARGE, 4, 16_384, {"gradient_checkpointing_layers": 2}),
    "8B on two, 4k": (MIDDLE, 2, 4096, {}),
    "8B on two, 64k, bfloat16 weights, all recomputed": (MIDDLE, 2, 65_536, {"model_dtype": "bfloat16", **FULL}),
    "8B on two, weights stay gathered": (MIDDLE, 2, 16_384, {"fsdp_reshard_after_forward": False}),
    "8B on two, three layers ahead": (MIDDLE, 2, 2048, {"fsdp_prefetch_layers": 3}),
    "0.6B on two, short": (SMALL, 2, 2048, {}),
    "0.6B on one, 16k": (SMALL, 1, 16_384, {}),
    "8B on four that share a row of 64k": (MIDDLE, 4, 65_536, {"fsdp_context_parallel_size": 4}),
    "0.6B on sixteen that share a row of 64k": (SMALL, 16, 65_536, {"fsdp_context_parallel_size": 16}),
    "8B on four, two share a row, nothing recomputed": (
        MIDDLE,
        4,
        32_768,
        {"fsdp_context_parallel_size": 2, "gradient_checkpointing": False},
    ),
    "14B on one, adapters": (LARGE, 1, 16_384, {"model_dtype": "bfloat16", "lora_rank": 16}),
    "8B on two, adapters, nothing recomputed": (
        MIDDLE,
        2,
        16_384,
        {"model_dtype": "bfloat16", "lora_rank": 64, "gradient_checkpointing": False},
    ),
}


SLOW = {
    "14B on four, 16k", "14B on four, nothing recomputed", "8B on two, 4k", "8B on two, three layers ahead",
    "0.6B on two, short", "8B on two, weights stay gathered", "0.6B on one, 16k",
    "0.6B on sixteen that share a row of 64k", "8B on four, two share a row, nothing recomputed",
    "8B on two, adapters, nothing recomputed",
}  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_the_estimate_is_near_the_count_and_not_below_it_by_much(case, tmp_path):
    shape, ranks, tokens, settings = CASES[case]
    counted, estimated = bytes_of_a_step(tmp_path, shape, trainer_num_workers=ranks, seq_len=tokens, **settings)
    assert (1 - TOO_LOW) * counted <= estimated <= (1 + TOO_HIGH) * counted


def test_the_output_layer_keeps_one_gradient_and_one_block_of_wide_sums(monkeypatch):
    num_tokens, width, vocab, chunk = 16_384, 1024, 151_936, 1024
    as_on_a_gpu(monkeypatch, None)
    with FakeTensorMode(), LiveBytes() as live:
        head = LogprobHead(torch.nn.Parameter(torch.empty(vocab, width, dtype=torch.bfloat16)), None, chunk)
        hidden = torch.empty(num_tokens, width, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty(num_tokens, dtype=torch.int64)
        before = live.now
        logp, entropy = head(hidden, targets, 1.0)
        (logp.sum() + entropy.sum()).backward()
    block = logprob.COLUMNS_MULTIPLE * width + vocab * width / VOCABULARY_BLOCKS
    logits = chunk * vocab + VOCABULARY_BLOCKS * chunk * logprob.COLUMNS_MULTIPLE
    allowed = vocab * width * 2 + block * 4 + num_tokens * (width * (2 + 4) + 40) + logits * (4 + 2)
    assert live.peak - before <= allowed
