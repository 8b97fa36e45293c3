"""The tiny model's network: a Qwen2 in the `transformers` sense, small enough for a CPU.

Owns the translation of settings into a `Qwen2Config` and the random start of the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from telescope.tiny_model.settings import TinyModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

_INITIALIZER_RANGE = 0.05
"""Standard deviation of the first weights. Wider than the usual 0.02, which is meant for widths of thousands and
costs a tiny model its first hundred steps."""


def build_model(settings: TinyModelSettings, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """An untrained float32 model in training mode whose weights follow from `settings.seed` alone."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        max_position_embeddings=settings.max_position_embeddings,
        initializer_range=_INITIALIZER_RANGE,
        tie_word_embeddings=settings.tied,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model
