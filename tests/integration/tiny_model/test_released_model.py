"""SmolLM2-135M-Instruct as `telescope tiny-model --from` makes it, against what its makers released."""

from pathlib import Path
from typing import Any

import pytest
from tests import released

from telescope.errors import RunError
from telescope.tiny_model.released import RELEASED, _convert

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUESTION = [{"role": "user", "content": "What is 7 + 5?"}]
RENDERED = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n<|im_start|>assistant\n"
)


def test_the_conversion_gives_a_chat_model_with_its_template_and_end_token(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    RELEASED["smollm2-135m"].build(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size == pytest.approx(269e6, rel=0.01)
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in tmp_path.iterdir())
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert (model.config.model_type, model.config.vocab_size, model.config.eos_token_id) == ("llama", 49152, 2)
    assert model.config.tie_word_embeddings
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False) == RENDERED
    assert tokenizer.tokenize("What is 123 + 45?") == ["What", "Ġis", "Ġ", *"123", "Ġ+", "Ġ", *"45", "?"]
    prompt = tokenizer(RENDERED, return_tensors="pt", add_special_tokens=False)
    answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert tokenizer.decode(answer) == "To add 7 and 5, you simply add them together: 7 + 5 = 12.<|im_end|>"


def test_tests_get_the_same_tokenizer() -> None:
    assert released.tokenizer("smollm2").apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False) == (
        RENDERED
    )


def test_a_file_that_transformers_cannot_read_is_named_with_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not one")
    with pytest.raises(RunError, match=r"(?s)transformers could not convert model\.gguf:.*Error"):
        _convert(tmp_path / "model.gguf", tmp_path / "out", tmp_path)
