"""What tool environments that were written for the published interface expect."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.environments.turns import play

from telescope.environments import RewardResult, Sample, ToolEnvironment
from telescope.environments.local_rollout import Answer, roll_out_item
from telescope.environments.tool_env import ToolCall, parse_function_call_syntax, parse_xml_tool_calls
from telescope.environments.tool_schema import Tool

SAMPLE = Sample("What is 1 + 2?", "3")


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def fail():
    raise ValueError("no luck")


def both(a: int, b: int = 1):
    return {"a": [a], "b": None}


class Sums(ToolEnvironment):
    def __init__(self, **kwargs):
        super().__init__(tools=[add, fail], **kwargs)

    def load_dataset(self, num_samples=-1):
        return [SAMPLE]

    def compute_reward(self, state, eos_token=""):
        return RewardResult(0.0)


def respond(environment, answer):
    state, _ = play(environment, SAMPLE, answer, "The end.")
    return state.trajectory[1].prompt[-1] if state.num_turns == 2 else None, state


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
FAILURE = '<tool_call>{"name": "fail", "arguments": {}}</tool_call>'


def test_results_go_back_as_one_user_message():
    for answer, text in (
        (CALL, "[add] 3"),
        (FAILURE, "[fail] Error: ValueError: no luck"),
        (CALL + FAILURE, "Tool 1: [add] 3\nTool 2: [fail] Error: ValueError: no luck"),
        (CALL.replace("add", "sub"), "[sub] Error: there is no tool 'sub'. The tools are: add, fail."),
    ):
        assert respond(Sums(), answer)[0] == {"role": "user", "content": text, "turn_type": "tool_result"}


def test_a_class_attribute_chooses_the_tool_role():
    class InToolRole(Sums):
        tool_role = "tool"

    state, _ = play(InToolRole(), SAMPLE, CALL + FAILURE, "The end.")
    assert state.trajectory[1].prompt[-2:] == [
        {"role": "tool", "content": "3", "name": "add", "turn_type": "tool_result"},
        {"role": "tool", "content": "Error: ValueError: no luck", "name": "fail", "turn_type": "tool_result"},
    ]


def test_a_call_in_the_last_turn_is_run_and_counted():
    state, _ = play(Sums(max_turns=1), SAMPLE, CALL)
    assert (state.stop_reason, state.custom["tool_success_count"]) == ("max_turns_reached", 1)


def test_overridden_methods_of_the_conversation_are_called():
    class Worded(Sums):
        def format_tool_result(self, result):
            return f"<{result.result}>"

        def format_multiple_tool_results(self, results):
            return " and ".join(map(self.format_tool_result, results))

        def _build_tools_prompt_section(self):
            return "Call add."

    assert respond(Worded(), CALL)[0]["content"] == "<3>"
    assert respond(Worded(), CALL + CALL)[0]["content"] == "<3> and <3>"
    messages = Worded(system_prompt="S").get_initial_prompt(SAMPLE)
    assert messages[0] == {"role": "system", "content": "S\n\nCall add."}


def test_an_override_of_env_response_may_await_the_original_or_not():
    class Waiting(Sums):
        async def env_response(self, messages, state):
            return [*await super().env_response(messages, state), {"role": "user", "content": "Go on."}]

    class Plain(Sums):
        def env_response(self, messages, state):
            return [*super().env_response(messages, state), {"role": "user", "content": "Go on."}]

    for cls in (Waiting, Plain):
        played = roll_out_item(cls(max_turns=2), 0, lambda messages: Answer(CALL))
        assert [m["content"] for m in played.messages[3:5]] == ["[add] 3", "Go on."]


def test_tools_are_a_list_with_a_map_and_schemas():
    environment = Sums()
    assert environment.tools == [add, fail]
    assert environment.tool_map == {"add": add, "fail": fail}
    assert [schema["function"]["name"] for schema in environment.tool_schemas] == ["add", "fail"]


def test_the_state_counts_calls_and_keeps_results():
    environment = Sums()
    assert environment.create_initial_state(SAMPLE).custom == {
        "tool_calls": [], "tool_results": [], "tool_success_count": 0, "tool_error_count": 0, "tools_by_name": {},
    }  # fmt: skip
    _, state = respond(environment, CALL + FAILURE + CALL)
    assert state.custom["tool_calls"][0] == {"name": "add", "arguments": {"a": 1, "b": 2}, "raw": CALL}
    assert state.custom["tool_results"][:2] == [
        {"name": "add", "result": "3", "success": True, "error": None},
        {"name": "fail", "result": "ValueError: no luck", "success": False, "error": "ValueError"},
    ]
    assert (state.custom["tool_success_count"], state.custom["tool_error_count"]) == (2, 1)
    assert state.custom["tools_by_name"] == {"add": 2, "fail": 1}


@pytest.mark.parametrize(("answer", "success", "result", "error"), [
    (CALL, True, "3", None),
    (CALL.replace("add", "both"), True, "{'a': [1], 'b': None}", None),
    (FAILURE, False, "ValueError: no luck", "ValueError"),
    (CALL.replace("add", "sub"), False, "there is no tool 'sub'.", "unknown_tool"),
    (CALL.replace('"a"', '"c"'), False, "add: a is missing", "argument_error"),
    ("<tool_call>add", False, "The tool call is not valid JSON", "unreadable_call"),
])  # fmt: skip
def test_the_result_of_a_tool_is_text_and_its_error_a_kind(answer, success, result, error):
    seen = []

    class Slicing(Sums):
        def format_tool_result(self, result):
            seen.append((result.success, result.result, result.error))
            return result.result[:100] if "no" in result.result or result.success else result.result.upper()

    environment = Slicing()
    environment._tools["both"] = Tool(both)
    respond(environment, answer)
    assert seen[0] == (success, seen[0][1], error) and seen[0][1].startswith(result)


def test_the_object_that_a_tool_returned_is_kept_beside_the_text():
    result = Sums().execute_tool(ToolCall("add", {"a": 1}))
    assert (result.result, result.value) == ("2", 2)


@pytest.mark.parametrize(("answer", "text"), [
    ("add(a=1, b=2)", "[add] 3"),
    ("I need add(1, 2) here.", "[add] 3"),
    ("add(a=1) and add(a=-2, b=5)", "Tool 1: [add] 2\nTool 2: [add] 3"),
    ('<function=add>{"a": 4}</function>', "[add] 5"),
    ("add(a=x)", "[add] Error: The call of add cannot be read (ValueError): write it as add(parameter=value) with"),
    ("add(1, b=2)", "[add] Error: The call of add cannot be read: write it as add(parameter=value) with"),
    ("add(a=1", "[add] Error: The call of add has no closing parenthesis."),
    ("add(a=__import__('os').getpid())", "[add] Error: The call of add cannot be read (ValueError)"),
    ("add(c=1)", "[add] Error: add: a is missing; c is not a parameter. It takes: a, b."),
])  # fmt: skip
def test_the_function_format_reads_python_calls_with_literals(answer, text):
    assert respond(Sums(tool_call_format="function"), answer)[0]["content"].startswith(text)


@pytest.mark.parametrize("answer", ["f(x=1) is 2.", "obj.add(a=1)", "<think>add(a=1)</think>3", "to add (1 and 2)", ""])
def test_an_answer_without_a_call_gets_no_response_and_ends_the_rollout(answer):
    state, responses = play(Sums(tool_call_format="function"), SAMPLE, answer, "more")
    assert (state.num_turns, state.stop_reason, responses) == (1, "final_answer", [])


def test_the_parsers_of_both_forms_can_be_called_by_themselves():
    (call,) = parse_xml_tool_calls(f"<tool_call>broken</tool_call> {CALL}")
    assert (call.name, call.arguments) == ("add", {"a": 1, "b": 2})
    text = 'search(query="a (b) \\" c", tags=["x", \'y)\'], limit=None) or run(code="""print("hi")\nprint(2)""")'
    search, run = parse_function_call_syntax(text)
    assert (search.name, search.arguments) == ("search", {"query": 'a (b) " c', "tags": ["x", "y)"], "limit": None})
    assert (run.name, run.arguments) == ("run", {"code": 'print("hi")\nprint(2)'})
    assert [call.name for call in parse_function_call_syntax("f(1) g(x) h(a=1)")] == ["f", "h"]
    assert [call.name for call in parse_function_call_syntax("f(1) g(2) h(a=1)", ["g"])] == ["g"]


@given(st.text(alphabet="fad(=)[]{}\"'\\,:1 \n#", max_size=300))
def test_no_text_makes_the_function_format_raise(text):
    for names in (None, ["f", "add"]):
        parse_function_call_syntax(text, names)
    assert all(call.error or call.name for call in Sums(tool_call_format="function").parse_tool_calls(text))


@pytest.mark.parametrize("unit", ["add(", 'add("', "add([{", "add('\"", 'add("""'])
def test_unclosed_calls_are_given_up_soon(unit):
    calls = Sums(tool_call_format="function").parse_tool_calls(unit * 20_000)
    assert len(calls) < 10
