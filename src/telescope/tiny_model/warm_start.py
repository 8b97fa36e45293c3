"""Supervised warm start: teaches random weights the answer format.

Owns batches, optimizer and schedule. Invariants: the number of steps is fixed, and the result follows from settings and
examples alone (the number of threads is fixed too, because it changes floating-point sums).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from telescope.tiny_model.cache import Report, TinyModelSettings, WarmStartProgress
from telescope.tiny_model.examples import Example, examples_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

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
