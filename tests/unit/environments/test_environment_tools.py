"""Tool environments: calls are read, run, answered and counted."""

import asyncio
import json
import sys
import time

import pytest
from tests.unit.environments.turns import step

from telescope.environments.base import RewardResult, RolloutState, Sample
from telescope.environments.records import conversation
from telescope.environments.tool_env import ToolCall, ToolEnvironment, ToolResult
from telescope.errors import InfrastructureError, UserError


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def slow_add(a: int, b: int) -> int:
    await asyncio.sleep(0.05)
    return a + b


def fail(message: str = "no luck"):
    raise ValueError(message)


def leave():
    sys.exit(3)


def spin():
    while True:
        time.sleep(0.01)


async def doze():
    await asyncio.sleep(3600)


def lose_the_sandbox():
    raise InfrastructureError("the sandbox is gone")


def remember(text: str, state: RolloutState) -> str:
    state.custom.setdefault("texts", []).append(text)
    return ",".join(state.custom["texts"])


async def remember_later(text: str, state: RolloutState) -> str:
    await asyncio.sleep(0)
    return remember(text, state)


def big() -> int:
    return 10**10_000


TOOLS = [add, slow_add, fail, leave, spin, doze, lose_the_sandbox, remember, remember_later, big]


class Tools(ToolEnvironment):
    tool_role = "tool"
    tool_timeout_seconds = 60.0

    def __init__(self, tools=None, **kwargs):
        super().__init__(tools=TOOLS if tools is None else tools, **kwargs)

    def load_dataset(self, num_samples=-1):
        return [Sample("What is 1 + 2?", "3")]

    def compute_reward(self, state, eos_token=""):
        return RewardResult(0.0, sample_metrics=self.get_tool_metrics(state))


def xml(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def after(environment, completion, state=None):
    state = state or environment.create_initial_state(environment.get_sample(0))
    prompt = environment.get_initial_prompt(state.sample)
    state.trajectory.append(step(completion, prompt))
    return state


def reply(environment, completion, state=None):
    state = after(environment, completion, state)
    messages = environment.env_response(conversation(state), state)
    if asyncio.iscoroutine(messages):
        messages = asyncio.run(messages)
    assert all(message["role"] == "tool" for message in messages)
    return [message["content"] for message in messages]


def test_the_system_message_shows_the_tools_and_the_form_of_a_call():
    messages = Tools([add], system_prompt="You compute.").get_initial_prompt(Sample("Go."))
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"].startswith("You compute.\n\n")
    assert '"name": "add"' in messages[0]["content"] and "<tool_call>" in messages[0]["content"]
    assert Tools([add], include_tool_schemas_in_prompt=False).get_initial_prompt(Sample("Go.")) == messages[1:]


def test_several_calls_of_one_answer_are_answered_in_order():
    completion = f"Let me see. {xml('add', {'a': 1, 'b': 2})}{xml('slow_add', [3, 4])} and {xml('add', {'a': 5})}"
    assert reply(Tools(), completion) == ["3", "7", "6"]


def test_async_calls_of_one_answer_wait_together():
    waiting, all_here = [], asyncio.Event()

    async def meet(others: int) -> str:
        waiting.append(others)
        if len(waiting) == others:
            all_here.set()
        await all_here.wait()
        return "met"

    environment = Tools([meet])
    assert reply(environment, xml("meet", [3]) * 3) == ["met"] * 3


@pytest.mark.parametrize(("completion", "expected"), [
    ('<function=add>{"a": 1, "b": 2}</function>', ["3"]),
    ('<function=add>[1, 2]</function> <function=add>\n{"a": 4}\n</function>', ["3", "5"]),
    ("<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>5</parameter>\n</function>", ["6"]),
    ("<function=remember><parameter=text>two\nlines</parameter></function>", ["two\nlines"]),
    ('<function=add>{"a": 1', ["Error: The arguments of add are not valid JSON: "]),
    ("<function=add>1</function>", ['Error: "arguments" must be a JSON object, not a number.']),
    ("<function=>{}</function>", ["Error: A tool call must name its function"]),
    ("<function add>{}</function>", ["Error: A tool call must have the form NAME(parameter=value"]),
])  # fmt: skip
def test_the_function_form(completion, expected):
    got = reply(Tools(tool_call_format="function"), completion)
    assert [text[: len(start)] for text, start in zip(got, expected, strict=True)] == expected


@pytest.mark.parametrize(("completion", "words"), [
    ("<tool_call>[1, 2]</tool_call>", "must be a JSON object, not a list"),
    ("<tool_call>7</tool_call>", "not a number"),
    ("<tool_call>null</tool_call>", "not null"),
    ("<tool_call></tool_call>", "not valid JSON"),
    ("<tool_call>{'name': 'add'}</tool_call>", "not valid JSON"),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}', "closing </tool_call> is missing"),
    ('<tool_call>{"arguments": {}}</tool_call>', 'must have a "name"'),
    ('<tool_call>{"name": 3}</tool_call>', 'must have a "name"'),
    (xml("add", 3), '"arguments" must be a JSON object, not a number'),
    (xml("add", {"a": "one"}), "a: Input should be a valid integer"),
    (xml("add", {}), "a is missing"),
    (xml("subtract", {}), "there is no tool 'subtract'. The tools are: add, slow_add"),
    (xml("fail", {}), "ValueError: no luck"),
    (xml("leave", {}), "leave tried to end the process"),
    (xml("spin", {}), "spin did not end within 0.2 seconds"),
    (xml("doze", {}), "doze did not end within 0.2 seconds"),
    ("tool_call> add 1 2", "must have the form"),
    ('<tool_call>{"name": "fail", "args": {"message": "x"}}</tool_call>', "A tool call has no 'args'"),
    ('<tool_call>{"name": "fail", "message": "x"}</tool_call>', "A tool call has no 'message'"),
    ('<tool_call>{"name": "add", "arguments": ' + '{"a":' * 100_000, "longer than 100000"),
    ('<tool_call>{"name": "add", "arguments": ' + "[" * 50_000 + "</tool_call>", "nested too deeply"),
    ('<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "Exceeds the limit"),
])  # fmt: skip
def test_failures_are_reported_to_the_model(completion, words):
    environment = Tools()
    if "did not end" in words:
        environment.tool_timeout_seconds = 0.2
    (text,) = reply(environment, completion)
    assert text.startswith("Error: ") and words in text
    assert environment.is_done(after(environment, completion)) == (False, None)


def test_an_answer_without_a_call_is_final_and_calls_in_thoughts_do_not_count():
    environment = Tools()
    for final in ("The answer is 3.", "", f"<think>{xml('add', [1, 2])}</think>It is 3.", "<answer>3</answer>"):
        assert environment.is_done(after(environment, final)) == (True, "final_answer")
    for answer in ("The tool call gave 3.", "a<b, called x", 'the "arguments" of both sides', "if x <call it y"):
        assert environment.is_done(after(environment, answer)) == (True, "final_answer")
    function = Tools(tool_call_format="function")
    for answer in ("It is <answer>3</answer>, so fraction=3.", "a function=3 of x", "x <params"):
        assert function.is_done(after(function, answer))[0] is ("<params" not in answer)
    called = f"<think>I call add.</think>{xml('add', [1, 2])}"
    assert environment.is_done(after(environment, called)) == (False, None)


@pytest.mark.parametrize("form", ["xml", "function"])
@pytest.mark.parametrize(
    "code",
    ["std::vector<bool> v;", "Promise<Boolean>", "if (n < local_count)", "while (i < pool.size())", "n < max_calls",
     "static_cast<bool>(x)", "#include <functional>", "while lo < func(x)", '/// <param name="x">a number</param>'],
)  # fmt: skip
def test_types_and_comparisons_in_code_are_no_attempts_of_a_call(form, code):
    environment = Tools(tool_call_format=form)
    assert environment.is_done(after(environment, code)) == (True, "final_answer")


def test_a_lost_sandbox_is_an_infrastructure_failure_after_which_no_call_of_the_answer_goes_on():
    ended = []

    async def lose_it_later():
        await asyncio.sleep(0.01)
        raise InfrastructureError("the sandbox is gone")

    async def go_on():
        try:
            await asyncio.sleep(0.05)
        finally:
            ended.append(asyncio.current_task().cancelling())

    for calls in (xml("lose_it_later", {}) + xml("go_on", {}), xml("lose_the_sandbox", {})):
        with pytest.raises(InfrastructureError):
            reply(Tools(tools=[lose_it_later, go_on, lose_the_sandbox]), calls)
    assert ended == [1]


def test_the_formatter_words_errors_and_may_fail():
    formatted = Tools(error_formatter=lambda error: f"Oops, {error}!")
    assert reply(formatted, xml("fail", ["x"])) == ["Error: Oops, x!"]
    broken = Tools(error_formatter=lambda error: 1 / 0)
    assert reply(broken, xml("fail", ["x"])) == ["Error: ValueError: x"]


def test_state_of_tools_belongs_to_the_rollout():
    environment = Tools()
    states = [environment.create_initial_state(environment.get_sample(0)) for _ in range(2)]
    for word in ("a", "b"):
        for number, state in enumerate(states):
            name = "remember" if word == "a" else "remember_later"
            (text,) = reply(environment, xml(name, {"text": f"{word}{number}"}), state)
    assert [state.custom["texts"] for state in states] == [["a0", "b0"], ["a1", "b1"]]
    assert text == "a1,b1"


def test_every_call_is_recorded_with_what_the_model_was_told():
    environment = Tools([add, slow_add, fail])
    state = environment.create_initial_state(environment.get_sample(0))
    results = reply(environment, xml("add", [1, 2]) + xml("slow_add", {"a": 3, "b": 4}) + xml("fail", []), state)
    records = state.tool_records
    assert json.loads(json.dumps(records)) == records
    assert [(r["name"], r["arguments"], r["result"], r["error"]) for r in records] == [
        ("add", "[1, 2]", results[0], None),
        ("slow_add", '{"a": 3, "b": 4}', results[1], None),
        ("fail", "[]", results[2], "ValueError: no luck"),
    ]
    assert all(record["seconds"] >= 0 for record in records)
    reply(environment, "<tool_call>{broken", state)
    assert "broken" in records[3]["arguments"] and records[3]["error"]


def test_metrics_have_their_names_and_count_what_happened():
    environment = Tools([add, fail, leave])
    state = environment.create_initial_state(environment.get_sample(0))
    assert environment.get_tool_metrics(state)["tool_success_rate"] == 0.0
    reply(environment, xml("add", [1, 2]) + xml("add", [1, 2]) + xml("fail", []), state)
    reply(environment, xml("nobody", []), state)
    metrics = environment.compute_reward(state).sample_metrics
    assert metrics == {
        "total_tool_calls": 4, "tool_success_count": 2, "tool_error_count": 2, "tool_success_rate": 0.5,
        "unique_tools_used": 3, "add_calls": 2, "fail_calls": 1, "leave_calls": 0, "nobody_calls": 1,
    }  # fmt: skip
    assert {type(value) for name, value in metrics.items() if name != "tool_success_rate"} == {int}


def test_any_result_is_written_and_long_ones_are_cut():
    assert reply(Tools(), xml("big", {})) == ["a result of type int that cannot be written as text"]
    environment = Tools([remember])
    environment.max_result_characters = 10
    assert reply(environment, xml("remember", {"text": "x" * 50})) == ["xxxxxxxxxx... (50 characters in all)"]


@pytest.mark.parametrize(("form", "call"), [("xml", xml("add", [1])), ("function", "add(a=1) ")])
def test_the_number_of_calls_is_bounded(form, call):
    got = reply(Tools(tool_call_format=form), call * 1000)
    assert got[0] == "2" and len(got) == 65 and "936 more calls were not read" in got[-1]


class Overridden(Tools):
    async def execute_tool(self, call: ToolCall) -> ToolResult:
        result = await super().execute_tool(call)
        result.result = f"[{result.result}]"
        return result


class Raising(Tools):
    def execute_tool(self, call):
        raise KeyError(call.name)


def test_an_override_may_be_async_and_its_error_is_a_message():
    assert reply(Overridden(), xml("add", [1]) + xml("slow_add", [1, 2])) == ["[2]", "[3]"]
    assert reply(Raising(), xml("add", [1])) == ["Error: KeyError: 'add'"]


def test_arguments_of_the_class_are_checked():
    with pytest.raises(UserError, match="tool_call_format is 'json'; use xml or function"):
        Tools(tool_call_format="json")
    with pytest.raises(UserError, match="two tools named 'add'"):
        Tools([add, add])
    with pytest.raises(UserError, match="no tool 'shell': give a function, or put SandboxTools before ToolEnvironment"):
        Tools(["shell"])
