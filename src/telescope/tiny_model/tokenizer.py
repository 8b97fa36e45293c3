"""The tiny model's tokenizer: byte-level BPE with a ChatML template, made without a network.

Owns the vocabulary, the special tokens and the chat template. Invariants: any text survives encode and decode up to
Unicode normalisation (NFC), since every byte has a token of its own; every digit is a token of its own, so that numbers
look alike wherever they stand; the end of a turn is the end-of-sequence token.

Normalisation and the splitting into words are Qwen2's, to the letter: current versions of `transformers` load the
tokenizer of any model of type `qwen2` with that class, which puts its own in place of what the files say.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TURN_START, TURN_END, PADDING = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
MARKUP_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")
"""Tokens that are ordinary text: they survive decoding without special tokens, because parsers look for them."""

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
    """Train the merges on `corpus` (few, short, typical prompts) and wrap them as a fast Hugging Face tokenizer.

    `more_markup` are tokens of the same kind as `MARKUP_TOKENS`.

    The vocabulary holds at most `vocab_size` tokens: special and markup tokens, 256 bytes, then merges. The same corpus
    in the same order gives the same ids.
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
