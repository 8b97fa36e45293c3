"""Invariants of the tokenizer: lossless, one token per digit, turns end with the end-of-sequence token."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.tiny_model.build import MARKUP_TOKENS, PADDING, TURN_END, TURN_START, build_tokenizer

CORPUS = ["3 7 12 -> 22", "10 9 8 -> 7", "Make 24 from the numbers 3, 8."]
TOKENIZER = build_tokenizer(CORPUS, 384)


@given(st.text(max_size=60))
def test_any_text_survives_up_to_unicode_normalization(text):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == unicodedata.normalize("NFC", text)


@given(st.integers(min_value=0))
def test_every_digit_is_a_token_of_its_own(number):
    ids = TOKENIZER(f"a{number} {number}", add_special_tokens=False)["input_ids"]
    assert [TOKENIZER.decode([i]) for i in ids] == ["a", *str(number), " ", *str(number)]


def test_every_byte_has_a_token_and_the_same_corpus_gives_the_same_ids():
    assert len(TOKENIZER(chr(0x10FFFF))["input_ids"]) == 4
    assert len(TOKENIZER) <= 384
    assert build_tokenizer(CORPUS, 384).get_vocab() == TOKENIZER.get_vocab()


@pytest.mark.parametrize(
    ("text", "kept"), [*((text, text) for text in MARKUP_TOKENS), (TURN_START, ""), (TURN_END, ""), (PADDING, "")]
)
def test_markup_and_special_tokens_are_single_and_the_latter_vanish_on_request(text, kept):
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == 1
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == kept


def test_the_chat_template_is_chatml():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 7 12 -> 22"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert text == f"{system}<|im_start|>user\n3 7 12 -> 22<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.eos_token == TURN_END
    assert TOKENIZER.pad_token_id != TOKENIZER.eos_token_id
