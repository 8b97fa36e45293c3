"""Answers are parsed as vLLM's own parsers do, for the families that both know."""

import json
from typing import Any

import pytest
from tests import released
from tests.unit.environments.test_environment_tool_forms import FORMS, glm, qwen_coder
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from telescope.rollout.answers import parse_answer

BEGIN, END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
KIMI = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
PARSERS = {
    "hermes": "hermes", "qwen coder": "qwen3_coder", "glm": "glm45", "llama": "llama3_json", "python": "pythonic",
    "deepseek": "deepseek_v3", "deepseek 3.1": "deepseek_v31", "kimi": "kimi_k2", "mistral with names": "mistral",
    "lfm": "lfm2",
}  # fmt: skip
"""A form of calls, and the name of vLLM's parser."""
AROUND = {"deepseek": (BEGIN, END), "deepseek 3.1": (BEGIN, END), "kimi": KIMI}
ALONE = {"llama", "python"}
"""Forms beside which vLLM drops text, or reads no call."""
PROPERTIES = {"text": {"type": "string"}, "times": {"type": "integer"}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": PROPERTIES}}}
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(released.tokenizer_folder("qwen3")))
    marks = [f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581begin", "call\u2581end", "sep")]
    kimi = [f"<|tool_call_{name}|>" for name in ("begin", "end", "argument_begin", "start")]
    glm = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
    others = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
    tokenizer.add_tokens([BEGIN, END, *marks, *KIMI, *kimi, *glm, *others], special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("form", PARSERS)
@pytest.mark.parametrize("arguments", [{"text": 'a "b"\n{}', "times": 2}, {"text": "12"}])
def test_text_and_calls_are_those_of_vllm(tokenizer: Any, form: str, arguments: dict[str, Any]) -> None:
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "Write."}], tools=TOOLS)
    call = (FORMS | {"qwen coder": qwen_coder, "glm": glm})[form](arguments)
    before, after = AROUND.get(form, ("", ""))
    for answer in (f"{'' if form in ALONE else 'I write.'}{before}{call}{after}", "Four."):
        theirs = ToolParserManager.get_tool_parser(PARSERS[form])(tokenizer, request.tools)
        found = theirs.extract_tool_calls(answer, request)
        ours = parse_answer(answer, opened="", tools=TOOLS, is_cut=False)
        calls = [(each.function.name, json.loads(each.function.arguments)) for each in found.tool_calls]
        assert [(each.name, each.arguments) for each in ours.tool_calls] == calls
        assert ours.text.split() == (found.content or "").split()


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(("opened", "begins"), [("", "<think>\n"), ("<think>", "")])
def test_reasoning_is_that_of_vllm(tokenizer: Any, name: str, opened: str, begins: str) -> None:
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "Why?"}])
    for answer in (f"{begins}Hm.\n</think>\n\nFour.", f"{begins}Hm. I"):
        parser = ReasoningParserManager.get_reasoning_parser(name)(tokenizer)
        reasoning, content = parser.extract_reasoning(answer, request)
        ours = parse_answer(answer, opened=opened, tools=(), is_cut=True)
        assert (ours.reasoning, ours.text) == ((reasoning or "").strip(), (content or "").strip())
