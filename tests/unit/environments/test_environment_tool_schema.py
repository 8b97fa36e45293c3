"""Functions as tools: their schemas and the arguments of calls."""

import enum
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional, TypedDict, Union

import pytest
from pydantic import BaseModel

from telescope.environments.base import RolloutState, Sample
from telescope.environments.tool_env import func_to_tool_schema
from telescope.environments.tool_schema import ArgumentError, Tool
from telescope.errors import UserError


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


@dataclass
class Point:
    x: float
    y: float = 0.0


class Box(BaseModel):
    corner: Point
    title: str = "box"


class Options(TypedDict, total=False):
    deep: bool


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


def parameters_of(function) -> dict[str, Any]:
    return func_to_tool_schema(function)["function"]["parameters"]


def call(function, arguments):
    bound = Tool(function).bind(arguments)
    return function(*bound.args, **bound.kwargs)


def everything(
    number: int,
    text: str = "x",
    maybe: Optional[float] = None,  # noqa: UP045
    choice: Literal["up", "down", 3] = "up",
    either: Union[int, list[int]] = 0,  # noqa: UP007
    table: dict[str, int] | None = None,
    point: Point = Point(1.0),  # noqa: B008
    box: Box | None = None,
    unit: Unit = Unit.METRE,
    options: Options = {},  # noqa: B006
    *,
    loose=None,
):
    """Take one of each.

    Args:
        number: how many
            there are
        unit (Unit): what they are counted in
    """
    return locals()


def test_schema_has_the_openai_form_with_types_defaults_and_descriptions():
    schema = func_to_tool_schema(everything)
    function = schema["function"]
    assert [schema["type"], function["name"], function["description"]] == [
        "function",
        "everything",
        "Take one of each.",
    ]
    properties = function["parameters"]["properties"]
    assert function["parameters"]["required"] == ["number"]
    plain = {name: properties[name] for name in ("number", "text", "maybe", "loose")}
    assert plain == {
        "number": {"type": "integer", "description": "how many there are"},
        "text": {"type": "string", "default": "x"},
        "maybe": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None}, "loose": {"default": None},
    }  # fmt: skip
    assert properties["choice"]["enum"] == ["up", "down", 3]
    assert properties["either"]["anyOf"][1] == {"type": "array", "items": {"type": "integer"}}
    assert properties["table"]["anyOf"][0] == {"type": "object", "additionalProperties": {"type": "integer"}}
    assert properties["point"]["properties"]["x"] == {"type": "number"}
    assert properties["box"]["anyOf"][0]["properties"]["title"] == {"type": "string", "default": "box"}
    assert properties["unit"]["enum"] == ["m", "ft"]
    assert properties["unit"]["description"] == "what they are counted in"
    assert properties["options"]["properties"] == {"deep": {"type": "boolean"}}
    assert "$ref" not in str(schema) and "$defs" not in str(schema)


def test_a_recursive_type_has_a_finite_schema_and_endless_arguments_are_an_argument_error():
    def plant(tree: Tree): ...

    children = parameters_of(plant)["properties"]["tree"]["properties"]["children"]
    assert children["items"]["type"] == "object"
    assert Tool(plant).bind({"tree": {"value": 1, "children": [{"value": 2}]}}).args[0].children[0].value == 2
    value: dict[str, Any] = {"value": 1}
    for _ in range(50_000):
        value = {"value": 1, "children": [value]}
    with pytest.raises(ArgumentError):
        Tool(plant).bind({"tree": value})
    while value.get("children"):  # freed level by level: the interpreter's own way there recurses
        value = value.pop("children")[0]


def test_a_function_without_parameters_has_an_empty_object():
    def now(): ...

    assert parameters_of(now) == {"type": "object", "properties": {}}
    assert call(now, {}) is call(now, None) is call(now, []) is call(now, "") is None


def numpy_style(a: int, b: int):
    """Add.

    Parameters
    ----------
    a : int
        the first
    b : int
        the second

    Returns
    -------
    int
        the sum
    """


def sphinx_style(a: int, b: int):
    """Add.

    :param a: the first
    :param int b: the
        second
    :return: the sum
    """


def google_style(a: int, b: int):
    """Add.

    Args:
        a: the first
        b (int): the second

    Returns:
        c: the sum
    """


def annotated(a: Annotated[int, "the first"], b: Annotated[int, "the second"]):
    """Add."""


def numpy_line(a: int, b: int):
    """Add.

    Parameters
    ----------
    a, b : int
        both
    """


@pytest.mark.parametrize(("function", "described"), [
    *((function, ["the first", "the second"]) for function in (numpy_style, sphinx_style, google_style, annotated)),
    (numpy_line, ["both", "both"]),
])  # fmt: skip
def test_descriptions_are_read_in_every_style(function, described):
    schema = func_to_tool_schema(function)["function"]
    assert schema["description"] == "Add."
    properties = schema["parameters"]["properties"]
    assert [properties[name]["description"] for name in ("a", "b")] == described


@pytest.mark.parametrize("text", [":  :param a: x", "Add.\n\nArgs:\n    no colon", ":param a b c d: x", "Args:", None])
def test_a_malformed_docstring_is_all_description(text):
    def add(a: int): ...

    add.__doc__ = text
    schema = func_to_tool_schema(add)["function"]
    assert schema["description"].split() == (text or "").split()
    assert "description" not in schema["parameters"]["properties"]["a"]


def test_parameters_may_have_any_name():
    def odd(schema: int, _private: int, model_dump: int, title: str = ""):
        return schema, _private, model_dump, title

    assert set(parameters_of(odd)["properties"]) == {"schema", "_private", "model_dump", "title"}
    assert call(odd, {"schema": 1, "_private": 2, "model_dump": 3}) == (1, 2, 3, "")


@pytest.mark.parametrize(("arguments", "expected"), [
    ({"number": "3"}, {"number": 3}), ({"number": 3.0, "text": 12}, {"number": 3, "text": "12"}),
    ([1, "a", 2.5, "down"], {"number": 1, "text": "a", "maybe": 2.5, "choice": "down"}),
    ('{"number": 4}', {"number": 4}), ("[5]", {"number": 5}), ({"number": 1, "either": [1, 2]}, {"either": [1, 2]}),
    ({"number": 1, "either": "7"}, {"either": 7}), ({"number": 1, "table": '{"a": 1}'}, {"table": {"a": 1}}),
    ({"number": 1, "maybe": None, "text": None}, {"maybe": None, "text": "x"}),
    ({"number": 1, "choice": 3}, {"choice": 3}), ({"number": 1, "point": {"x": 2}}, {"point": Point(2.0)}),
    ({"number": 1, "box": {"corner": {"x": 1, "y": 2}}}, {"box": Box(corner=Point(1.0, 2.0))}),
    ({"number": 1, "unit": "ft"}, {"unit": Unit.FOOT}),
    ({"number": 1, "options": {"deep": True}}, {"options": {"deep": True}}),
    ({"number": 1, "loose": [{}]}, {"loose": [{}]}),
])  # fmt: skip
def test_arguments_are_converted_to_what_the_function_declares(arguments, expected):
    got = call(everything, arguments)
    assert {name: got[name] for name in expected} == expected
    assert all(type(got[name]) is type(value) for name, value in expected.items())


@pytest.mark.parametrize(("arguments", "words"), [
    ({}, "number is missing.*It takes: number, text"),
    ({"number": "three"}, "number: Input should be a valid integer"),
    ({"number": 3.5}, "number"),
    ({"number": 1, "choice": "left"}, "choice: Input should be 'up', 'down' or 3"),
    ({"number": 1, "unit": "cm"}, "unit"), ({"number": 1, "nunber": 2}, "nunber is not a parameter"),
    ({"number": 1, "either": "x"}, "either"), ({"number": 1, "box": {"corner": 3}}, "box"),
    (list(range(40)), "takes at most 10 arguments, not 40"), ("{broken", "not valid JSON"),
    (3, "must be a JSON object"), ({"number": "9" * 10_000}, "number"),
])  # fmt: skip
def test_arguments_that_do_not_fit_are_explained(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        call(everything, arguments)


def total(first: int, *rest: int, **named: int):
    return first, rest, named


def place(a: int, b: int = 2, c: int = 3, /, *rest: int):
    return a, b, c, rest


@pytest.mark.parametrize(("function", "arguments", "expected"), [
    (total, [1, 2, 3], (1, (2, 3), {})), (total, {"first": 1, "extra": 2}, (1, (), {"extra": 2})),
    (total, {"first": 1, "rest": ["2", 3]}, (1, (2, 3), {})), (place, [2, 5], (2, 5, 3, ())),
    (place, {"a": 1}, (1, 2, 3, ())), (place, {"a": 1, "b": 3}, (1, 3, 3, ())),
    (place, {"a": 1, "c": 5}, (1, 2, 5, ())), (place, {"a": 1, "rest": [9]}, (1, 2, 3, (9,))),
])  # fmt: skip
def test_any_number_of_arguments_and_positional_ones_may_be_named(function, arguments, expected):
    assert call(function, arguments) == expected


def test_arguments_of_any_number_are_a_list_to_the_model():
    rest = {"default": [], "items": {"type": "integer"}, "type": "array"}
    assert parameters_of(total)["properties"]["rest"] == rest
    with pytest.raises(ArgumentError, match=r"rest\.1: Input should be a valid integer"):
        call(total, [1, 2, "three"])


@pytest.mark.parametrize("annotation", [RolloutState, RolloutState | None])
def test_the_state_is_passed_and_not_in_the_schema(annotation):
    def remember(text: str, state: annotation):
        state.custom["text"] = text

    assert list(parameters_of(remember)["properties"]) == ["text"]
    state = RolloutState(Sample(""), "x")
    bound = Tool(remember).bind({"text": "a"}, state)
    remember(*bound.args, **bound.kwargs)
    assert state.custom == {"text": "a"}


def test_a_function_that_cannot_be_a_tool_is_refused_by_name():
    class Secret: ...

    def tell(secret: Secret): ...

    with pytest.raises(UserError, match="The tool 'tell' has a parameter that JSON cannot express"):
        func_to_tool_schema(tell)
    with pytest.raises(UserError, match="it has no name"):
        func_to_tool_schema(lambda x: x)
    with pytest.raises(UserError, match="The parameters of the tool 'max' cannot be read: no signature"):
        func_to_tool_schema(max)


def test_a_tool_that_yields_is_refused():
    def count(n: int):
        yield from range(n)

    async def count_later(n: int):
        yield n

    for function in (count, count_later):
        with pytest.raises(UserError, match=f"The tool '{function.__name__}' yields its results. Return them"):
            func_to_tool_schema(function)
