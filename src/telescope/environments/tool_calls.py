"""Reads tool calls from completions.

Two forms. `xml`: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, as Hermes and Qwen templates have it.
`function`: `add(a=1, b="x")`, a Python call with literal arguments; `<function=add>{"a": 1}</function>` (Llama 3) and
`<function=add><parameter=a>1</parameter></function>` (Qwen3-Coder) are read too. JSON arguments may also be a list (by
position) or a string of JSON.

Invariants, for any text:
- Reading never raises, and takes time linear in the text.
- An attempted call that cannot be read becomes a call with an `error`, which is reported to the model; it is not
  dropped and does not count as an answer. Any trace of the markup, or of a known tool's name before a parenthesis,
  counts as an attempt.
- Calls inside `<think>` do not count.

`as_text` writes what a tool returned: JSON where possible, in the forms that arguments have.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import json
import re
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel

from telescope.environments.parsers import strip_think_tags

ToolCallFormat = Literal["xml", "function"]

MAX_CALLS = 64
"""Calls that are read in one completion; a model in a loop writes thousands."""
MAX_CALL_CHARACTERS = 100_000
MAX_UNCLOSED = 4
"""Calls without a closing parenthesis for which the rest of a completion is searched."""

_XML_OPEN, _XML_CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION_OPEN = re.compile(r"<function=([^<>\s]{0,200})>")
_KEYS_OF_A_CALL = frozenset({"name", "arguments", "parameters", "id", "type", "index"})
_FUNCTION_CLOSE = "</function>"
_CALL_SYNTAX = re.compile(r"(?<![\w.])([A-Za-z_]\w{0,200})\(")
_STRING_OR_BRACKET = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"""|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|[()\[\]{}]', re.DOTALL
)
_PARAMETER = re.compile(r"<parameter=([^<>\s]{1,200})>")
_PARAMETER_CLOSE = "</parameter>"
_TRACES = {
    "xml": re.compile(
        r"<[^<>]{0,3}/?(?:[^<>\s]{0,8}(?:too|ool|ol_|l_c|_ca)|[^<>]{0,8}call[^<>\s]{0,3}>)|tool_call|tool.?call[^\w\s]"
        r"|[\"']arguments[\"']\s*:|[\"']name[\"']\s*:.{0,200}arguments",
        re.IGNORECASE,
    ),
    "function": re.compile(
        r"<[^<>]{0,3}/?[^<>\s]{0,8}(?:fun|unc|nct|param|aram|amet)|tion=[^<>\s]{0,200}[>{]|<[^<>\s]{1,20}=[^<>]{1,100}>",
        re.IGNORECASE,
    ),
}
"""Pieces of the markup, at least one of which is left when some of its characters are missing or wrong. None of them
occurs in ordinary text: "the tool call gave 5" and "fraction=3" are answers."""


@dataclass(slots=True)
class ToolCall:
    """One call. `arguments` is what the model wrote, not checked yet; `error` is the reason why it cannot be read."""

    name: str
    arguments: Any
    raw_text: str = ""
    error: str | None = None

    def record(self, result: ToolResult, text: str) -> dict[str, Any]:
        """Returns a row of the table `tool_calls`, without its place. `text` is what the model saw."""
        readable = self.error is None
        return {
            "name": self.name,
            "arguments": (as_text(self.arguments) if readable else self.raw_text)[:MAX_CALL_CHARACTERS],
            "result": text,
            "error": None if result.success else str(result.error)[:MAX_CALL_CHARACTERS],
            "seconds": result.seconds,
        }


@dataclass(slots=True)
class ToolResult:
    """Outcome of a call: a `result`, or an `error` with `success` False. Both become text for the model.

    `seconds` is how long the call took; the environment fills it in.
    """

    tool_name: str
    result: Any
    success: bool = True
    error: str | None = None
    seconds: float | None = None

    def __await__(self) -> Generator[Any, None, ToolResult]:
        """Itself: `await execute_tool(call)` works whether the tool is async or not."""
        return self
        yield  # makes this a generator


FORM_SHOWN: dict[str, str] = {
    "xml": '<tool_call>{"name": "...", "arguments": {...}}</tool_call>',
    "function": 'NAME(parameter=value, other="text")',
}
_FUNCTION_MARKUP = '<function=NAME>{"parameter": value}</function>'


def parse_calls(completion: str, form: ToolCallFormat, tool_names: Collection[str] | None = None) -> list[ToolCall]:
    """All calls in order, unreadable ones with their `error`. Empty when there is none.

    Only names in `tool_names` (None: all) are read as Python calls.
    """
    text = strip_think_tags(completion)
    calls = _xml_calls(text) if form == "xml" else _function_calls(text) or _call_syntax(text, tool_names)
    if not calls and _TRACES[form].search(text):
        calls = [ToolCall("", None, text, f"A tool call must have the form {FORM_SHOWN[form]}.")]
    return calls


def parse_xml_tool_calls(text: str) -> list[ToolCall]:
    """The readable `<tool_call>...</tool_call>` calls, in their order."""
    return [call for call in _xml_calls(text) if call.error is None]


def parse_function_call_syntax(text: str, tool_names: Collection[str] | None = None) -> list[ToolCall]:
    """The calls `name(arg=1, other="x")` with literal arguments, in their order. Of `tool_names` only, if given."""
    return [call for call in _call_syntax(text, tool_names) if call.error is None]


def _xml_calls(text: str) -> list[ToolCall]:
    calls: list[ToolCall] = []
    position = 0
    end = -2  # not searched yet; searched again only once `inside` has passed it
    while (start := text.find(_XML_OPEN, position)) != -1 and len(calls) < MAX_CALLS:
        inside = start + len(_XML_OPEN)
        if -1 != end < inside:
            end = text.find(_XML_CLOSE, inside)
        again = text.find(_XML_OPEN, inside)
        if end == -1 or -1 < again < end:
            stop = again if again != -1 else len(text)
            calls.append(_read_object(text[inside:stop], text[start:stop], closed=False))
            position = stop
            continue
        position = end + len(_XML_CLOSE)
        calls.append(_read_object(text[inside:end], text[start:position], closed=True))
    return [*calls, *_not_read(0 if start == -1 else text.count(_XML_OPEN, position))]


def _not_read(count: int) -> list[ToolCall]:
    return [ToolCall("", None, "", f"{count} more calls were not read: at most {MAX_CALLS}.")] if count else []


def _read_object(body: str, raw: str, *, closed: bool) -> ToolCall:
    """The call in a JSON object. One that only lacks its closing tag is read, since its meaning is clear."""
    value, problem = _read_json(body)
    if problem is not None:
        lacks = "" if closed else f" The closing {_XML_CLOSE} is missing."
        return ToolCall("", None, raw, f"The tool call is not valid JSON: {problem}.{lacks}")
    if not isinstance(value, dict):
        return ToolCall("", None, raw, f"A tool call must be a JSON object, not {_kind(value)}: {FORM_SHOWN['xml']}.")
    inner = value.get("function")
    if "name" not in value and isinstance(inner, dict):  # as OpenAI's API nests it
        value = inner
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall("", None, raw, 'A tool call must have a "name" that is a string.')
    arguments = value.get("arguments", value.get("parameters", {}))
    stray = ", ".join(repr(key[:40]) for key in value if key not in _KEYS_OF_A_CALL)
    if stray:  # ignoring them would run the tool with its defaults
        return ToolCall(name, arguments, raw, f'A tool call has no {stray}: its parameters stand in "arguments".')
    return ToolCall(name, arguments, raw, _arguments_problem(arguments))


def _arguments_problem(arguments: Any) -> str | None:
    if arguments is None or isinstance(arguments, dict | list | str):
        return None
    return f'"arguments" must be a JSON object, not {_kind(arguments)}.'


def _function_calls(text: str) -> list[ToolCall]:
    calls = []
    openings = list(_FUNCTION_OPEN.finditer(text))
    for number, opening in enumerate(openings[:MAX_CALLS]):
        limit = openings[number + 1].start() if number + 1 < len(openings) else len(text)
        end = text.find(_FUNCTION_CLOSE, opening.end(), limit)
        stop = limit if end == -1 else end + len(_FUNCTION_CLOSE)
        raw, body = text[opening.start() : stop], text[opening.end() : limit if end == -1 else end].strip()
        if not opening[1]:
            calls.append(ToolCall("", None, raw, f"A tool call must name its function: {_FUNCTION_MARKUP}."))
        elif "<parameter=" in body:
            calls.append(_read_parameters(opening[1], body, raw))
        elif not body:
            calls.append(ToolCall(opening[1], {}, raw))
        else:
            value, problem = _read_json(body)
            if problem is not None:
                lacks = "" if end != -1 else f" The closing {_FUNCTION_CLOSE} is missing."
                problem = f"The arguments of {opening[1]} are not valid JSON: {problem}.{lacks}"
            calls.append(ToolCall(opening[1], value, raw, problem or _arguments_problem(value)))
    return [*calls, *_not_read(len(openings[MAX_CALLS:]))]


def _call_syntax(text: str, tool_names: Collection[str] | None) -> list[ToolCall]:
    """Python calls. Without `tool_names`, text that is no readable call is skipped, since it may be anything."""
    calls: list[ToolCall] = []
    position = num_tried = num_unclosed = 0
    while found := _CALL_SYNTAX.search(text, position):
        if num_tried == MAX_CALLS or num_unclosed == MAX_UNCLOSED:
            return [*calls, *_not_read(len(_CALL_SYNTAX.findall(text, position)) if tool_names else 0)]
        position = found.end()
        if tool_names is not None and found[1] not in tool_names:
            continue
        num_tried += 1
        end = _closing_parenthesis(text, found.end())
        if end == -1:
            num_unclosed += 1
            call = ToolCall(
                found[1], None, text[found.start() :], f"The call of {found[1]} has no closing parenthesis."
            )
        else:
            call = _read_syntax(found[1], text[found.start() : end])
        if call.error is None or tool_names is not None:
            calls.append(call)
            position = max(position, end)
    return calls


def _closing_parenthesis(text: str, position: int) -> int:
    """Where the call ends whose arguments start at `position`. -1 when it does not."""
    depth = 1
    for token in _STRING_OR_BRACKET.finditer(text, position, position + MAX_CALL_CHARACTERS):
        if token[0] in "([{":
            depth += 1
        elif token[0] in ")]}":
            depth -= 1
            if depth == 0:
                return token.end()
    return -1


def _read_syntax(name: str, raw: str) -> ToolCall:
    form = f"write it as {name}(parameter=value) with literal values"
    try:
        call = ast.parse(raw, mode="eval").body
        assert isinstance(call, ast.Call)
        positional = [ast.literal_eval(value) for value in call.args]
        named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords if word.arg is not None}
        if len(named) < len(call.keywords) or (positional and named):
            return ToolCall(name, None, raw, f"The call of {name} cannot be read: {form}.")
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, AssertionError) as error:
        return ToolCall(name, None, raw, f"The call of {name} cannot be read ({type(error).__name__}): {form}.")
    return ToolCall(name, positional or named, raw)


def _read_parameters(name: str, body: str, raw: str) -> ToolCall:
    """`<parameter=a>1</parameter>`: values that are JSON are read as JSON, others are text."""
    arguments: dict[str, Any] = {}
    openings = list(_PARAMETER.finditer(body))
    if not openings:
        return ToolCall(name, None, raw, f"A parameter of {name} must be written <parameter=NAME>value</parameter>.")
    for number, opening in enumerate(openings):
        limit = openings[number + 1].start() if number + 1 < len(openings) else len(body)
        end = body.find(_PARAMETER_CLOSE, opening.end(), limit)
        if end == -1:
            return ToolCall(name, None, raw, f"The closing {_PARAMETER_CLOSE} of {opening[1]} is missing.")
        text = body[opening.end() : end].strip("\n")
        value, problem = _read_json(text)
        arguments[opening[1]] = text if problem is not None else value
    return ToolCall(name, arguments, raw)


def _read_json(text: str) -> tuple[Any, str | None]:
    """The value, or None and what is wrong."""
    if len(text) > MAX_CALL_CHARACTERS:
        return None, f"it is longer than {MAX_CALL_CHARACTERS} characters"
    try:
        return json.loads(text, strict=False), None  # strict: a model writes line breaks inside of strings
    except RecursionError:
        return None, "it is nested too deeply"
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        return None, str(error)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {
        bool: "a truth value",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names[type(value)]


def as_text(value: Any) -> str:
    """Returns any object as text: itself, JSON, `str()`, or its type. Consumes no iterator."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "replace")
    for write in (lambda: json.dumps(value, ensure_ascii=False, default=_plain), lambda: str(value)):
        try:
            return write()
        except Exception:  # a number with too many digits, a reference cycle, a `__str__` that raises
            continue
    return f"a result of type {type(value).__name__} that cannot be written as text"


def _plain(value: Any) -> Any:
    """A JSON value for an object that JSON does not know."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "replace")
    return str(value)
