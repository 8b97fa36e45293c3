"""Builds one tiny model: network, tokenizer, warm start and files.

The network is a transformers Qwen2, small enough for a CPU. The tokenizer is byte-level BPE with a ChatML template.
Invariants of the tokenizer: any text survives encoding and decoding up to Unicode normalization (NFC), because every
byte has a token; every digit is one token; the end of a turn is the end-of-sequence token. Normalization and the
splitting into words are exactly Qwen2's: transformers loads the tokenizer of any model of type `qwen2` with that class,
which replaces what the files contain. Location and reuse of the folder are in `cache`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from telescope.tiny_model.cache import Report, TinyModelSettings
from telescope.tiny_model.examples import examples_of, markup_of
from telescope.tiny_model.warm_start import warm_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

_NUM_CORPUS_PROMPTS = 64


def build_tiny_model(output: Path, settings: TinyModelSettings, report: Report = None) -> int:
    """Writes config, safetensors, tokenizer and generation config into the existing folder `output`.

    Returns the number of parameters.
    """
    from transformers.utils import logging

    source = examples_of(settings)
    examples = [source.draw(wrong_share=0.0) for _ in range(_NUM_CORPUS_PROMPTS)]
    corpus = [str(message["content"]) for example in examples for turn in example for message in turn.messages]
    tokenizer = build_tokenizer(corpus, settings.vocab_size, markup_of(settings))
    model = build_model(settings, tokenizer)
    warm_start(model, tokenizer, settings, report)
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # stdout and stderr belong to the caller
    try:
        model.save_pretrained(output)
    finally:
        if was_enabled:
            logging.enable_progress_bar()
    tokenizer.save_pretrained(output)
    # The class name that all versions of transformers know.
    path = output / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}, indent=2) + "\n")
    for path in output.iterdir():
        path.chmod(0o644)  # safetensors creates private files, and a cache may be shared
    return int(model.num_parameters())


_INITIALIZER_RANGE = 0.05
"""Standard deviation of the initial weights. The usual 0.02 is for widths of thousands and slows a tiny model down."""


def build_model(settings: TinyModelSettings, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Returns an untrained float32 model in training mode, initialized from `settings.seed`."""
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


TURN_START, TURN_END, PADDING = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
MARKUP_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")
"""Tokens that are ordinary text: they survive decoding without special tokens, because parsers search for them."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_ROLES = ("system\n", "user\n", "assistant\n", "tool\n")


def build_tokenizer(
    corpus: Iterable[str], vocab_size: int, more_markup: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """Trains a fast Hugging Face tokenizer on `corpus` (few, short, typical prompts).

    `more_markup` are more tokens of the kind of `MARKUP_TOKENS`. The vocabulary has at most `vocab_size` tokens:
    special and markup tokens, 256 bytes, then merges. The same corpus in the same order gives the same ids.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=[PADDING, TURN_START, TURN_END, *MARKUP_TOKENS, *more_markup],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*_ROLES, *corpus], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (PADDING, TURN_START, TURN_END)])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*MARKUP_TOKENS, *more_markup)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PADDING,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
