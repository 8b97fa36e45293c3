"""Answers of the policy are parsed into text, reasoning and tool calls."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.environments.test_environment_tool_forms import ELEMENTS, FORMS, MARKUP, qwen_coder

from telescope.rollout.answers import parse_answer

WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "properties": {
                "text": {"type": "string"}, "times": {"type": ["integer", "null"]}, "loud": True,
                "tags": {"anyOf": [{"type": "array"}, {"oneOf": [{"type": "null"}]}]},
            }
        },
    },
}  # fmt: skip
CALLS = FORMS | {form.__name__: form for form in ELEMENTS}
ANALYSIS = "<|channel|>analysis<|message|>"
CHANNELS = {"harmony", "harmony, name first"}
ALONE = {"python"}
"""A form that is a call only where an answer is nothing else."""
WORDS = st.text("abc .\n", min_size=1).map(str.strip).filter(bool)


def parse(text: str, opened: str = "", tools: Any = (WRITE,), is_cut: bool = False) -> tuple[str, str, list[Any]]:
    found = parse_answer(text, opened=opened, tools=tools, is_cut=is_cut)
    assert all(call.name for call in found.tool_calls)
    return found.text, found.reasoning, [call.arguments for call in found.tool_calls]


@given(st.sampled_from(sorted(set(CALLS) - CHANNELS)), WORDS, WORDS, st.booleans(), st.sampled_from(["<think>", ""]))
def test_reasoning_text_and_call_are_told_apart_in_every_form(form, reasoning, text, has_two, opened):
    said = "" if form in ALONE else text
    call = CALLS[form]({"text": text})
    written = f"{'' if opened else '<think>'}\n{reasoning}\n</think>\n\n{said}{call}"
    waits = " I wait." if form == "lfm" else ""
    assert parse(written, opened) == (said + waits, reasoning, [{"text": text}])
    assert parse(f"{written}{call}" if has_two else written, opened, tools=())[2] == []


@pytest.mark.parametrize(("written", "expected"), [
    ("Four.", ("Four.", "", [])),
    (f"{ANALYSIS}2+2<|end|><|start|>assistant<|channel|>final<|message|>Four.", ("Four.", "2+2", [])),
    (
        f"{ANALYSIS}Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I write.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.write <|constrain|>json<|message|>{"text": "a"}<|call|>',
        ("I write.", "Hm.", [{"text": "a"}]),
    ),
    ("<|channel>thought\nHm.<channel|>Four.<turn|>", ("Four.", "Hm.", [])),
    ("[THINK]Hm.[/THINK]Four.", ("Four.", "Hm.", [])),
    ("<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Four.<|END_RESPONSE|>", ("Four.", "Hm.", [])),
    (
        'I write.<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "write", "parameters": {"text": "a"}}\n]'
        "<|END_ACTION|>",
        ("I write.", "", [{"text": "a"}]),
    ),
    ("<think>Hm.</think>One.<think>Then.</think>Two.", ("One.Two.", "Hm.\n\nThen.", [])),
    ("<tool_call>\nnonsense", ("<tool_call>\nnonsense", "", [])),
    ("print(1) and write(text='a') are calls", ("print(1) and write(text='a') are calls", "", [])),
    (f"{qwen_coder({'times': '2', 'loud': 'true', 'tags': 'null', 'text': '1'})} Done.", ("Done.", "", [
        {"times": 2, "loud": True, "tags": None, "text": "1"}])),
])  # fmt: skip
def test_answers_of_released_models(written, expected):
    assert parse(written) == expected


def test_a_call_with_unreadable_arguments_keeps_its_name_and_its_text():
    found = parse_answer("Hm.<function=write>{text</function>", opened="", tools=[WRITE], is_cut=False)
    assert (found.text, found.tool_calls[0].name, found.tool_calls[0].raw_text) == (
        "Hm.", "write", "<function=write>{text</function>",
    )  # fmt: skip
    assert found.tool_calls[0].error


@pytest.mark.parametrize("form", sorted(CALLS))
def test_a_cut_answer_never_has_a_call_that_the_whole_one_has_not(form):
    whole = f"Hm.{CALLS[form]({'text': 'a b', 'times': 2})}\n{CALLS[form]({'text': 'c'})}"
    if form in ALONE:
        whole = whole.removeprefix("Hm.")
    calls = parse(whole)[2]
    assert len(calls) == 2
    for end in range(len(whole)):
        cut = parse(whole[:end], is_cut=True)[2]
        assert cut == calls[: len(cut)], whole[:end]


def test_reasoning_that_never_ends_is_no_answer():
    call = CALLS["hermes"]({"text": "a"})
    for is_cut in (True, False):
        assert parse(f"Hm. {call}", "<think>", is_cut=is_cut) == ("", f"Hm. {call}", [])
        assert parse(f"<think>\nHm. {call}", is_cut=is_cut) == ("", f"Hm. {call}", [])


PIECES = st.lists(
    st.sampled_from([*MARKUP, "<|im_end|>", "<|channel|>analysis<|message|>"]) | st.text(max_size=4), max_size=9
)


@given(PIECES.map("".join), st.sampled_from(["", "<think>", "[THINK]"]), st.booleans())
def test_any_text_is_parsed(written, opened, is_cut):
    for tools in ((), [WRITE], [{"name": "write", "parameters": None}]):
        text, reasoning, calls = parse(written, opened, tools, is_cut)
        assert "<|im_end|>" not in text + reasoning
        assert tools or not calls
        json.dumps(calls, default=str)
