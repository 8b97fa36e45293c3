"""A model with fixed text: each token has one successor.

Attention and MLP add nothing to the residual stream, the embedding of a token is a unit vector of its own, and the
output layer maps that vector to the token that follows. So parsers of an engine can be tested with a known text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from telescope.tiny_model.build import build_tokenizer

LOGIT_SCALE = 10.0


def make_scripted_model(folder: Path, pieces: Sequence[str]) -> None:
    """Write a model that answers every prompt with `pieces`, each of which becomes one token, and ends.

    No piece may come twice: what follows a token follows from that token alone.
    """
    assert len(set(pieces)) == len(pieces)
    tokenizer = build_tokenizer(["what is 2 + 3?"], 320, tuple(pieces))
    template = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=True)
    prompt_ids = template["input_ids"] if not isinstance(template, list) else template
    answer_ids = [tokenizer.convert_tokens_to_ids(piece) for piece in pieces]
    script = [prompt_ids[-1], *answer_ids, tokenizer.eos_token_id]
    assert len(set(script)) == len(script)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    assert len(tokenizer) <= config.hidden_size
    model = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        for parameter in (model.model.layers[0].self_attn.o_proj.weight, model.model.layers[0].mlp.down_proj.weight):
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), config.hidden_size))
        model.lm_head.weight.zero_()
        for token, successor in itertools.pairwise(script):
            model.lm_head.weight[successor, token] = LOGIT_SCALE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
