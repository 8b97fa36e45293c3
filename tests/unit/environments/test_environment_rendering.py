"""Prompts as text and as token ids, with a fake tokenizer."""

import copy
from datetime import datetime
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import released

from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment
from telescope.errors import UserError
from telescope.rollout.rendering import Renderer, RendererSpec

BOS, EOS = 1000, 1001


class FakeTokenizer:
    """Characters as ids. `adds` are the special tokens that it adds around a text."""

    bos_token, eos_token, bos_token_id, eos_token_id = "<s>", "</s>", BOS, EOS
    all_special_ids = (BOS, EOS)
    added_tokens_decoder = {}  # noqa: RUF012
    chat_template = "a template"

    def __init__(self, adds=""):
        self.adds = adds

    def __call__(self, text, add_special_tokens=True):
        ids = []
        while text:
            special = next((s for s in ("<s>", "</s>") if text.startswith(s)), None)
            ids.append({"<s>": BOS, "</s>": EOS}[special] if special else ord(text[0]))
            text = text[len(special or "x") :]
        if add_special_tokens:
            ids = [BOS] * ("b" in self.adds) + ids + [EOS] * ("e" in self.adds)
        return {"input_ids": ids}

    def decode(self, ids, **_):
        return "".join({BOS: "<s>", EOS: "</s>"}.get(number, chr(number % 1000)) for number in ids)

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, enable_thinking=False, **_):
        text = "<s>" + "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]"
        return text + ("<think>\n" if enable_thinking else "")


class Question(SingleTurnEnvironment):
    def load_dataset(self, num_samples=-1):
        return [Sample("q")]

    def compute_reward(self, completion, sample, eos_token=""):
        return RewardResult(0.0)


def renderer(tokenizer, **options):
    return Renderer(RendererSpec("the/model", **options), tokenizer)


@pytest.mark.parametrize(("template", "shown"), [("llama3_2", "04 May 2031"), ("gptoss", "2031-05-04")])
def test_a_template_shows_the_date_that_it_is_given(template, shown):
    spec = RendererSpec("the/model", chat_template=released.chat_template(template))
    made = Renderer(spec, copy.copy(released.tokenizer("qwen3")), datetime(2031, 5, 4))
    assert shown in made.chat_text([{"role": "user", "content": "q"}])
    assert shown in made.prompt_text(Question(), "q")


@pytest.mark.parametrize("adds", ["", "b", "e", "be"])
@pytest.mark.parametrize("text", ["hello", "<s>hello"])
@pytest.mark.parametrize("from_template", [False, True])
def test_a_prompt_has_one_bos_and_no_eos(adds, text, from_template):
    ids = renderer(FakeTokenizer(adds)).encode(text, from_template=from_template)
    begins = text.startswith("<s>") or (adds.startswith("b") and not from_template)
    assert ids == [BOS] * begins + [ord(c) for c in "hello"]


@given(st.text(alphabet="ab", max_size=5), st.booleans())
def test_an_end_token_that_the_prompt_itself_holds_is_kept(text, from_template):
    assert renderer(FakeTokenizer("be")).encode(text + "</s>", from_template=from_template)[-1] == EOS


def test_template_gets_enable_thinking_and_the_system_prompt_and_the_thinking_prefix_is_added_once():
    thinking = renderer(FakeTokenizer(), enable_thinking=True)
    assert thinking.prompt_text(Question(system_prompt="S"), "q") == "<s>[system]S[user]q[assistant]<think>\n"
    environment = Question(add_thinking_prefix=True)
    assert renderer(FakeTokenizer()).prompt_text(environment, "q").endswith("[assistant]<think>")
    assert environment.format_prompt("q", FakeTokenizer(), add_thinking_prefix=False).endswith("[assistant]")
    assert Question().format_prompt("q", FakeTokenizer(), add_thinking_prefix=True).endswith("[assistant]<think>")
    assert thinking.prompt_text(environment, "q").endswith("[assistant]<think>\n")


def test_messages_keep_their_own_system_prompt():
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}]
    assert Question(system_prompt="S", instruction_prompt="I").build_messages(messages) == messages
    assert Question(system_prompt="S").build_messages(messages[1:])[0]["content"] == "S"


def test_raw_prompts_bypass_the_template_and_need_none():
    environment = Question(instruction_prompt="I")
    environment.uses_chat_template = False
    tokenizer = FakeTokenizer()
    tokenizer.chat_template = None
    assert renderer(tokenizer).prompt_text(environment, "q") == "I\n\nq"
    with pytest.raises(UserError, match="has no chat template"):
        renderer(tokenizer).prompt_text(Question(), "q")


def test_an_overridden_format_prompt_gets_only_what_it_takes():
    class Own(Question):
        def format_prompt(self, question, tokenizer):
            return f"{question}!{tokenizer.bos_token}"

    assert renderer(FakeTokenizer(), enable_thinking=True).prompt_text(Own(), "q") == "q!<s>"

    class Wrong(Question):
        def format_prompt(self, question, tokenizer, **kwargs):
            return SimpleNamespace(**kwargs)

    with pytest.raises(TypeError, match="not a string"):
        renderer(FakeTokenizer()).prompt_text(Wrong(), "q")
