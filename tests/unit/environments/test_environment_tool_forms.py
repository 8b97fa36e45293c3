"""Calls are read in the forms of released models, whatever form the environment asks for."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.environments.turns import play

from telescope.environments import RewardResult, Sample, ToolEnvironment
from telescope.environments.parsers import answer_text
from telescope.environments.tool_calls import ToolCall, parse_calls


def write(text: str, times: int = 1, loud: bool = False, tags: list[str] | None = None, any: Any = None) -> str:
    """Write a text."""
    return text


class Writing(ToolEnvironment):
    def load_dataset(self, num_samples=-1):
        return [Sample("Write.")]

    def compute_reward(self, state, eos_token=""):
        return RewardResult(0.0)


ENVIRONMENTS = {form: Writing(tools=[write], tool_call_format=form) for form in ("xml", "function")}
both_forms = pytest.mark.parametrize("configured", ["xml", "function"])


def read(completion: str, configured: str = "xml") -> list[ToolCall]:
    return ENVIRONMENTS[configured].parse_tool_calls(completion)


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def python(arguments: dict[str, Any]) -> str:
    return f"[write({', '.join(f'{name}={value!r}' for name, value in arguments.items())})]"


def gemma(value: Any) -> str:
    """A value as Gemma 4 writes it; its texts must not contain the mark around them."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{gemma(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


BEGIN, SEPARATOR, END = (f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581begin", "sep", "call\u2581end"))
ANALYSIS = "<|channel|>analysis<|message|>I call write(1).<|end|><|start|>assistant<|channel|>commentary "
FORMS = {
    "hermes": lambda a: f"<tool_call>\n{json.dumps({'name': 'write', 'arguments': a})}\n</tool_call>",
    "hermes without ASCII": lambda a: f"<tool_call>{dump({'name': 'write', 'arguments': a})}</tool_call>",
    "function": lambda a: f"<function=write>{dump(a)}</function>",
    "llama": lambda a: dump({"name": "write", "parameters": a}),
    "llama, name last": lambda a: dump({"parameters": a, "name": "write"}),
    "llama, as a function": lambda a: dump({"type": "function", "function": "write", "parameters": a}),
    "hermes, as a list": lambda a: f"<tool_call>[{dump({'name': 'write', 'arguments': a})}]</tool_call>",
    "llama after a tag": lambda a: f"<|python_tag|>{dump({'name': 'write', 'parameters': a})}",
    "mistral": lambda a: f"[TOOL_CALLS] [{dump({'name': 'write', 'arguments': a})}]",
    "mistral with names": lambda a: f"[TOOL_CALLS]write[ARGS]{dump(a)}",
    "mistral without a mark": lambda a: f"[TOOL_CALLS]write{dump(a)}",
    "cohere": lambda a: f"<|START_ACTION|>[{dump({'tool_call_id': '0', 'tool_name': 'write', 'parameters': a})}]",
    "harmony": lambda a: f"{ANALYSIS}to=functions.write <|constrain|>json<|message|>{dump(a)}",
    "harmony, name first": lambda a: f" to=functions.write<|channel|>commentary json<|message|>{dump(a)}",
    "deepseek": lambda a: f"{BEGIN}function{SEPARATOR}write\n```json\n{dump(a)}\n```{END}",
    "deepseek 3.1": lambda a: f"{BEGIN}write{SEPARATOR}{dump(a)}{END}",
    "kimi": lambda a: f"<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{dump(a)}<|tool_call_end|>",
    "gemma 4": lambda a: f"<|tool_call>call:write{gemma(a)}<tool_call|>",
    "python": python,
    "lfm": lambda a: f"<|tool_call_start|>{python(a)}<|tool_call_end|> I wait.",
    "llama 4": lambda a: f"<|python_start|>{python(a)}<|python_end|>",
    "olmo 3": lambda a: f"<function_calls>{python(a)[1:-1]}</function_calls>",
    "gemma 3": lambda a: f"```tool_code\nprint({python(a)[1:-1]})\n```",
}


def qwen_coder(parameters):
    written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters.items())
    return f"<tool_call>\n<function=write>\n{written}</function>\n</tool_call>"


def invoke(parameters, mark="", wrapper="minimax:tool_call"):
    written = ""
    for name, value in parameters.items():
        is_text = f' string="{str(name == "text").lower()}"' if mark else ""
        written += f'<{mark}parameter name="{name}"{is_text}>{value}</{mark}parameter>\n'
    return f'<{mark}{wrapper}>\n<{mark}invoke name="write">\n{written}</{mark}invoke>\n</{mark}{wrapper}>'


def dsml(parameters):
    return invoke(parameters, "\uff5cDSML\uff5c", "function_calls")


def atem(parameters):
    return invoke(parameters, "atem:", "function_calls").replace(' string="true"', "").replace(' string="false"', "")


def glm(parameters):
    pairs = parameters.items()
    written = "".join(f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n" for name, value in pairs)
    return f"<tool_call>write\n{written}</tool_call>"


ELEMENTS = [qwen_coder, glm, invoke, dsml, atem]
MARKUP = [
    "</think>", "<think>", "</tool_call>", "<tool_call>", "</function>", "<function=write>", "[TOOL_CALLS]", "\n", '"',
    "</parameter>", "</arg_value>", "</invoke>", '<invoke name="write">',
    '{"name": "write", "arguments": {}}', "\\", "'", "}", "[", "```", "a", " ", "\u2028", "write(",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(MARKUP) | st.text(max_size=5), max_size=6).map("".join)
CONFIGURED = st.sampled_from(["xml", "function"])


@given(st.sampled_from(list(FORMS)), TEXTS, CONFIGURED)
def test_any_text_survives_in_every_form_of_json_and_python(form, text, configured):
    (call,) = read(FORMS[form]({"text": text, "times": 2}), configured)
    assert (call.name, call.arguments, call.error) == ("write", {"text": text, "times": 2}, None)


@given(st.sampled_from(ELEMENTS), TEXTS, CONFIGURED)
def test_any_text_survives_in_an_element(form, text, configured):
    (call,) = read(form({"text": text, "times": "2"}), configured)
    assert (call.arguments, call.error) == ({"text": text, "times": 2}, None)


@pytest.mark.parametrize(("form", "text"), [
    (qwen_coder, 'print("</parameter></function></tool_call>")'),
    (qwen_coder, "a\n</parameter>\n</function>\n<tool_call> b"),
    (glm, "a </arg_value> <tool_call> b"),
    (glm, "a</arg_value></tool_call> b"),
])  # fmt: skip
def test_a_value_may_contain_the_end_of_its_element(form, text):
    calls = read(form({"text": text, "times": "2"}) + "\n" + form({"times": "3", "text": text}))
    assert [(call.arguments, call.error) for call in calls] == [
        ({"text": text, "times": 2}, None), ({"times": 3, "text": text}, None)
    ]  # fmt: skip


@pytest.mark.parametrize("form", ELEMENTS)
@pytest.mark.parametrize(("name", "written", "value"), [
    ("text", "3.10", "3.10"), ("text", "007", "007"), ("text", "true", "true"), ("text", "null", "null"),
    ("text", '{"a": 1}', '{"a": 1}'), ("text", '"quoted"', '"quoted"'), ("text", "", ""), ("any", "x y", "x y"),
    ("times", "3", 3), ("times", "three", "three"), ("loud", "true", True), ("loud", "True", "True"),
    ("tags", '["a"]', ["a"]), ("tags", "['a', 'b']", ["a", "b"]), ("tags", "['a'", "['a'"),
    ("tags", "null", None), ("tags", "None", None), ("any", "3", 3), ("unknown", "3", 3),
])  # fmt: skip
def test_the_schema_decides_whether_an_element_is_text(form, name, written, value):
    (call,) = read(form({name: written}))
    assert call.arguments == {name: value} and type(call.arguments[name]) is type(value)


def test_a_schema_of_an_mcp_server_decides_in_any_form_of_json_schema():
    of_server = {"types": {"type": ["string", "null"]}, "one": {"oneOf": [{"type": ["string"]}]}, "all": True}
    answer = qwen_coder(dict.fromkeys(of_server, "3") | {"types": "null"})
    (call,) = parse_calls(answer, "xml", {"write": of_server})
    assert call.arguments == {"types": None, "one": "3", "all": 3}


def test_the_tool_receives_the_text_of_an_element():
    answer = qwen_coder({"text": "3.10", "loud": "True"})
    assert play(ENVIRONMENTS["xml"], Sample("Write."), answer, "End.")[1] == [["[write] 3.10"]]


@pytest.mark.parametrize("form", [*FORMS.values(), *ELEMENTS])
@both_forms
def test_calls_in_reasoning_do_not_count_and_later_ones_do(form, configured):
    call, other = form({"text": "a"}), form({"text": "b"})
    assert read(f"<think>{call}", configured) == []
    assert read(f"<think>{call}</think>It is done.", configured) == []
    if "<|end|>" not in call:  # which would end the reasoning
        assert read(answer_text(call, "<think>"), configured) == []
    for reasoning, opened in (
        (f"<think>{call}</think>\n\n", ""), (f"<think>{call}</think>\n\n", "<think>"),
        (f"Hm. {call} hm </think>\n\n", "<think>"), ("I use <tool_call> tags.</think>", "<think>"),
    ):  # fmt: skip
        for behind in ("", "</think>"):
            (found,) = read(answer_text(reasoning + other + behind, opened), configured)
            assert (found.arguments, found.error) == ({"text": "b"}, None)


@pytest.mark.parametrize("form", [*FORMS.values(), *ELEMENTS])
@pytest.mark.parametrize("behind", [" </think>", " Then </think> done", "\n</think>\n</think>", "[/THINK]"])
@both_forms
def test_calls_before_a_closing_tag_that_closes_nothing_count(form, behind, configured):
    if form is python and "Then" in behind and configured == "xml":
        return  # in prose it is no call
    (found,) = read(answer_text(form({"text": "b"}) + behind), configured)
    assert (found.arguments, found.error) == ({"text": "b"}, None)


def test_openai_nests_a_call_and_writes_its_arguments_as_text():
    (call,) = read('{"type": "function", "function": {"name": "write", "arguments": "{\\"text\\": \\"a\\"}"}}')
    assert (call.name, call.arguments, call.error) == ("write", '{"text": "a"}', None)


A, B = {"text": "a"}, {"text": "b"}


@pytest.mark.parametrize("completion", [
    FORMS["hermes"](A) + "\n" + FORMS["hermes"](B), qwen_coder(A) + qwen_coder(B), glm(A) + "\n" + glm(B),
    FORMS["llama"](A) + "; " + FORMS["llama"](B), f"[{FORMS['llama'](A)}, {FORMS['llama'](B)}]",
    f"<tool_call>{dump([{'name': 'write', 'arguments': a} for a in (A, B)])}</tool_call>",
    f"<tool_call>{FORMS['llama'](A)}\n{FORMS['llama'](B)}</tool_call>",
    f"<tool_call>{FORMS['llama'](A)}, {FORMS['llama'](B)}",
    "[write(text='a'), write(text='b')]",
    "First." + FORMS["harmony"](A) + "<|call|><|start|>assistant" + FORMS["harmony"](B),
])  # fmt: skip
@both_forms
def test_several_calls_are_read_in_order(completion, configured):
    assert [(call.arguments, call.error) for call in read(completion, configured)] == [(A, None), (B, None)]


@pytest.mark.parametrize("completion", [
    "<function=write>{text: a}</function>", '{"name": "write", "parameters": {"text": "a"',
    "<|python_tag|>write me", "<invoke name='write'>a</invoke>", "<tool_call>write a</tool_call>",
    "[TOOL_CALLS] none", "</tool_call>", '{"name": "write", "args": {}}', "<function=write><parameter=text>a",
    "<tool_calls>[]</tool_calls>", "<tool_call>[]</tool_call>",
    '<tool_call>{"name": "write", "arguments": {"text": "a"}} {"name": </tool_call>',
    'to=functions.write<|message|>{"text"', "<tool_call>", '```json\n{"name": "write", "parameters": {"x": }}\n```',
    "[write(text=a)]",
])  # fmt: skip
@both_forms
def test_broken_or_foreign_markup_is_an_error_for_the_model(configured, completion):
    (call,) = read(completion, configured)
    assert call.error
    state, responses = play(ENVIRONMENTS[configured], Sample("Write."), completion, "The end.")
    assert "Error: " in responses[0][0] and state.num_turns == 2


@pytest.mark.parametrize("answer", [
    "I need no further tool_call.", "No tool call: it is 3.", "The tool_call gave 5; tool_call, done.", "",
    "(tool call)", '{"answer": 5}', '{"name": "Ada", "age": 36}', "f(x) = 3 and sin(0)", "a <b> c", "1 < 2 > 0",
    "{}", "The name: write. The arguments: none.", "<answer>[1, 2]</answer>", "#include <vector>", "[3]",
    "Tool calls: none",
])  # fmt: skip
@both_forms
def test_prose_and_other_json_are_final_answers(configured, answer):
    assert read(answer, configured) == []


def test_a_python_call_in_prose_counts_only_where_the_environment_asks_for_it():
    assert read("I could use write(text='a') here.") == []
    for completion, configured in (("I use write(text='a') here.", "function"), ("\nwrite(text='a')\n", "xml")):
        (call,) = read(completion, configured)
        assert call.arguments == A


@pytest.mark.parametrize("unit", [
    "<tool_call>", '<tool_call>{"', '{"name":', '{"name":[', '{"name": "', "<function=a>", "write(",
    "<|python_tag|>", "<function=write><parameter=a>", "<think>", "</think>", "to=functions.a",
    "<tool_call>a<arg_key>", "<function=write><parameter=a>1</parameter>",
    "<tool_call>a<arg_key>a</arg_key><arg_value></arg_value>", "</parameter></function>",
    '<tool_call>{"name": "write"} {"name": "write"}', '{"parameters": {',
])  # fmt: skip
@both_forms
def test_reading_ends_for_repeated_markup(unit, configured):
    assert len(read(unit * 20_000, configured)) <= 65


@pytest.mark.parametrize("piece", ["a", "a ", ",a", '<|"|>'])
def test_long_arguments_of_gemma_that_cannot_be_read_are_read_in_one_pass(piece):
    (call,) = read(f"<|tool_call>call:write{{{piece * (90_000 // len(piece))}}}<tool_call|>")
    assert "not valid JSON" in str(call.error)
