"""Turns join as the chat template renders them, token by token, for common templates.

Tokenizers are made here: small vocabularies, real pre-tokenization, the special tokens and templates of each family.
"""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from telescope.evals import get_eval
from telescope.rollout.rendering import Dialogue, Divergence, Renderer, RendererSpec

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('Role not supported') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else 'user' }}\n{{ m['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
# Removes the reasoning of earlier answers, and prompts an answer without reasoning with an empty one.
THINKING = (
    "{% for m in messages %}{% set content = m['content'] %}"
    "{% if m['role'] == 'assistant' and '</think>' in content and not loop.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

BYTES, SPACES = "bytes", "spaces"
FAMILIES: dict[str, tuple[str, str, list[str], str, str]] = {
    # template, tokenizer, special tokens, beginning of sequence, end of an answer
    "chatml": (CHATML, BYTES, ["<|im_start|>", "<|im_end|>"], "", "<|im_end|>"),
    "llama3": (
        LLAMA3, BYTES, ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|begin_of_text|>", "<|eot_id|>",
    ),
    "gemma": (GEMMA, SPACES, ["<bos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<end_of_turn>"),
    "mistral": (MISTRAL, SPACES, ["<s>", "</s>", "[INST]", "[/INST]"], "<s>", "</s>"),
    "thinking": (THINKING, BYTES, ["<|im_start|>", "<|im_end|>"], "", "<|im_end|>"),
    "plain": (PLAIN, BYTES, ["<eos>"], "", "<eos>"),
}  # fmt: skip

TEXTS = ["Guess a word of five letters.", "crane", "I say slate, for its letters.", "G Y X X G\n\ntry again", "  done "]


def renderer(family: str, *, enable_thinking: bool = False) -> Renderer:
    template, kind, specials, bos, eos = FAMILIES[family]
    raw = Tokenizer(models.BPE(byte_fallback=kind == SPACES, unk_token="<unk>" if kind == SPACES else None))
    if kind == BYTES:
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        alphabet, first = pre_tokenizers.ByteLevel.alphabet(), []
    else:
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if family == "mistral" else "never")
        raw.decoder = decoders.Metaspace(prepend_scheme="first" if family == "mistral" else "never")
        alphabet, first = [chr(code) for code in range(32, 127)] + ["\n"], ["<unk>"]
    added = [AddedToken(token, special=True, normalized=False) for token in [*first, *specials]]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=added, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(TEXTS * 3 + ["user assistant model tool system \n\n \n"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=bos or None, eos_token=eos)
    tokenizer.chat_template = template
    return Renderer(RendererSpec(family, enable_thinking=enable_thinking), tokenizer)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


GUESS = [user("Guess.")]


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def whole(made: Renderer, messages: list[dict[str, Any]], *, prompt: bool) -> list[int]:
    text = made.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt, enable_thinking=made.spec.enable_thinking
    )
    return made.encode(text, from_template=True)


def sampled(made: Renderer, messages: list[dict[str, Any]], answer: str) -> list[int]:
    """Ids that a model samples for `answer` if it follows the template, end token included."""
    prompt, closed = whole(made, messages, prompt=True), whole(made, [*messages, assistant(answer)], prompt=False)
    assert closed[: len(prompt)] == prompt
    end = made.tokenizer.eos_token_id
    return closed[len(prompt) : closed.index(end, len(prompt)) + 1]


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma", "mistral"])
def test_turns_join_token_by_token_as_the_template_writes_them(family: str) -> None:
    made = renderer(family)
    dialogue, messages = Dialogue(made), GUESS
    ids = dialogue.begin(messages)
    for answer, reply in (("crane", "G Y X X G\n\ntry again"), ("I say slate, for its letters.", "G G"), ("done", "?")):
        tokens = sampled(made, messages, answer)
        text = made.decode(tokens, cut_end_token=True)
        messages = [*messages, assistant(text), user(reply)]
        extension = dialogue.extend(text, tokens, messages, ended=True)
        ids = [*ids, *tokens, *extension.token_ids]
        assert ids == whole(made, messages, prompt=True)
        assert (extension.restarts, extension.divergence) == (False, None)
    bos = made.tokenizer.bos_token_id
    assert bos is None or ids.count(bos) == 1, "no second beginning of sequence"


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma", "mistral"])
def test_a_truncated_answer_is_ended_by_the_text_that_follows(family: str) -> None:
    made = renderer(family)
    dialogue, messages = Dialogue(made), GUESS
    ids = dialogue.begin(messages)
    tokens = sampled(made, messages, "crane")[:-1]
    messages = [*messages, assistant("crane"), user("too long")]
    extension = dialogue.extend("crane", tokens, messages, ended=False)
    assert extension.token_ids[0] == made.tokenizer.eos_token_id, "the end that the model did not sample is not trained"
    assert [*ids, *tokens, *extension.token_ids] == whole(made, messages, prompt=True)
    assert extension.divergence is None


def test_sampled_ids_are_kept_even_if_the_text_tokenizes_differently() -> None:
    made = renderer("chatml")
    dialogue, messages = Dialogue(made), GUESS
    dialogue.begin(messages)
    letters = [made.tokenizer.convert_tokens_to_ids(letter) for letter in "crane"]
    assert letters != sampled(made, messages, "crane")[:-1], "the model took another way to the same text"
    extension = dialogue.extend(
        "crane", [*letters, made.tokenizer.eos_token_id], [*messages, assistant("crane"), user("no")], ended=True
    )
    assert (extension.restarts, extension.divergence) == (False, None)
    text = made.decode(extension.token_ids, cut_end_token=False)
    assert text == "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("family", ["llama3", "gemma"])
def test_an_answer_that_the_template_trims_is_kept_and_counted(family: str) -> None:
    made = renderer(family)
    dialogue, messages = Dialogue(made), GUESS
    dialogue.begin(messages)
    end = made.tokenizer.eos_token_id
    seen = []
    for answer in ("  done ", "crane", "slate"):
        tokens = [*made.encode_continuation(answer), end]
        messages = [*messages, assistant(answer), user("no")]
        extension = dialogue.extend(answer, tokens, messages, ended=True)
        assert not extension.restarts
        seen.append(extension.divergence)
    assert seen == [None, Divergence.WHITESPACE, None], "counted once, when it has become history"


def test_a_model_that_ends_with_another_token_than_the_template_is_counted() -> None:
    made = renderer("llama3")
    dialogue, messages = Dialogue(made), GUESS
    dialogue.begin(messages)
    other = made.tokenizer.bos_token_id
    extension = dialogue.extend("crane", [5, 6, other], [*messages, assistant("crane"), user("no")], ended=True)
    assert extension.divergence is Divergence.END_TOKEN
    assert extension.token_ids[0] == made.tokenizer.eos_token_id, "no sampled token is removed"


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_the_sampled_ids_stay_where_the_template_removes_reasoning(enable_thinking: bool) -> None:
    made = renderer("thinking", enable_thinking=enable_thinking)
    dialogue, messages = Dialogue(made), GUESS
    ids = dialogue.begin(messages)
    text, seen = made.decode(ids, cut_end_token=False), []
    start = text[text.index("<|im_start|>assistant") :]
    for answer in ("<think>\nhm\n</think>\n\ncrane", "<think>\nso\n</think>\n\nslate", "done"):
        messages = [*messages, assistant(answer), user("no")]
        tokens = [*made.encode_continuation(answer), made.tokenizer.eos_token_id]
        extension = dialogue.extend(answer, tokens, messages, ended=True)
        ids += [*tokens, *extension.token_ids]
        text += f"{answer}<|im_end|>\n<|im_start|>user\nno<|im_end|>\n{start}"
        assert made.decode(ids, cut_end_token=False) == text
        assert not extension.restarts
        seen.append(extension.divergence)
    history, prompt_start = Divergence.HISTORY, Divergence.PROMPT_START
    assert seen == ([None, history, history] if enable_thinking else [prompt_start, history, history])


@pytest.mark.parametrize("opens", [False, True])
def test_reasoning_that_was_cut_off_is_closed(opens: bool) -> None:
    made = renderer("chatml")
    dialogue, messages = Dialogue(made, thinking_prefix=opens), GUESS
    dialogue.begin(messages)
    answer = "hm" if opens else "<think>\nhm"
    messages = [*messages, assistant(dialogue.opening + answer), user("no")]
    extension = dialogue.extend(answer, made.encode_continuation(answer), messages, ended=False)
    assert made.decode(extension.token_ids, cut_end_token=False).startswith("</think><|im_end|>\n<|im_start|>user\nno")
    assert not extension.restarts


def test_a_branch_goes_on_from_the_same_prompt_with_another_answer() -> None:
    made = renderer("mistral")
    trunk, messages = Dialogue(made), GUESS
    ids = trunk.begin(messages)
    for answer in ("crane", "slate"):
        branch, said = trunk.branch(), messages
        joined = ids
        for _ in range(2):
            tokens = sampled(made, said, answer)
            said = [*said, assistant(answer), user("no")]
            joined = [*joined, *tokens, *branch.extend(answer, tokens, said, ended=True).token_ids]
        assert joined == whole(made, said, prompt=True)


@pytest.mark.parametrize(
    ("loop", "interleaved", "divergence"),
    [("in messages if m.role == 'user' %}", True, Divergence.HISTORY), ("in messages %}", False, None)],
    ids=["the template leaves out the answer", "not interleaved"],
)
def test_every_prompt_is_rendered_from_the_start(loop: str, interleaved: bool, divergence: Divergence | None) -> None:
    made = renderer("chatml")
    made.tokenizer.chat_template = CHATML.replace("in messages %}", loop)
    dialogue = Dialogue(made, interleaved=interleaved)
    dialogue.begin(GUESS)
    messages = [*GUESS, assistant("crane"), user("no")]
    extension = dialogue.extend("crane", [5, 6], messages, ended=True)
    assert (extension.restarts, extension.divergence) == (True, divergence)
    assert extension.token_ids == whole(made, messages, prompt=True)


def test_an_environment_that_rewrites_the_conversation_starts_a_new_prompt() -> None:
    made = renderer("chatml")
    dialogue = Dialogue(made)
    dialogue.begin([user("a long story")])
    summary = [user("a summary of it all")]
    extension = dialogue.extend("crane", [5, 6], summary, ended=False)
    assert extension.restarts
    assert extension.token_ids == whole(made, summary, prompt=True)


def test_a_template_without_special_tokens_joins_at_its_text() -> None:
    made = renderer("plain")
    dialogue, messages = Dialogue(made), GUESS
    ids = dialogue.begin(messages)
    tokens = made.encode_continuation("crane")
    messages = [*messages, assistant("crane"), user("no")]
    extension = dialogue.extend("crane", [*tokens, made.tokenizer.eos_token_id], messages, ended=True)
    assert extension.divergence is Divergence.END_TOKEN, "the template has no end of an answer"
    text = made.decode([*ids, *tokens, *extension.token_ids], cut_end_token=False)
    assert text == "user: Guess.\nassistant: crane\nuser: no\nassistant: "


@pytest.mark.parametrize("enable_thinking", [False, True])
def test_evals_use_the_chat_template_with_their_system_prompt_and_the_runs_thinking(enable_thinking: bool) -> None:
    made = renderer("thinking", enable_thinking=enable_thinking)
    ending = "" if enable_thinking else "<think>\n\n</think>\n\n"
    for name, kwargs in (("gpqa_diamond", {}), ("math500", {"instruction_prompt_post": None})):
        text = made.prompt_text(get_eval(name, system_prompt="Be brief.", **kwargs), "What?")
        rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
        assert text == rendered + ending
