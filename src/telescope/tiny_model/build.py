"""Builds one tiny model: network, tokenizer, warm start and files.

The network is a transformers Qwen2, small enough for a CPU. The tokenizer is byte-level BPE with a ChatML template.
Invariants of the tokenizer: any text survives encoding and decoding up to Unicode normalization (NFC), because every
byte has a token; every digit is one token; the end of a turn is the end-of-sequence token. Normalization and the
splitting into words are exactly Qwen2's: transformers loads the tokenizer of any model of type `qwen2` with that class,
which replaces what the files contain. Invariants of the warm start, which teaches random weights the answer format: the
number of steps is fixed, and the result follows from settings and examples alone (the number of threads is fixed too,
because it changes floating-point sums). Location and reuse of the folder are in `cache`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telescope.tiny_model.cache import Report, TinyModelSettings, WarmStartProgress
from telescope.tiny_model.examples import Example, examples_of, markup_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

_NUM_CORPUS_PROMPTS = 64


def build_tiny_model(output: Path, settings: TinyModelSettings, report: Report = None) -> None:
    """Writes config, safetensors, tokenizer and generation config into the existing folder `output`."""
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


_THREADS = 1
_WARM_UP_SHARE = 0.05
_FINAL_RATE_SHARE = 0.05
_BETAS = (0.9, 0.98)
_GRAD_CLIP = 1.0


def learning_rate_at(step: int, num_steps: int, peak: float) -> float:
    """Returns the rate of a step, from 0: linear warm-up, then a cosine that ends at a twentieth of the peak."""
    warm_up = max(1, round(num_steps * _WARM_UP_SHARE))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, num_steps - warm_up)
    return peak * (_FINAL_RATE_SHARE + (1 - _FINAL_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * progress)))


def encode_examples(examples: list[Example], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids [B, L], padded on the right, and targets [B, L], which are -100 outside of answers.

    Turns are joined as in a rollout: an answer's tokens are kept, and the text between two answers is the template's.
    """
    import torch

    pieces = [_pieces(example, tokenizer) for example in examples]
    # One tokenizer call for all pieces.
    ids = iter(tokenizer([piece for row in pieces for piece in row], add_special_tokens=False)["input_ids"])
    rows = [[next(ids) for _ in row] for row in pieces]
    length = max(sum(map(len, row)) for row in rows)
    tokens_BL = torch.full((len(examples), length), tokenizer.pad_token_id, dtype=torch.long)
    targets_BL = torch.full((len(examples), length), -100, dtype=torch.long)
    for number, row in enumerate(rows):
        tokens_BL[number, : sum(map(len, row))] = torch.tensor([token for piece in row for token in piece])
        position = 0
        for prompt, answer in zip(row[::2], row[1::2], strict=True):
            start = position + len(prompt)
            position = start + len(answer)
            targets_BL[number, start - 1 : position - 1] = torch.tensor(answer)
    return tokens_BL, targets_BL


def _pieces(example: Example, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Splits the templated conversation into prompt, answer, prompt, answer."""
    pieces: list[str] = []
    messages: list[dict[str, Any]] = []
    for turn in example:
        messages += turn.messages
        written = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        pieces += [written[sum(map(len, pieces)) :], turn.answer + str(tokenizer.eos_token)]
        messages.append({"role": "assistant", "content": turn.answer})
    return pieces


def warm_start(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: TinyModelSettings, report: Report = None
) -> None:
    """Trains `model` in place for `settings.warm_start_steps` steps. `report` is called after every step."""
    import torch

    source = examples_of(settings)
    num_clean_steps = round(settings.warm_start_steps * settings.clean_share)
    optimizer = torch.optim.AdamW(model.parameters(), betas=_BETAS, weight_decay=0.0)
    model.train()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(_THREADS)
    try:
        for step in range(settings.warm_start_steps):
            wrong_share = 0.0 if step < num_clean_steps else settings.wrong_share
            examples: list[Example] = []
            while sum(len(example) for example in examples) < settings.warm_start_batch_size:
                examples.append(source.draw(wrong_share))
            tokens_BL, targets_BL = encode_examples(examples, tokenizer)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, settings.warm_start_steps, settings.warm_start_learning_rate)
            # Causal attention and padding on the right: no answer token sees padding, so no mask is needed.
            hidden_BLD = model.model(tokens_BL, use_cache=False).last_hidden_state
            trained_BL = targets_BL != -100
            logits_NV = model.lm_head(hidden_BLD[trained_BL])
            loss = torch.nn.functional.cross_entropy(logits_NV, targets_BL[trained_BL])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), _GRAD_CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if report is not None:
                report(WarmStartProgress(step + 1, settings.warm_start_steps, float(loss.detach())))
    finally:
        torch.set_num_threads(num_threads)
