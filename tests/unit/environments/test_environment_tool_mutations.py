"""Damaged tool calls always get a response: never an exception, never a final answer."""

import json
import random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.environments.turns import step

from telescope.environments.base import RewardResult, Sample
from telescope.environments.records import conversation
from telescope.environments.tool_calls import parse_calls
from telescope.environments.tool_env import ToolEnvironment

NUM_MUTATIONS = 4_000
ALPHABET = "<>{}[]\"':,/\\_= \n0aé\u0663\ud800\x00"


def search(query: str, limit: int | list[int] = 3, order: Literal["new", "old"] = "new", *, deep: bool | None = None):
    """Find something."""
    return json.dumps({"query": query, "limit": limit, "order": order, "deep": deep})


class Searching(ToolEnvironment):
    tool_role = "tool"

    def load_dataset(self, num_samples=-1):
        return [Sample("Find it.")]

    def compute_reward(self, state, eos_token=""):
        return RewardResult(0.0)


CALLS = {
    "xml": ['<tool_call>{"name": "search", "arguments": {"query": "cats", "limit": 5, "order": "old"}}</tool_call>',
     '<tool_call>\n{"name": "search", "arguments": ["cats", [1, 2], "new"]}\n</tool_call>',
     '<|tool_call>call:search{query:<|"|>cats<|"|>,limit:5}<tool_call|>',
     '<invoke name="search">\n<parameter name="query">cats</parameter>\n</invoke>',
     'I will look. <tool_call>{"name": "search", "arguments": "{\\"query\\": \\"cats\\"}"}</tool_call> Wait.'],
    "function": ['<function=search>{"query": "cats", "limit": 5, "deep": true}</function>',
     "<function=search>\n<parameter=query>cats</parameter>\n<parameter=limit>5</parameter>\n</function>"],
}  # fmt: skip
JSON_VALUES = ["[]", "{}", "null", "true", "3", "-1e999", "NaN", '"x"', "[[[[]]]]", '{"a": {"a": 1}}', "9" * 5000, ""]


def mutated(text: str, rng: random.Random) -> str:
    """The text with one to three small damages."""
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(6)
        i = rng.randrange(len(text) + 1)
        j = min(len(text), i + rng.randint(1, 6))
        if kind == 0:
            text = text[:i] + text[j:]
        elif kind == 1:
            text = text[:i] + rng.choice(ALPHABET) + text[i:]
        elif kind == 2:
            text = text[:i] + rng.choice(ALPHABET) + text[i + 1 :]
        elif kind == 3:
            text = text[:i] + text[i:j] * 2 + text[j:]
        elif kind == 4:
            start, end = text.find("{"), text.rfind("}")
            if -1 < start < end:
                text = text[:start] + rng.choice(JSON_VALUES) + text[end + 1 :]
        else:
            text = text.replace(rng.choice(['"query"', '"cats"', "5", '"search"']), rng.choice(JSON_VALUES), 1)
    return text


def observe(environment: ToolEnvironment, completion: str) -> list[dict]:
    state = environment.create_initial_state(environment.get_sample(0))
    state.trajectory.append(step(completion, environment.get_initial_prompt(state.sample)))
    assert environment.is_done(state) == (False, None), f"took for a final answer: {completion!r}"
    messages = environment.env_response(conversation(state), state)
    assert isinstance(messages, list)
    return messages


@pytest.mark.parametrize("form", ["xml", "function"])
def test_damaged_calls_are_answered_and_never_final(form):
    environment = Searching(tools=[search], tool_call_format=form)
    rng = random.Random(f"mutations {form}")
    successes = 0
    for number in range(NUM_MUTATIONS):
        messages = observe(environment, mutated(CALLS[form][number % len(CALLS[form])], rng))
        assert messages
        for message in messages:
            assert message["role"] == "tool" and isinstance(message["content"], str) and message["content"]
            if message["content"].startswith("Error: "):
                assert len(message["content"]) < 17_000
            else:
                successes += 1
                assert set(json.loads(message["content"])) == {"query", "limit", "order", "deep"}
    assert 0 < successes < NUM_MUTATIONS


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.timeout(600)
@settings(max_examples=500, deadline=None)
@given(JSON)
def test_any_json_in_a_call_is_answered(value):
    environment = Searching(tools=[search])
    for body in (value, {"name": "search", "arguments": value}, {"name": value, "arguments": {}}):
        assert observe(environment, f"<tool_call>{json.dumps(body)}</tool_call>")


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=ALPHABET + "tolcafuninmer=<>/", max_size=200))
def test_reading_never_raises(text):
    for form in ("xml", "function"):
        calls = parse_calls(text, form)
        assert all(call.error or call.name for call in calls)
